"""The probe: what weight every rank's gradient has in every parameter's reduced gradient, measured exactly.

A reduction is linear. So the adapter sends made-up gradients, of which each rank has ones (and minus ones) at its own
positions and zeros elsewhere, through the framework's own reduction; what comes out at a position is the weight of one
rank. The weights must be those that the parameter's domain predicts. A norm cannot tell: mixed expert gradients have a
norm that looks right. Needs no data, and does not wait for gradients to leave zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from ep_hooks.agreement import gather_objects, portable, raise_first
from ep_hooks.domains import STAGE_AXES, Placement, PlacementKind
from ep_hooks.findings import Finding, Kind, Severity
from ep_hooks.reductions import Key, reduce_buckets
from ep_hooks.replay import Pattern, Region, Replayed
from ep_hooks.session import Session
from ep_hooks.table import Entry
from ep_hooks.topology import Axis

__all__ = ["ProbeResult", "ProbeRow", "Scale", "expected_weights", "merged", "run_probe"]

_MOST_ROUNDS = 8
_WINDOW = 4_096
"""Elements that are read back, at each end of a gradient; at least four for every rank."""
_MOST_FINDINGS = 32
"""By rank; the rest is counted."""


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """One parameter on one rank.

    Attributes:
        weights: by rank of the rank set, what its gradient counts; ``None`` where it could not be seen.
        expected: the same, as the domain predicts; empty if it predicts nothing.
        verdict: ``"right"``, ``"wrong"`` or ``"undetermined"``.
        why: why it is undetermined, or who reduces it.
    """

    id: str
    weights: tuple[float | None, ...]
    expected: tuple[float, ...]
    verdict: str
    why: str


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What this rank has measured, and what all ranks have found.

    Attributes:
        rows: this rank's parameters.
        findings: the same on all ranks.
    """

    rows: tuple[ProbeRow, ...]
    findings: tuple[Finding, ...]


def run_probe(session: Session, reduce: Callable[[], object] | None = None) -> ProbeResult:
    """Probe all parameters. A collective over the rank set.

    Args:
        reduce: the reduction that the training loop itself runs after the backward, if it does.

    Collectives: the framework's own and one per bucket of pending sums, once to eight times, and two exchanges.
    Gradients, buffers and generators are as before when it returns; each gradient is copied for that time.

    Raises:
        UnfinishedGradientError: gradients are accumulated, and not reduced yet.
        UnsupportedError: the adapter cannot replay; says why. On all ranks together.
    """
    ranks, entries = session.topology.ranks, session.entries
    problem: Exception | None = None
    plan: list[Replayed] = []
    try:
        plan = session.adapter.replay_plan(entries)
    except Exception as error:  # raised on all ranks together
        problem = error
    smallest = min((n for p in plan if (n := torch.Size(p.region.shape).numel())), default=len(ranks))
    answers = gather_objects((portable(problem), smallest), session.group)
    raise_first(problem, [answer[0] for answer in answers], ranks)
    period = len(ranks)
    least = min(answer[1] for answer in answers)  # two rounds where elements are too few for both signs
    rounds = 1 if least >= 2 * period else 2 if least >= period else min(period, _MOST_ROUNDS)
    seen = [_Seen(period) for _ in entries]
    for turn in range(rounds):
        shift = turn * -(-period // rounds) if least < period else 0
        pattern = Pattern(ranks.index(session.rank), period, shift, negated=turn % 2 == 1)
        with session.replaced_gradients(), session.adapter.replayed(pattern) as gradients:
            if reduce is not None:
                reduce()
            reduced = _synced(session, gradients(entries))
            for part, what, value in zip(seen, plan, reduced, strict=True):
                if value is not None:
                    part.read(value, what.region, pattern)
    local = session.config.probe.local_axes
    if reduce is not None:
        plan = [what if what.by else replace(what, by="the given function") for what in plan]
    scales = _scales_in_use(list(zip(entries, seen, plan, strict=True)), session, local)
    rows, findings = [], []
    for entry, part, what in zip(entries, seen, plan, strict=True):
        expected = expected_weights(entry, what, session.rank, local, scales.get(entry.domain.name, Scale.MEAN))
        row, found = _judge(entry, part, what, session, expected)
        rows.append(row)
        findings += found
    mine = sorted(findings, key=lambda f: -f.severity)[:_MOST_FINDINGS]
    return ProbeResult(tuple(rows), merged(gather_objects(mine, session.group)))


def _scales_in_use(
    measured: Sequence[tuple[Entry, _Seen, Replayed]], session: Session, local: Sequence[str]
) -> dict[str, Scale]:
    """By domain, the scale that most of its parameters have on all ranks; parameters that fit both have no vote."""
    votes: Counter[tuple[str, Scale]] = Counter()
    for entry, part, what in measured:
        fitting = [
            scale
            for scale in Scale
            if not _wrong(part, session.topology.ranks, expected_weights(entry, what, session.rank, local, scale))
        ]
        if len(fitting) == 1:
            votes[entry.domain.name, fitting[0]] += 1
    total: Counter[tuple[str, Scale]] = sum(gather_objects(votes, session.group), Counter())
    names = {name for name, _ in total}
    return {name: max(Scale, key=lambda scale: total[name, scale]) for name in names}  # on a tie, the first


def _wrong(seen: _Seen, ranks: Sequence[int], expected: Mapping[int, float]) -> dict[int, float]:
    """Ranks whose measured weight is not the expected one."""
    tolerance = max(seen.resolution, 1e-6)
    wrong = {}
    for other, weight in zip(ranks, seen.weights, strict=True):
        wanted = expected.get(other, 0.0)
        if weight is not None and abs(weight - wanted) > tolerance * max(abs(weight), wanted):
            wrong[other] = weight
    return wrong


class _Seen:
    """The weights of one parameter, by rank, as they are read."""

    def __init__(self, period: int) -> None:
        self.period = period
        self.low = torch.full((period,), torch.inf, dtype=torch.float64)
        self.high = torch.full((period,), -torch.inf, dtype=torch.float64)
        self.resolution = 0.0

    def read(self, value: Tensor, region: Region, pattern: Pattern) -> None:
        window = max(_WINDOW, 4 * self.period)
        flat = (value.real if value.is_complex() else value).detach().reshape(-1)
        if flat.numel() > 2 * window and (first := region.flat_offset) is not None:
            n = flat.numel()
            positions = torch.cat([torch.arange(first, first + window), torch.arange(first + n - window, first + n)])
            flat = torch.cat([flat[:window], flat[-window:]])
        else:
            positions = region.positions()
        rank, sign = pattern.owners(positions)
        numbers = flat.double().cpu() * sign
        self.low.scatter_reduce_(0, rank, numbers, "amin")
        self.high.scatter_reduce_(0, rank, numbers, "amax")
        self.resolution = max(self.resolution, 4 * torch.finfo(value.dtype).eps)

    @property
    def weights(self) -> tuple[float | None, ...]:
        return tuple(h if h > -torch.inf else None for h in self.high.tolist())

    @property
    def uneven(self) -> bool:
        """Whether elements of one parameter were weighed differently."""
        known = self.high > -torch.inf
        return bool(((self.high - self.low)[known] > self.resolution * self.high[known].abs() + 1e-12).any())


def _synced(session: Session, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients after our own pending sums; nothing is written."""
    out = list(gradients)
    if session.buckets:
        keys: list[Key] = [(entry.id, entry.domain.replicas[0]) for entry in session.entries]
        pending = {key: g for key, g, e in zip(keys, gradients, session.entries, strict=True) if e.domain.reductions}
        values = reduce_buckets(
            session.buckets, pending, set(pending), session.process_groups, session.device, check=False
        ).values
        out = [values.get(key, gradient) for key, gradient in zip(keys, gradients, strict=True)]
    return out


# ------------------------------------------------------------------------------------------------------- expectation


class Scale(StrEnum):
    """By what a framework divides the sum over the ranks that add to a gradient. Both are in use for experts."""

    MEAN = "mean"
    """Their number."""
    GLOBAL_MEAN = "global-mean"
    """The number of all ranks that have data, so that a token weighs the same in expert and dense gradients."""


def expected_weights(
    entry: Entry, what: Replayed, rank: int, local_axes: Sequence[str], scale: Scale = Scale.MEAN
) -> dict[int, float]:
    """Rank -> what its gradient must count in this rank's gradient; ranks that are left out must not count.

    The framework takes the mean over all ranks that hold the parameter or a part of its storage, along every axis but
    the local ones and those with a pending reduction of ours, which come after it.
    """
    shared, pending = [], []
    for axis, placement in entry.domain.placements:
        if placement.kind is PlacementKind.PARTIAL:
            pending.append(placement.restricted(axis))
        elif _adds_up(axis, placement, what) and axis.name not in local_axes:
            shared.append(placement.restricted(axis))
    distinct = [axis for axis, _ in entry.domain.placements if axis.name in entry.evidence.domain.distinct]
    every = [axis for axis, _ in entry.domain.placements if axis.name not in {*local_axes, *STAGE_AXES}]
    divisors = {reduction.stage: reduction.divisor for reduction in entry.domain.reductions}

    def after(member: int, stages: int) -> dict[int, float]:
        """The weights in the gradient of ``member`` after the first ``stages`` pending reductions."""
        if stages == 0:
            ranks = [
                r for r in _closure(member, shared) if all(a.coordinate(r) == a.coordinate(member) for a in distinct)
            ]
            return dict.fromkeys(ranks, 1 / len(ranks if scale is Scale.MEAN else _closure(member, every)))
        group = pending[stages - 1].group_of(member)
        total: dict[int, float] = {}
        for other in group:
            for source, weight in after(other, stages - 1).items():
                total[source] = total.get(source, 0.0) + weight
        divisor = divisors.get(stages - 1, 1.0) if len(group) > 1 else 1.0
        return {source: weight / divisor for source, weight in total.items()}

    return after(rank, len(pending))


def _adds_up(axis: Axis, placement: Placement, what: Replayed) -> bool:
    """Whether the ranks along ``axis`` add to one gradient: they hold all of it, or each a part of its storage."""
    return placement.kind is PlacementKind.REPLICATE or axis.name in what.storage


def _closure(rank: int, axes: Sequence[Axis]) -> tuple[int, ...]:
    found, todo = {rank}, [rank]
    while todo:
        member = todo.pop()
        for axis in axes:
            for other in axis.group_of(member):
                if other not in found:
                    found.add(other)
                    todo.append(other)
    return tuple(sorted(found))


# ----------------------------------------------------------------------------------------------------------- judgment


def _judge(
    entry: Entry, seen: _Seen, what: Replayed, session: Session, expected: Mapping[int, float]
) -> tuple[ProbeRow, list[Finding]]:
    ranks, rank = session.topology.ranks, session.rank
    weights = seen.weights
    vector = tuple(expected.get(other, 0.0) for other in ranks)
    row = ProbeRow(entry.id, weights, vector, "undetermined", "this rank holds no element of it")
    if all(weight is None for weight in weights):
        return row, []
    measured = {other: weight for other, weight in zip(ranks, weights, strict=True) if weight is not None}
    reduced_by_us = bool(entry.domain.reductions)
    if not what.by and not reduced_by_us and len(expected) > 1 and _only(rank, measured):
        why = "nobody whom the adapter can replay reduces it; the audit compares its gradients"
        return replace(row, why=why), []
    wrong = _wrong(seen, ranks, expected)
    if wrong or seen.uneven:
        return replace(row, verdict="wrong", why=what.by), [_finding(entry, what, measured, wrong, expected, session)]
    hidden = len(ranks) - len(measured)
    why = f"{hidden} rank(s) could not be seen" if hidden else what.by or "its own rank"
    return replace(row, verdict="right", why=why), []


def _only(rank: int, measured: Mapping[int, float]) -> bool:
    return all((weight != 0) == (other == rank) for other, weight in measured.items())


def _finding(
    entry: Entry,
    what: Replayed,
    measured: Mapping[int, float],
    wrong: Mapping[int, float],
    expected: Mapping[int, float],
    session: Session,
) -> Finding:
    rank = session.rank
    foreign = tuple(other for other, weight in wrong.items() if other not in expected and weight != 0)
    absent = tuple(other for other, weight in wrong.items() if weight == 0)
    by = what.by or "the pending reductions"
    if foreign:
        kind, concerned = Kind.WRONG_RANKS, foreign
        consequence = (
            f"the gradient of this piece on rank {rank} is mixed with those of rank(s) {_list(foreign)}, which hold "
            "another one: both are trained with the wrong gradient"
        )
        remedy = _remedy_foreign(entry, what)
    elif absent and len(absent) == len(expected) - 1 and rank not in absent:
        kind, concerned = Kind.NOT_REDUCED, absent
        consequence = f"the replicas on ranks {_list(tuple(expected))} are trained with different gradients and drift"
        remedy = _remedy_absent(entry, what)
    elif absent:
        kind = Kind.RANK_IGNORED if len(absent) == 1 else Kind.WRONG_RANKS
        concerned = absent
        consequence = f"what rank(s) {_list(absent)} learn of it is lost"
        remedy = _remedy_absent(entry, what)
    else:
        kind, concerned = Kind.WRONG_WEIGHT, tuple(wrong) or tuple(expected)
        ratios = {round(weight / expected[other], 6) for other, weight in wrong.items() if expected.get(other)}
        factor = f"{ratios.pop():g} times" if len(ratios) == 1 else "unevenly many times"
        if not wrong:
            factor = "by element different times (not summed: MAX or MIN?)"
        consequence = f"its gradient is {factor} what it should be, so norm, clip and update are wrong"
        remedy = (
            f"let {by} divide by {1 / max(expected.values()):g}, as a mean over the ranks that hold it, or declare the "
            "divisor (`domains`: {partial: ..., divisor: ...}) if it is meant"
        )
    return Finding(
        kind,
        Severity.ERROR,
        entry.id,
        _axis(entry, rank, concerned),
        tuple(sorted({rank, *concerned})),
        f"{entry.domain.name} ({entry.domain.text}), so {_in_words(expected)}",
        f"{by}: {_in_words({other: w for other, w in measured.items() if w != 0})}",
        f"{entry.evidence.kind.name.lower()}: {entry.evidence.source}; probe",
        consequence,
        remedy,
    )


def _remedy_foreign(entry: Entry, what: Replayed) -> str:
    if "DistributedDataParallel" in what.by:
        return (
            f'call ep_hooks.attach(model) with `- {{match: "{entry.id}", domain: {entry.domain.name}}}` before '
            "DistributedDataParallel(model), or put the name into the module's _ddp_params_and_buffers_to_ignore"
        )
    if what.by:
        return f"give {what.by} a mesh without the axis that tells the pieces apart, or declare the parameter dense"
    return "declare the axis over which it is summed: it is the sum of ep_hooks' own pending reduction"


def _remedy_absent(entry: Entry, what: Replayed) -> str:
    if what.by:
        return f"let {what.by} reduce over all ranks that hold it (its mesh or process group leaves some out)"
    return f'declare the reduction: `- {{match: "{entry.id}", domain: {{AXIS: avg}}, rest: replicate}}`'


def _axis(entry: Entry, rank: int, concerned: Sequence[int]) -> str:
    """The smallest axis whose group of ``rank`` holds the ranks concerned; empty if none does."""
    groups = [
        (len(group), axis.name)
        for axis, _ in entry.domain.placements
        if len(group := axis.group_of(rank)) > 1 and set(concerned) <= set(group)
    ]
    return min(groups)[1] if groups else ""


def _in_words(weights: Mapping[int, float]) -> str:
    if not weights:
        return "no rank counts"
    by_weight: dict[float, list[int]] = {}
    for rank, weight in weights.items():
        by_weight.setdefault(round(weight, 9), []).append(rank)
    return ", ".join(f"rank(s) {_list(ranks)} count {weight:g}" for weight, ranks in sorted(by_weight.items()))


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def merged(found: Sequence[Sequence[Finding]]) -> tuple[Finding, ...]:
    """Findings of all ranks; one about the same parameter, kind and axis on several ranks becomes one."""
    together: dict[tuple[Kind, str, str, int], Finding] = {}
    for finding in (f for of_rank in found for f in of_rank):
        key = (finding.kind, finding.id, finding.axis, finding.step)
        other = together.setdefault(key, finding)
        together[key] = replace(other, ranks=tuple(sorted({*other.ranks, *finding.ranks})))
    return tuple(together.values())
