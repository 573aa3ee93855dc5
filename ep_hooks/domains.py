"""Reduction domains: which ranks hold the same gradient, and which reductions are still to be run.

The words are DTensor's. Along one axis a gradient is ``Shard`` (disjoint pieces: add), ``Replicate`` (the same
value: count once) or ``Partial`` (still to be reduced, with an operator and a divisor). "Replicated" alone is no
domain: no synchronisation, SUM over TP, AVG over DP and SUM over EP are four different needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from ep_hooks.errors import DomainError
from ep_hooks.topology import Axis, Groups, Topology

__all__ = [
    "REPLICATE",
    "SHARD",
    "STAGE_AXES",
    "Domain",
    "Evidence",
    "EvidenceKind",
    "PendingReduction",
    "Placement",
    "PlacementKind",
    "ResolvedDomain",
    "partial",
]

STAGE_AXES = ("pp",)
"""Axes whose ranks hold different parameters: a parameter is pinned to one coordinate unless a rule ties it."""

_TENSOR_AXES = ("tp", "etp")
"""Axes along which the built-in expert domains say nothing: whether a weight is cut there depends on the layer."""


class PlacementKind(StrEnum):
    """How a gradient relates to its siblings along one axis."""

    SHARD = "shard"
    REPLICATE = "replicate"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Placement:
    """Placement along one axis.

    Attributes:
        kind: shard, replicate or partial.
        op: for partial: ``"sum"`` or ``"avg"`` (SUM divided by the group size).
        divisor: for partial: the SUM is divided by this number (after ``op``), for frameworks that pre-scale.
        at: coordinates along the axis that take part (negative from the end); all if empty. A tied embedding
            lives on the first and the last pipeline stage only: ``at=(0, -1)``.
    """

    kind: PlacementKind
    op: str = "sum"
    divisor: float = 1.0
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.op not in ("sum", "avg"):
            raise DomainError(f"a pending reduction is 'sum' or 'avg', got {self.op!r}")
        if not 0 < self.divisor < math.inf:
            raise DomainError(f"the divisor of a pending reduction must be finite and > 0, got {self.divisor}")

    def restricted(self, axis: Axis) -> Axis:
        """``axis`` with only the coordinates in ``at``."""
        if not self.at:
            return axis
        groups = []
        for group in axis.groups:
            if any(not -len(group) <= i < len(group) for i in self.at):
                raise DomainError(f"coordinates {list(self.at)} do not exist on axis {axis.name!r} of {len(group)}")
            groups.append(tuple(dict.fromkeys(group[i] for i in self.at)))
        return Axis(axis.name, tuple(groups))


SHARD = Placement(PlacementKind.SHARD)
REPLICATE = Placement(PlacementKind.REPLICATE)


def partial(op: str = "sum", divisor: float = 1.0, at: Sequence[int] = ()) -> Placement:
    """A pending reduction: SUM or AVG over the axis, then division by ``divisor``.

    The mean is over the ranks of the axis: one that holds no such parameter, or has no gradient, counts as zero, as in
    DistributedDataParallel.
    """
    return Placement(PlacementKind.PARTIAL, op, divisor, tuple(at))


@dataclass(frozen=True)
class PendingReduction:
    """One reduction that must run before anybody reads the gradient.

    Attributes:
        ranks: the group, in coordinate order.
        divisor: the SUM is divided by this (group size for AVG).
        axis: the axis it runs over, for messages.
        stage: its place among the domain's pending reductions. Counted over all axes, so that ranks in uneven
            groups agree on it: one that is alone on the first axis still runs the second reduction as the second.
    """

    ranks: tuple[int, ...]
    divisor: float
    axis: str
    stage: int = 0


@dataclass(frozen=True)
class ResolvedDomain:
    """A domain seen from one rank.

    Attributes:
        name: label under which the norm is reported.
        replicas: ranks that hold the same piece once pending reductions have run, ascending. The holder set
            identifies the piece: two pieces of one parameter have disjoint holder sets.
        reductions: pending reductions in the order in which they run.
        text: the placements in words, for tables and messages.
        placements: all axes with what the domain says along them, those that `rest` stands for included.
    """

    name: str
    replicas: tuple[int, ...]
    reductions: tuple[PendingReduction, ...] = ()
    text: str = ""
    placements: tuple[tuple[Axis, Placement], ...] = ()


class EvidenceKind(IntEnum):
    """Where a domain came from; a larger value is stronger."""

    ASSUMED = 0
    STRUCTURE = 1
    ATTRIBUTE = 2
    PLACEMENT = 3
    DECLARED = 4


@dataclass(frozen=True)
class Evidence:
    """One statement about a parameter's domain: what kind, from where, and what it says."""

    kind: EvidenceKind
    source: str
    domain: Domain


@dataclass(frozen=True)
class Domain:
    """Placements along named axes, independent of any rank.

    Attributes:
        name: label for logs; parameters of one label share one norm in the report.
        placements: axis name, or an explicit :class:`Axis`, -> placement. Order matters for pending
            reductions: they run in the order given.
        rest: placement along the axes that are not listed. ``None``: a listed axis must cover them, else the
            domain cannot be resolved (fail closed).
        unsaid: axes that ``rest`` does not speak of.
        distinct: axes whose ranks hold different experts. (Along another sharded axis they may hold parts of one
            tensor, whose gradient they reduce together.)
    """

    name: str
    placements: Mapping[str | Axis, Placement] = field(default_factory=dict)
    rest: Placement | None = None
    unsaid: tuple[str, ...] = ()
    distinct: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "_-." for c in self.name):
            raise DomainError(f"a domain's name may hold letters, digits, '_', '-' and '.', got {self.name!r}")
        if self.rest is not None and self.rest.kind is PlacementKind.PARTIAL:
            raise DomainError(f"domain {self.name!r}: a pending reduction needs a named axis, it cannot be `rest`")

    @classmethod
    def replicated(cls, name: str = "dense") -> Domain:
        """The same gradient on all ranks (of a pipeline stage): counted once, nothing pending."""
        return cls(name, {}, REPLICATE)

    @classmethod
    def expert(cls, axis: str = "ep", name: str = "expert") -> Domain:
        """Distinct along ``axis``, replicated along the other data axes."""
        return cls(name, {axis: SHARD}, REPLICATE, _TENSOR_AXES, (axis,))

    @classmethod
    def ep_sum(cls, axis: str = "ep", name: str = "ep_sum") -> Domain:
        """A factor shared by all experts: its gradient is to be summed over ``axis``, then it is replicated."""
        return cls(name, {axis: partial("sum")}, REPLICATE, _TENSOR_AXES)

    @classmethod
    def of_replicas(cls, name: str, replicas: Groups, pending: Sequence[tuple[Axis, Placement]] = ()) -> Domain:
        """A domain given by its holder sets alone: each group of ``replicas`` holds one piece."""
        holders: dict[str | Axis, Placement] = {Axis("holders", tuple(map(tuple, replicas))): REPLICATE}
        return cls(name, {**holders, **dict(pending)})

    @classmethod
    def named(cls, name: str) -> Domain:
        """The built-in domain called ``dense`` / ``replicated``, ``expert`` or ``ep_sum``."""
        if name in ("dense", "replicated"):
            return cls.replicated()
        if name == "expert":
            return cls.expert()
        if name == "ep_sum":
            return cls.ep_sum()
        raise DomainError(f"no domain {name!r}; built in are dense, replicated, expert and ep_sum, or give placements")

    def merged(self, placed: Mapping[str, Placement], source: str) -> Domain:
        """This domain completed by ``placed``, what a device mesh says of the axes it names.

        Raises:
            DomainError: both name an axis and disagree about it.
        """
        placements: dict[str | Axis, Placement] = dict(self.placements)
        for axis, seen in placed.items():
            said = self.placements.get(axis)
            if said is None:
                placements[axis] = seen
            elif said.kind is not seen.kind and PlacementKind.PARTIAL not in (said.kind, seen.kind):
                raise DomainError(
                    f"domain {self.name!r} says {said.kind.value} along axis {axis!r}, "
                    f"but {source} says {seen.kind.value}"
                )
        return replace(self, placements=placements)

    def resolve(self, topology: Topology, rank: int) -> ResolvedDomain:
        """The domain seen from ``rank``: its replicas and its pending reductions. Runs no collective.

        Raises:
            TopologyError: an axis that the topology does not have.
            DomainError: an axis with several ranks about which the domain says nothing, or a divisor along an
                axis on which this rank is alone.
        """
        listed = [
            (topology.axis(key) if isinstance(key, str) else key, placement)
            for key, placement in self.placements.items()
        ]
        self._no_lost_divisor(topology, rank)
        explicit = any(not isinstance(key, str) for key in self.placements)
        factorisation = self._factorisation(topology)
        if not explicit:
            listed += self._rest(factorisation, [axis for axis, _ in listed], topology, rank)
        # Ranks that add to a sum hold the piece; where holders are listed, others may add without holding it.
        apart = (PlacementKind.SHARD, PlacementKind.PARTIAL) if explicit else (PlacementKind.SHARD,)
        sharing = [p.restricted(axis) for axis, p in listed if p.kind not in apart]
        reductions = []
        pending = [(axis, placement) for axis, placement in listed if placement.kind is PlacementKind.PARTIAL]
        for stage, (axis, placement) in enumerate(pending):
            group = placement.restricted(axis).group_of(rank)
            if len(group) > 1:
                divisor = placement.divisor * (len(group) if placement.op == "avg" else 1)
                reductions.append(PendingReduction(group, divisor, axis.name, stage))
        return ResolvedDomain(
            self.name, topology.closure(rank, sharing), tuple(reductions), _text(listed), tuple(listed)
        )

    def _no_lost_divisor(self, topology: Topology, rank: int) -> None:
        for key, placement in self.placements.items():
            if placement.divisor == 1:
                continue
            axis = placement.restricted(topology.axis(key) if isinstance(key, str) else key)
            if (isinstance(key, str) and axis.largest < 2) or (rank,) in axis.groups:
                who = "only one rank takes part" if axis.largest < 2 else f"rank {rank} is alone"
                raise DomainError(
                    f"domain {self.name!r} divides by {placement.divisor:g} along axis {axis.name!r}, on which {who}: "
                    "no reduction runs that could divide. Say `replicate` along it and scale the loss"
                )

    def _factorisation(self, topology: Topology) -> tuple[Axis, ...]:
        """The first factorisation that holds all named axes; with no name, the first that has stages."""
        names = {key for key in self.placements if isinstance(key, str)}
        candidates = list(topology.factorisations.values())
        for axes in candidates:
            if names and names <= {axis.name for axis in axes}:
                return axes
        if not names:
            staged = [axes for axes in candidates if any(axis.name in STAGE_AXES for axis in axes)]
            return (staged or candidates or [(Axis("ranks", (topology.ranks,)),)])[0]
        return (Axis("ranks", (topology.ranks,)),)

    def _rest(
        self, factorisation: Sequence[Axis], listed: list[Axis], topology: Topology, rank: int
    ) -> list[tuple[Axis, Placement]]:
        """Placements of the axes that are not listed and that the listed axes do not span."""
        rest: list[tuple[Axis, Placement]] = []
        missing = []
        stages = [axis for axis in factorisation if axis.name in STAGE_AXES]
        flat = {axis.name for axis in factorisation if any(_crosses(axis, stage) for stage in stages)} - {*STAGE_AXES}
        # Groups may be uneven: a rank that is alone on an axis shares its piece with those of its holders that are not.
        inside = [axis for axis in factorisation if axis.name not in {*STAGE_AXES, *flat}]
        within = topology.closure(rank, listed + inside)
        # An axis made of others, such as a mesh of the whole world that was split, comes after them and is spanned.
        for axis in sorted(factorisation, key=lambda axis: (axis.name not in STAGE_AXES, axis.largest)):
            known = listed + [other for other, _ in rest]
            if axis.name not in {*STAGE_AXES, *flat}:
                known = [other for other in known if other.name not in STAGE_AXES]
            if topology.spans(known, axis, within):
                continue
            if axis.name in STAGE_AXES:
                rest.append((axis, SHARD))
            elif listed and self.rest is not None and axis.name not in topology.axes:
                # All ranks as one axis: `rest` along it would make one piece of what the listed axes keep apart.
                raise DomainError(
                    f"domain {self.name!r} names axes of different factorisations "
                    f"({', '.join(a.name for a in listed)}), which do not reach all ranks, and says {self.rest.kind} "
                    "about the rest; name axes of one factorisation, or list axes that reach all ranks"
                )
            elif self.rest is None or axis.name in self.unsaid:
                missing.append(axis)
            else:
                rest.append((axis, self.rest))
        if missing:
            raise DomainError(
                f"domain {self.name!r} says nothing about "
                + ", ".join(f"axis {axis.name!r} ({axis.largest} ranks)" for axis in missing)
            )
        return rest


def _crosses(axis: Axis, stage: Axis) -> bool:
    """Whether some group of ``axis`` holds two ranks of one group of ``stage``."""
    return any(len({stage.group_of(rank) for rank in group}) < len(group) for group in axis.groups)


def _text(listed: Sequence[tuple[Axis, Placement]]) -> str:
    words = []
    for axis, placement in listed:
        if axis.largest > 1:
            over = "" if placement.divisor == 1 else f" / {placement.divisor:g}"
            op = f"({placement.op}{over})" if placement.kind is PlacementKind.PARTIAL else ""
            words.append(f"{axis.name}:{placement.kind.value}{op}")
    return " ".join(words) or "local"
