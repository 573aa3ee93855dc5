"""Every ready configuration loads; trainer.yaml and accelerate.yaml are run in test_trainer.py, fsdp2.yaml here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ep_hooks
from tests.support.layouts import build_layout
from tests.support.oracle import norm_of
from tests.support.ranks import run_ranks

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_loads(path: Path) -> None:
    assert ep_hooks.load_config(path).domains


def _fsdp2() -> tuple[float, float]:
    layout = build_layout("local", ep=2)
    optimizer = torch.optim.SGD(layout.model.parameters(), lr=1.0)
    with ep_hooks.attach(layout.model, optimizer, mesh=layout.meshes, config=CONFIGS / "fsdp2.yaml") as handle:
        layout.backward()
        true = norm_of(layout.reference())
        optimizer.step()
        assert handle.session is not None and handle.session.last is not None
        return float(handle.session.last.norm) / true, float(ep_hooks.total_norm(layout.model))


@pytest.mark.parametrize("world", [2, 4])
def test_fsdp2(world: int) -> None:
    for ratio, after in run_ranks(_fsdp2, world):
        assert ratio == pytest.approx(1, abs=1e-6)
        assert after <= 1 + 1e-5
