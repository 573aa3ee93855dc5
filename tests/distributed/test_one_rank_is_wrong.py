"""One rank alone is given something wrong: all ranks raise, soon, and say what and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ep_hooks
from ep_hooks import rendezvous
from ep_hooks.groups import distributed_rank
from tests.support.ranks import run_ranks

PATIENCE = 2.0


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        ep_hooks.declare(parameter, "dense")
        parameter.grad = torch.ones_like(parameter)
    return model


def _attach(wrong: dict[str, Any], right: dict[str, Any], rank: int) -> None:
    rendezvous.PATIENCE = PATIENCE
    ep_hooks.attach(_model(), **(wrong if distributed_rank() == rank else right)).remove()


def _attach_no_module(rank: int) -> None:
    rendezvous.PATIENCE = PATIENCE
    ep_hooks.attach("model" if distributed_rank() == rank else _model())  # type: ignore[arg-type]  # the fault


def _attach_twice(rank: int) -> None:
    rendezvous.PATIENCE = PATIENCE
    model = _model()
    with ep_hooks.attach(model):
        ep_hooks.attach(model if distributed_rank() == rank else _model())


def _messages(function: Callable[..., Any], world: int, *args: Any) -> list[str]:
    outcomes = run_ranks(function, world, *args, timeout=40, catch=True, fresh=True)
    assert not any(outcome.timed_out or outcome.ok for outcome in outcomes), outcomes
    return [f"{outcome.error_type}: {outcome.error_text}" for outcome in outcomes]


WRONG_AT_SET_UP: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown key": ({"config": {"nonsense": 1}}, {}, "unknown key"),
    "no mapping": ({"config": "no-such-file.yaml"}, {}, "cannot read"),
    "mode": ({"mode": "enforced"}, {}, "enforced"),
    "off": ({"mode": "off"}, {}, "switched off"),
    "value": ({"config": {"sync": {"bucket_mb": -1}}}, {}, "bucket_mb"),
    "with ranks": ({"config": {"nonsense": 1, "ranks": [0, 1]}}, {"config": {"ranks": [0, 1]}}, "unknown key"),
    "other ranks": ({"config": {"ranks": [0, 1]}}, {"config": {"ranks": [0, 1, 2]}}, "rank set"),
    "optimizer": ({"optimizer": "adam"}, {}, "optimizer, got str"),
}


@pytest.mark.parametrize("case", WRONG_AT_SET_UP)
@pytest.mark.parametrize("rank", [0, 1])
def test_at_set_up(case: str, rank: int) -> None:
    wrong, right, expected = WRONG_AT_SET_UP[case]
    world = 3 if case == "other ranks" else 2
    if case == "off":
        outcomes = run_ranks(_attach, 2, wrong, right, rank, timeout=40, catch=True, fresh=True)
        assert outcomes[rank].ok, "nothing is what it was asked to do"
        assert expected in str(outcomes[1 - rank].error_text) and f"rank {rank} does not take part" in str(
            outcomes[1 - rank].error_text
        )
        return
    messages = _messages(_attach, world, wrong, right, rank)
    assert all(expected in message for message in messages), messages
    if case != "other ranks":
        assert f"rank {rank} failed: " in messages[1 - rank]


@pytest.mark.parametrize("function", [_attach_no_module, _attach_twice])
def test_the_model_is_wrong(function: Callable[[int], None]) -> None:
    messages = _messages(function, 2, 1)
    assert "rank 1 failed: " in messages[0] and messages[0].split("failed: ")[1] in messages[1]


def _clip(wrong: dict[str, Any], rank: int, attached: bool, first: bool) -> None:
    rendezvous.PATIENCE = PATIENCE
    model = _model()
    if attached:
        ep_hooks.attach(model)
    if not first:
        ep_hooks.clip_grad_norm_(model, 1.0)
    ep_hooks.clip_grad_norm_(**{"parameters": model, "max_norm": 1.0, **(wrong if distributed_rank() == rank else {})})


WRONG_IN_A_CALL: dict[str, tuple[dict[str, Any], str]] = {
    "max_norm": ({"max_norm": -1.0}, "max_norm must be"),
    "nan": ({"max_norm": float("nan")}, "max_norm must be"),
    "norm_type": ({"norm_type": 0}, "norm_type must be"),
    "other max_norm": ({"max_norm": 2.0}, "another max_norm: "),
    "other norm_type": ({"norm_type": 1.0}, "another norm_type: "),
    "assume": ({"assume": "replicate"}, "assume must be"),
    "no parameters": ({"parameters": 5}, "not iterable"),
}


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "ad hoc"])
@pytest.mark.parametrize("case", WRONG_IN_A_CALL)
def test_in_a_call(case: str, attached: bool, first: bool) -> None:
    wrong, expected = WRONG_IN_A_CALL[case]
    messages = _messages(_clip, 2, wrong, 1, attached, first)
    assert all(expected in message for message in messages), messages


def _step_schedule() -> list[float]:
    model = _model()
    with ep_hooks.attach(model):
        return [float(ep_hooks.clip_grad_norm_(model, 100.0 + step)) for step in range(20)]


def test_a_limit_that_follows_a_schedule_is_no_fault() -> None:
    for norms in run_ranks(_step_schedule, 2):
        assert norms == pytest.approx([8**0.5] * 20)


def _sparse(attached: bool) -> float:
    """Only rank 1 has a gradient that cannot be summed."""
    model = _model()
    if attached:
        ep_hooks.attach(model)
    model.weight.grad = torch.ones(2, 3).to_sparse() if distributed_rank() == 1 else torch.ones(2, 3)
    return float(ep_hooks.clip_grad_norm_(model, 1.0))


@pytest.mark.parametrize("attached", [True, False], ids=["attached", "ad hoc"])
def test_a_gradient_that_cannot_be_summed(attached: bool) -> None:
    messages = _messages(_sparse, 2, attached)
    assert "rank 1 failed: " in messages[0]


def _sparse_embedding() -> None:
    ep_hooks.attach(nn.Embedding(5, 3, sparse=True))


def test_a_sparse_embedding_is_refused_by_name() -> None:
    assert all("sparse=False" in message for message in _messages(_sparse_embedding, 2))
