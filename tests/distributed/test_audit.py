"""The audit: correct runs have no finding above info; each planted fault is found, with the parameter and the kind."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ep_hooks
from ep_hooks.findings import Finding, Kind, Severity, read_records
from ep_hooks.html_report import page, summarise
from tests.support.layouts import build_layout
from tests.support.ranks import run_ranks
from tests.support.tinymoe import Options

ON: dict[str, Any] = {"audit": {"level": "warn", "every": 3}, "probe": {"at_first_step": True}}
MORE = Options(tied_head=True, expert_bias=True, shared_expert=True)


def _clean(name: str, ep: int, options: Options | None) -> list[str]:
    layout = build_layout(name, ep, options)
    optimizer = torch.optim.AdamW(layout.model.parameters(), lr=1e-3, foreach=False)
    config = {**layout.config, **ON}
    with ep_hooks.attach(layout.model, optimizer, mesh=layout.meshes, config=config) as handle:
        for step in range(4):
            layout.backward(step)
            handle.clip(0.1)
            optimizer.step()
        assert handle.audit is not None and handle.audit.step == 4
        return [str(finding) for finding in handle.findings if finding.severity > Severity.INFO]


LAYOUTS = [
    ("fsdp_only", 2, 1, MORE),
    ("titan", 4, 2, MORE),
    ("local", 4, 2, None),
    ("ignored", 4, 4, None),
    ("hsdp_titan", 4, 2, None),
    ("hsdp_local", 4, 2, MORE),
    ("tp_ep", 4, 2, None),
    ("ddp_local", 2, 2, MORE),
    ("ddp_local", 4, 4, None),
    ("shared_lora", 2, 2, Options(shared_lora=True)),
    ("ddp_lora", 4, 4, None),
    ("partial", 2, 2, None),
]


@pytest.mark.parametrize(("name", "world", "ep", "options"), LAYOUTS)
def test_correct_runs_have_no_finding(name: str, world: int, ep: int, options: Options | None) -> None:
    for findings in run_ranks(_clean, world, name, ep, options, timeout=90):
        assert findings == []


class Net(nn.Module):
    """Names and shapes of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(6, 9)
        self.twin = nn.Linear(6, 9)
        self.tower = nn.Linear(9, 4)
        torch.manual_seed(2 + (dist.get_rank() if dist.is_initialized() else 0))
        self.branch = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A number."""
        return self.branch(self.tower((self.trunk(x) * self.twin(x)).tanh())).square().sum()


DENSE = ("tower.bias", "tower.weight", "trunk.bias", "trunk.weight", "twin.bias", "twin.weight")
EXPERTS = ("branch.bias", "branch.weight")
CONFIG: dict[str, Any] = {
    "axes": {"ep": -1},
    "domains": [{"match": "branch.*", "domain": "expert"}, {"match": "t*", "domain": "dense"}],
    "audit": {"level": "warn"},
}


class Run:
    """Two audited steps of DDP with EP-local experts, and a place for a fault in each phase."""

    def __init__(self, fault: str) -> None:
        self.fault, self.rank = fault, dist.get_rank()
        net = Net()
        ignored = [f"branch.{leaf}" for leaf in ("weight", "bias")]
        if fault == "a dense parameter is ignored":
            ignored.append("trunk.weight")
        if fault == "flag missing":
            ignored = []
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
        self.net, self.ddp = net, DistributedDataParallel(net)
        held = list(net.parameters())
        if fault == "no optimizer holds it":
            held = [p for p in held if p is not net.tower.bias]
        self.optimizers = [torch.optim.AdamW(held, lr=1e-2, foreach=False)]
        if fault == "two optimizers hold it":
            self.optimizers.append(torch.optim.SGD([net.tower.weight], lr=1e-2))
        if fault == "missing initial broadcast" and self.rank == 1:
            net.twin.bias.data += 1e-3

    def train(self, config: dict[str, Any]) -> list[Finding]:
        """Findings of two steps."""
        before: dict[str, torch.Tensor] = {}
        with ep_hooks.attach(
            self.ddp, self.optimizers, config=config, mode="enforce" if self.acts else "observe"
        ) as handle:
            for step in range(2):
                self.ddp.zero_grad()
                torch.manual_seed(100 * step + self.rank)
                self.ddp(torch.randn(5, 6)).backward()
                self.after_backward(step, before)
                handle.clip(0.5)
                self.after_clip(step)
                for optimizer in self.optimizers:
                    optimizer.step()
                self.after_step(step)
            return handle.findings

    @property
    def acts(self) -> bool:
        """In enforce an expert that DDP averages is refused at once; here it is to be measured."""
        return self.fault != "flag missing"

    def after_backward(self, step: int, before: dict[str, torch.Tensor]) -> None:
        """Faults in gradients of one rank, in the second step."""
        trunk, twin = self.net.trunk.weight.grad, self.net.twin.weight.grad
        assert trunk is not None and twin is not None
        odd = step == 1 and self.rank == dist.get_world_size() - 1
        if odd and self.fault == "zeroed":
            trunk.zero_()
        if odd and self.fault == "stale":
            trunk.copy_(before["trunk"])
        if odd and self.fault == "another buffer":
            trunk.copy_(twin)
        if odd and self.fault == "sign":
            trunk.neg_()
        if odd and self.fault == "one element":
            trunk.view(-1)[trunk.abs().argmax()] *= 1.01
        if step == 1 and self.fault == "reduced twice on one rank" and self.rank == 0:
            trunk.mul_(dist.get_world_size())
        if step == 1 and self.fault == "experts reduced in the loop":
            for p in self.net.branch.parameters():
                dist.all_reduce(p.grad)
        before["trunk"] = trunk.clone()

    def after_clip(self, step: int) -> None:
        """Faults between clip and optimizer."""
        scale = {"clipped twice": 0.5, "clip taken back": 3.0}.get(self.fault)
        if self.fault == "coefficient per rank":
            scale = 0.8 + 0.1 * self.rank
        if step == 1 and scale is not None:
            for p in self.net.parameters():
                assert p.grad is not None
                p.grad.mul_(scale)

    def after_step(self, step: int) -> None:
        """Faults in weights and optimizer states after the first step: the second audit sees them."""
        if step == 0 and self.rank == 1:
            if self.fault == "weights drift":
                self.net.trunk.weight.data[0, 0] += 1e-4
            if self.fault == "states drift":
                self.optimizers[0].state[self.net.trunk.bias]["exp_avg_sq"] *= 1.01


FAULTS: list[tuple[str, Kind, tuple[str, ...]]] = [
    ("a dense parameter is ignored", Kind.NOT_REDUCED, ("trunk.weight",)),
    ("flag missing", Kind.PIECES_EQUAL, EXPERTS),
    ("no optimizer holds it", Kind.NOT_UPDATED, ("tower.bias",)),
    ("two optimizers hold it", Kind.NOT_UPDATED, ("tower.weight",)),
    ("missing initial broadcast", Kind.REPLICAS_DIFFER, ("twin.bias",)),
    ("zeroed", Kind.NOT_REDUCED, ("trunk.weight",)),
    ("stale", Kind.NOT_REDUCED, ("trunk.weight",)),
    ("another buffer", Kind.NOT_REDUCED, ("trunk.weight",)),
    ("sign", Kind.NOT_REDUCED, ("trunk.weight",)),
    ("one element", Kind.NOT_REDUCED, ("trunk.weight",)),
    ("reduced twice on one rank", Kind.NOT_REDUCED, ("trunk.weight",)),
    ("experts reduced in the loop", Kind.WRONG_RANKS, EXPERTS),
    ("clipped twice", Kind.CLIP, ("",)),
    ("clip taken back", Kind.CLIP, ("",)),
    ("coefficient per rank", Kind.CLIP, ("",)),
    ("weights drift", Kind.REPLICAS_DIFFER, ("trunk.weight",)),
    ("states drift", Kind.STATE_DIFFERS, ("trunk.bias",)),
]


def _planted(fault: str) -> list[Finding]:
    return Run(fault).train(CONFIG)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("fault", "kind", "names"), [("nothing", None, ()), *FAULTS])
def test_planted_faults_are_found(fault: str, kind: Kind | None, names: tuple[str, ...], world: int) -> None:
    ranks = run_ranks(_planted, world, fault, timeout=60)
    for findings in ranks:
        assert findings == ranks[0], "the same findings on all ranks"
        serious = [finding for finding in findings if finding.severity > Severity.INFO]
        first = [finding for finding in serious if finding.step == min(f.step for f in serious)]
        assert {finding.kind for finding in first} == ({kind} if kind else set())
        assert {finding.id for finding in first} == set(names)
        assert all(finding.remedy and finding.consequence and finding.seen for finding in serious)


def _raised(fault: str) -> str:
    Run(fault).train({**CONFIG, "audit": {"level": "raise"}})
    return ""


def test_level_raise_raises_on_all_ranks() -> None:
    for outcome in run_ranks(_raised, 2, "zeroed", catch=True, timeout=60):
        assert outcome.raised("MeasuredFaultError")
        assert "not-reduced: trunk.weight along ep" in outcome.error_text


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    from tests.conformance.test_fake_distributed_optimizer import Collectives

    counts = [0]
    with Collectives() as collectives:
        yield counts
    counts[0] = collectives.count


def _collectives() -> list[int]:
    run = Run("nothing")
    seen = []
    with ep_hooks.attach(run.ddp, run.optimizers, config={**CONFIG, "audit": {"level": "warn", "every": 5}}) as handle:
        for _ in range(6):
            run.ddp.zero_grad()
            run.ddp(torch.randn(5, 6)).backward()
            with _counted() as counts:
                handle.clip(0.5)
                run.optimizers[0].step()
            seen.append(counts[0])
    return seen


def test_between_audited_steps_nothing_is_exchanged() -> None:
    for counts in run_ranks(_collectives, 2, timeout=60):
        assert counts[2:4] == [1, 1] and counts[5] == 1
        assert min(counts[0], counts[1], counts[4]) > 1


def _recorded(path: str) -> list[str]:
    config = {**CONFIG, "record": path, "probe": {"at_first_step": True}}
    return [finding.id for finding in Run("states drift").train(config)]


def test_findings_are_recorded_once_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.jsonl"
    assert run_ranks(_recorded, 2, str(path), timeout=60) == [["trunk.bias"]] * 2
    records = list(read_records(path.read_text().splitlines()))
    kinds = Counter(record["type"] for record in records)
    assert kinds == {"run": 1, "domain": 2, "probe": 8, "norm": 2, "finding": 1}
    assert {tuple(r["weights"]) for r in records if r["type"] == "probe"} == {(0.5, 0.5), (1.0, 0.0)}
    assert Finding.from_record(records[-2]).kind is Kind.STATE_DIFFERS
    text = page(summarise(path))
    assert "1 error found" in text and "trunk.bias" in text and "state-differs" in text


def _unwritable() -> int:
    return len(Run("nothing").train({**CONFIG, "record": "/proc/no/such/run.jsonl"}))


def test_a_record_that_cannot_be_written_stops_no_training() -> None:
    assert run_ranks(_unwritable, 2, timeout=60) == [0, 0]
