"""Experts with equal bits: declared ones are counted apart and cleared by the probe, undeclared ones are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ep_hooks
from ep_hooks.findings import Kind, Severity
from tests.support.ranks import run_ranks


class Experts(nn.ModuleList):
    """A class of which the configuration says that it holds experts."""


class Net(nn.Module):
    """A dense weight and an expert on each rank, all of them with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 1, bias=False)
        self.experts = Experts([nn.Linear(2, 1, bias=False)])
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Linear in the weights; on equal batches gradients are equal too."""
        return self.gate(x).sum() + self.experts[0](x).sum()


def _train(declared: bool, ignored: bool, probe: bool) -> dict[str, object]:
    """Norm of a step whose gradients are (1, 0) for each weight of each rank, and the findings."""
    net = Net()
    if ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["experts.0.weight"])
    model = DistributedDataParallel(net)
    config = {
        "axes": {"ep": -1},
        "expert_containers": ["*.Experts"],
        "domains": [{"match": "experts.*", "domain": "expert"}] if declared else [],
        "audit": {"level": "warn"},
        "mode": "enforce" if ignored else "observe",
    }
    with ep_hooks.attach(model, torch.optim.SGD(net.parameters(), lr=0.1), config=config) as handle:
        model(torch.tensor([[1.0, 0.0]])).backward()
        if probe:
            handle.probe()
        norm = float(handle.clip(math.inf).norm)
        serious = [(f.kind, f.severity, f.id) for f in handle.findings if f.severity > Severity.INFO]
    return {"norm": norm, "findings": serious}


@pytest.mark.parametrize("world", [2, 4])
def test_declared_experts_are_counted_apart(world: int) -> None:
    suspicion = [(Kind.PIECES_EQUAL, Severity.WARNING, "experts.0.weight")]
    for probe in (False, True):
        for seen in run_ranks(_train, world, True, True, probe, timeout=60):
            assert seen["norm"] == pytest.approx(math.sqrt(1 + world), rel=1e-6), "sqrt(3) on two ranks, not sqrt(2)"
            assert seen["findings"] == ([] if probe else suspicion), "only the probe can tell"


@pytest.mark.parametrize("world", [2, 4])
def test_declared_experts_that_are_mixed_are_not_cleared(world: int) -> None:
    for seen in run_ranks(_train, world, True, False, True, timeout=60):
        kinds = {kind for kind, severity, _ in seen["findings"] if severity is Severity.ERROR}
        assert kinds == {Kind.WRONG_RANKS, Kind.PIECES_EQUAL}


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_undeclared_experts_are_refused(world: int, ignored: bool) -> None:
    for outcome in run_ranks(_train, world, False, ignored, False, timeout=60, catch=True):
        assert outcome.raised("UndeclaredParameterError"), outcome
        assert "experts.0.weight" in outcome.error_text
