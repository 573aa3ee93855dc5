"""A distributed optimizer through the adapter interface: sums on reduced gradients, norm and clip on late copies.

The truth is computed in one process, in float64, from the gradients that each rank is told to have; the values are
such that bfloat16 buffers hold them exactly.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ep_hooks.audit import Audit
from ep_hooks.config import AuditConfig, load_config
from ep_hooks.domains import EvidenceKind
from ep_hooks.errors import AlreadyReducedError, DomainError, UnfinishedGradientError
from ep_hooks.findings import Finding, Severity
from ep_hooks.modes import Mode
from ep_hooks.plan import Holding
from ep_hooks.session import Session
from ep_hooks.table import Source
from tests.support.fake_distributed_optimizer import FakeAdapter, FakeDistributedOptimizer
from tests.support.ranks import run_ranks

DENSE = {"dense_embedding": (5, 7), "dense_norm": (3,), "dense_scale": (), "dense_empty": (0, 4), "dense_out": (7, 5)}
SHARED = {"shared_a": (3, 5), "shared_b": (2,)}
EXPERT = (4, 3)
LAYOUTS = [(2, 1), (2, 2), (4, 2), (4, 4)]
"""(world, ep)"""


def _experts(ep: int, coordinate: int) -> range:
    """Global numbers of the experts of one coordinate of ``ep``: uneven, and none on the last of several."""
    counts = [3] if ep == 1 else [2 + i % 2 for i in range(ep - 1)] + [0]
    first = sum(counts[:coordinate])
    return range(first, first + counts[coordinate])


def _gradient(name: str, rank: int, step: int) -> Tensor | None:
    """What ``rank`` computes for a parameter: small integers, and nothing at all on some ranks."""
    if (name == "dense_norm" and rank % 2) or name == "shared_b" or (name.endswith("_1") and rank == 0):
        return None
    shape = {**DENSE, **SHARED}.get(name, EXPERT)
    seed = sum(map(ord, name)) * 1000 + rank * 10 + step
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def _truth(world: int, ep: int, step: int) -> dict[str, Tensor]:
    """Every logical gradient, float64, from the definition: who averages, who sums."""

    def mean(name: str, ranks: list[int]) -> Tensor:
        shape = {**DENSE, **SHARED}.get(name, EXPERT)
        given = [_gradient(name, rank, step) for rank in ranks]
        return sum((g.double() for g in given if g is not None), torch.zeros(shape).double()) / len(ranks)

    ranks = list(range(world))
    on = {i: [rank for rank in ranks if rank % ep == i] for i in range(ep)}
    truth = {name: mean(name, ranks) for name in DENSE}
    truth |= {name: sum(mean(name, on[i]) for i in on) for name in SHARED}
    truth |= {f"expert_{e}": mean(f"expert_{e}", on[i]) for i in on for e in _experts(ep, i)}
    return truth


class Run:
    """The fake framework on this rank, with a session over it."""

    def __init__(self, ep: int, dtype: torch.dtype = torch.bfloat16, mode: Mode = Mode.ENFORCE) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.ep, self.world = ep, world
        self.model = nn.Module()
        shapes = {**DENSE, **{f"expert_{e}": EXPERT for e in _experts(ep, rank % ep)}, **SHARED}
        for name, shape in shapes.items():
            start = rank % ep if name in SHARED else 1  # shared factors that each rank of ep initialised by itself
            self.model.register_parameter(name, nn.Parameter(torch.full(shape, float(start), dtype=torch.bfloat16)))
        same_ep = [dist.new_group(list(range(i, world, ep))) for i in range(ep)]
        self.framework = FakeDistributedOptimizer(
            self.model, {"dp": dist.group.WORLD, "edp": same_ep[rank % ep]}, dtype, lr=0.5
        )
        self.adapter = FakeAdapter(self.framework, ep)
        self.session = Session(self.adapter, load_config(None), mode)
        self.framework.reload_weights()

    def backward(self, step: int, micro_batches: int = 1) -> None:
        self.framework.zero_grad()
        for _ in range(micro_batches):
            for name, p in self.model.named_parameters():
                gradient = _gradient(name, dist.get_rank(), step)
                p.grad = None if gradient is None else gradient.to(p.dtype) / micro_batches
            self.framework.accumulate()

    def ready(self, step: int) -> None:
        self.backward(step)
        self.framework.reduce()
        self.session.sync()
        self.framework.copy_gradients()


def _norm(truth: dict[str, Tensor], norm_type: float) -> float:
    return float(torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in truth.values()]), norm_type))


class Collectives(TorchDispatchMode):
    """Counts what goes through torch.distributed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def _measured(ep: int, dtype: torch.dtype) -> dict[str, list[float]]:
    run = Run(ep, dtype)
    seen: dict[str, list[float]] = {"norm": [], "truth": [], "sync": [], "measure": []}
    for step, norm_type in enumerate([2.0, 1.0, 2.5, math.inf]):
        run.backward(step)
        run.framework.reduce()
        with Collectives() as collectives:
            run.session.sync()
        seen["sync"].append(collectives.count)
        run.framework.copy_gradients()
        with Collectives() as collectives:
            verdict = run.session.measure(norm_type)
        seen["measure"].append(collectives.count)
        seen["norm"] += [float(verdict.norm), float(run.session.measure(norm_type).norm)]
        seen["truth"] += [_norm(_truth(run.world, ep, step), norm_type)] * 2
    run.session.close()
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16 buffers", "fp32 buffers"])
@pytest.mark.parametrize(("world", "ep"), LAYOUTS)
def test_norm_of_interval_shards(world: int, ep: int, dtype: torch.dtype) -> None:
    ranks = run_ranks(_measured, world, ep, dtype)
    for seen in ranks:
        assert seen["norm"] == pytest.approx(seen["truth"], rel=1e-6)
        assert seen["norm"] == ranks[0]["norm"]
        assert seen["measure"] == [1] * 4, "one collective for the norm, however the gradients are laid out"
        assert seen["sync"] == [int(ep > 1)] * 4, "one bucket of pending sums, none where ep has one rank"


def _trained(ep: int) -> dict[str, Any]:
    run = Run(ep)
    worst = 0.0
    first = {name: p.detach().double().clone() for name, p in run.model.named_parameters()}
    main = dict(first)
    after = []
    for step in range(3):
        run.ready(step)
        truth = _truth(run.world, ep, step)
        verdict = run.session.clip(3.0)
        after.append(float(run.session.measure().norm))
        run.framework.step()
        coefficient = 3.0 / (_norm(truth, 2.0) + 1e-6)
        for name, p in run.model.named_parameters():
            main[name] = main[name] - 0.5 * coefficient * truth[name]
            if p.numel():
                worst = max(worst, float(((p.double() - main[name]).abs() / main[name].abs().clamp(min=0.1)).max()))
        assert float(verdict.norm) == pytest.approx(_norm(truth, 2.0), rel=1e-6)
    run.session.close()
    weights = {name: p.detach().float() for name, p in run.model.named_parameters()}
    return {"first": first["shared_a"], "after": after, "worst": worst, "weights": weights}


@pytest.mark.parametrize(("world", "ep"), LAYOUTS)
def test_clip_scales_the_copies_that_the_optimizer_consumes(world: int, ep: int) -> None:
    ranks = run_ranks(_trained, world, ep)
    for seen in ranks:
        assert seen["after"] == pytest.approx([3.0] * 3, rel=1e-5)
        assert seen["worst"] < 2**-8, "weights are those of the oracle, rounded once to bfloat16"
        for name in (*DENSE, *SHARED):
            assert torch.equal(seen["weights"][name], ranks[0]["weights"][name]), name
        assert float(seen["first"].max()) == 0, "the set-up has made the replicas over ep equal"


def _stock(ep: int) -> tuple[float, float]:
    """Without the sums: what the framework alone gives."""
    run = Run(ep)
    run.backward(0)
    run.framework.reduce()
    run.framework.copy_gradients()
    squares = torch.zeros(1, dtype=torch.float64)
    for kind, buffer in run.framework.buffers.items():
        if kind != "shared" or dist.get_rank() % ep == 0:  # its usual rule: the first rank of a model-parallel group
            squares += sum(main.grad.double().square().sum() for main in buffer.main.values() if main.grad is not None)
    dist.all_reduce(squares)
    run.session.close()
    return float(squares.sqrt()), _norm(_truth(run.world, ep, 0), 2.0)


def test_the_fake_alone_gives_another_norm() -> None:
    for norm, truth in run_ranks(_stock, 4, 2):
        assert abs(norm / truth - 1) > 0.01, "the layout is one in which the pending sums matter"


def _observed(ep: int) -> tuple[float, float, bool]:
    run = Run(ep, mode=Mode.OBSERVE)
    run.backward(0)
    run.framework.reduce()
    before = {kind: buffer.data.clone() for kind, buffer in run.framework.buffers.items()}
    run.session.sync()
    run.framework.copy_gradients()
    norm = float(run.session.clip(0.1).norm)
    copies = {
        name: main.grad
        for buffer in run.framework.buffers.values()
        for name, main in buffer.main.items()
        if main.grad is not None
    }
    same = all(torch.equal(buffer.data, before[kind]) for kind, buffer in run.framework.buffers.items()) and all(
        torch.equal(copy, buffer.own(name, buffer.views[name]).float())
        for buffer in run.framework.buffers.values()
        for name, copy in copies.items()
        if name in buffer.views
    )
    run.session.close()
    return norm, _norm(_truth(run.world, ep, 0), 2.0), same


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2)])
def test_observe_reads_the_sums_and_writes_nothing(world: int, ep: int) -> None:
    for norm, truth, same in run_ranks(_observed, world, ep):
        assert norm == pytest.approx(truth, rel=1e-6)
        assert same


def _mistakes(which: str) -> str:
    run = Run(2)
    run.ready(0)
    run.session.measure()
    run.backward(1)
    run.framework.reduce()
    if which == "no sync":
        run.framework.copy_gradients()
    elif which == "not copied":
        run.session.sync()
    elif which == "changed on one rank":
        run.session.sync()
        if dist.get_rank() == 1:
            run.framework.buffers["shared"].data.mul_(0.5)
        run.framework.copy_gradients()
    elif which == "reduced before":
        shared = run.framework.buffers["shared"].data
        dist.all_reduce(shared)
        run.session.sync()
        run.framework.copy_gradients()
    try:
        run.session.measure()
    except (UnfinishedGradientError, AlreadyReducedError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.session.close()
    return ""


@pytest.mark.parametrize(
    ("which", "error", "words"),
    [
        ("no sync", "UnfinishedGradientError", "sync() has not seen"),
        ("changed on one rank", "UnfinishedGradientError", "sync() has not seen"),
        ("not copied", "UnfinishedGradientError", "not copied"),
        ("reduced before", "AlreadyReducedError", "shared_a"),
    ],
)
def test_steps_out_of_order_are_an_error_on_all_ranks(which: str, error: str, words: str) -> None:
    for said in run_ranks(_mistakes, 2, which):
        assert said.startswith(error)
        assert words in said


def _never_synced() -> str:
    """The first step of an integration that forgets ``sync``: the copies were made without the sums."""
    run = Run(2)
    run.backward(0)
    run.framework.reduce()
    run.framework.copy_gradients()
    try:
        return str(float(run.session.measure().norm))
    except UnfinishedGradientError as error:
        return str(error)
    finally:
        run.session.close()


def test_a_forgotten_sync_is_an_error_in_the_first_step() -> None:
    for said in run_ranks(_never_synced, 4):
        assert "sync() has not seen" in said


def _nonfinite() -> tuple[bool, list[float]]:
    """NaN in one element: one rank owns it, all decide alike. And no gradient anywhere."""
    run = Run(2)
    run.backward(0)
    run.framework.reduce()
    if dist.get_rank() == 1:
        run.framework.buffers["dense"].data[run.framework.buffers["dense"].size] = math.nan
    run.session.sync()
    run.framework.copy_gradients()
    found = bool(run.session.measure().nonfinite)
    run.framework.zero_grad()
    run.framework.reduce()
    run.session.sync()
    run.framework.copy_gradients()
    norms = [float(run.session.measure().norm)]
    for buffer in run.framework.buffers.values():
        for main in buffer.main.values():
            main.grad = None  # on all ranks; then on one
    norms.append(float(run.session.clip(1.0).norm))
    run.ready(0)
    if dist.get_rank() == 0:
        for main in run.framework.buffers["expert"].main.values():
            main.grad = None
    norms.append(float(run.session.clip(1.0).norm))
    run.session.close()
    return found, norms


def test_nan_in_one_interval_and_none_on_some_ranks() -> None:
    truth = _truth(2, 2, 0)
    without = {name: g for name, g in truth.items() if not name.startswith("expert")}
    for found, norms in run_ranks(_nonfinite, 2):
        assert found
        assert norms == pytest.approx([0, 0, _norm(without, 2.0)], rel=1e-6)


def _bad_intervals(which: str) -> str:
    adapter_sources = FakeAdapter.sources

    def sources(self: FakeAdapter, topology: Any) -> Any:
        for source in adapter_sources(self, topology):
            held = source.holdings
            if source.id == "dense_embedding":
                held = held[1:] if which == "gap" else (*held, Holding(0, 30, 35))
            yield Source(source.id, source.parameter, source.shape, source.dtype, source.evidence, holdings=held)

    FakeAdapter.sources = sources  # type: ignore[method-assign]  # undone below
    try:
        Run(2).session.close()
    except DomainError as error:
        return str(error)
    finally:
        FakeAdapter.sources = adapter_sources  # type: ignore[method-assign]  # as it was
    return ""


@pytest.mark.parametrize(("which", "words"), [("gap", "nobody holds"), ("two", "several intervals")])
def test_intervals_that_cannot_be_are_an_error_at_set_up(which: str, words: str) -> None:
    for said in run_ranks(_bad_intervals, 2, which):
        assert words in said
        assert "dense_embedding" in said


def _assumed(spoil: bool) -> float:
    """All domains are only assumed; intervals of different ranks are of different elements."""
    run = Run(2)
    for entry in run.session.entries:
        evidence = replace(entry.evidence, kind=EvidenceKind.ASSUMED)
        object.__setattr__(entry, "evidence", evidence)
    run.session._assumed = True
    run.ready(0)
    shared = run.framework.buffers["shared"].main["shared_a"].grad
    if spoil and dist.get_rank() == 1 and shared is not None:
        shared[-1] += 1.0
    return float(run.session.measure().norm)


def test_assumed_replicas_are_compared_where_they_hold_the_same_elements() -> None:
    truth = _norm(_truth(4, 2, 0), 2.0)
    assert run_ranks(_assumed, 4, False) == pytest.approx([truth] * 4, rel=1e-6)
    for outcome in run_ranks(_assumed, 4, True, catch=True):
        assert outcome.raised("UndeclaredParameterError"), outcome
        assert "shared_a" in outcome.error_text


def _audited(ep: int, fault: str) -> list[tuple[str, str]]:
    """Findings above info of two steps; a fault in the second one."""
    run = Run(ep)
    found: list[Finding] = []
    config = AuditConfig(level="warn")
    run.session.auditor = Audit(run.session, config, list, lambda: (False, frozenset()), lambda f, _: found.extend(f))
    for step in range(2):
        run.ready(step)
        main = run.framework.buffers["expert"].main
        if step and fault == "weights drift" and dist.get_rank() == 0:
            next(p for name, p in run.model.named_parameters() if name in DENSE).data.add_(1)
        if step and fault == "a slice is lost":
            mine = [i for i, piece in enumerate(run.session.slices) if run.session.entries[piece.index].id in main]
            if mine:
                run.session._slices = tuple(s for i, s in enumerate(run.session.slices) if i != mine[0])
        run.session.clip(3.0)
        run.framework.step()
    run.session.close()
    return [(finding.kind.value, finding.id) for finding in found if finding.severity > Severity.INFO]


@pytest.mark.parametrize(("world", "ep"), LAYOUTS)
def test_the_audit_finds_nothing_in_interval_shards(world: int, ep: int) -> None:
    for findings in run_ranks(_audited, world, ep, "nothing"):
        assert findings == []


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2)])
def test_the_audit_sees_faults_of_interval_shards(world: int, ep: int) -> None:
    ranks = run_ranks(_audited, world, ep, "weights drift")
    assert all(findings == ranks[0] for findings in ranks)
    assert ranks[0] == [("replicas-differ", next(iter(DENSE)))]
    ranks = run_ranks(_audited, world, ep, "a slice is lost")
    assert all(findings == ranks[0] for findings in ranks)
    assert {kind for kind, _ in ranks[0]} == {"miscounted"} and all("expert" in name for _, name in ranks[0])
