"""The demonstration: its model's gradients are those of one process, and its verdict is earned."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks


def _gradients() -> dict[str, float]:
    """Largest relative difference of every gradient to that of one process with the whole model and all batches."""
    from ep_hooks.integrations.demo.expert_parallel import make_expert_local
    from ep_hooks.integrations.demo.text import TextBlocks
    from ep_hooks.integrations.demo.worker import build_model

    rank, world = dist.get_rank(), dist.get_world_size()
    whole = build_model()
    local = copy.deepcopy(whole)
    make_expert_local(local)
    text = TextBlocks(64)
    rows = torch.stack([text[i]["input_ids"] for i in range(2 * world)])
    whole(input_ids=rows, labels=rows).loss.backward()
    mine = rows[2 * rank : 2 * rank + 2]
    local(input_ids=mine, labels=mine).loss.backward()
    true = {name: p.grad for name, p in whole.named_parameters()}
    errors = {}
    for name, parameter in local.named_parameters():
        expected = true[name]
        if ".experts." in name:
            expected = expected.chunk(world)[rank]
        else:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        errors[name] = float((parameter.grad - expected).norm() / (expected.norm() + 1e-12))
    return errors


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_of_the_demo_model_are_those_of_one_process(world: int) -> None:
    for errors in run_ranks(_gradients, world, timeout=120):
        assert any(".experts." in name for name in errors)
        assert max(errors.values()) < 1e-5, errors


def test_demo_runs_and_shows_both_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stock run must be wrong here, and the other one right, or there is nothing to demonstrate."""
    from ep_hooks.integrations.demo import main

    tables: list[Sequence[main.DemoRow]] = []
    table = main._table
    monkeypatch.setattr(main, "_table", lambda rows, *rest: tables.append(rows) or table(rows, *rest))
    plot = tmp_path / "demo.png"
    assert main.run_demo(ranks=2, steps=3, plot=plot, max_norm=1.0) == 0
    out = capfd.readouterr().out
    assert "HF Trainer, stock" in out
    assert "HF Trainer, ep_hooks" in out
    assert "right on every rank in every step" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    stock, ours = tables[0]
    assert ours.right and ours.spread == 0.0
    assert not stock.right and stock.ratios[0] < 0.995 and stock.spread > 1e-3 and stock.drift > 0.0
