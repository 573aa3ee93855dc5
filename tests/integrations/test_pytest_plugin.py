"""What a framework's own tests use: functions on ranks, and assertions about domains and weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ep_hooks
from ep_hooks.testing import assert_domains, assert_probe, run_on_ranks

pytest_plugins = ["pytester"]
Ranks = Callable[..., list[Any]]


def _reduced(factor: float) -> float:
    tensor = torch.tensor(factor * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return float(tensor)


def test_the_fixture_runs_ranks(ep_hooks_ranks: Ranks) -> None:
    assert ep_hooks_ranks(_reduced, 3, 2.0) == [12.0] * 3


def _fails(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raises":
            raise KeyError("on purpose")
        if how == "dies":
            os._exit(7)
        time.sleep(60)


@pytest.mark.parametrize(
    ("how", "words"), [("raises", "KeyError: 'on purpose'"), ("dies", "exit code 7"), ("hangs", "hung")]
)
def test_a_rank_that_fails_is_told(how: str, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=f"(?s)_fails failed on 2 ranks.*rank 1.*{words}"):
        run_on_ranks(_fails, 2, how, timeout=15)
    assert time.monotonic() - start < 40


def _asserted(ignore: bool) -> list[str]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"stem": nn.Linear(3, 3), "bank": nn.Linear(3, 2)})
    names = ["bank.weight", "bank.bias"] if ignore else []
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DistributedDataParallel(model)
    config = {"axes": {"ep": -1}, "domains": [{"match": "bank.*", "domain": "expert"}]}
    texts = []
    with ep_hooks.attach(ddp, config=config, mode="observe"):
        assert_domains(ddp, {"stem.*": "dense", "bank.*": "expert"})
        for check in (
            lambda: assert_domains(ddp, {"stem.*": "dense", "bank.weight": "dense", "none.*": "expert"}),
            lambda: assert_probe(ddp),
        ):
            try:
                check()
                texts.append("")
            except AssertionError as error:
                texts.append(str(error))
    return texts


def test_domains_and_weights_are_asserted(ep_hooks_ranks: Ranks) -> None:
    for domains, weights in ep_hooks_ranks(_asserted, 2, True):
        assert "bank.weight: is expert, expected dense" in domains
        assert "bank.bias: is expert, expected nothing (no pattern matches it)" in domains
        assert "'none.*' matches no trainable parameter" in domains
        assert weights == ""
    for _, weights in ep_hooks_ranks(_asserted, 2, False):
        assert "wrong-ranks: bank.bias along ep" in weights and "wrong-ranks: bank.weight" in weights


def test_pytest_finds_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import torch.distributed as dist\n"
        "def rank():\n    return dist.get_rank()\n"
        "def test_it(ep_hooks_ranks):\n    assert ep_hooks_ranks(rank, 2) == [0, 1]\n"
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
