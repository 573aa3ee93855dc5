"""The plan: which elements of each gradient this rank counts, and in which order pending reductions run.

Pure functions of what is given: no tensors, no process group, no communication. Each logical element is counted by
exactly one of its holders. A replicated piece is cut flat among them, so that the norm pass over gradients with R
replicas costs 1/R; the cut is exact for any R because the contributions are added, never divided.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ep_hooks.domains import PendingReduction
from ep_hooks.errors import DomainError

__all__ = ["Bucket", "BucketItem", "Holding", "PlanItem", "Slice", "owned_intervals", "plan_buckets", "plan_norm"]

MIN_SLICE = 4096
"""Pieces are cut into slices of at least this many elements; below it a whole piece goes to one holder."""


@dataclass(frozen=True, slots=True)
class Holding:
    """``rank`` holds elements [lo, hi) of a piece, in the piece's logical row-major order."""

    rank: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class PlanItem:
    """What the plan needs to know of one parameter's piece on one rank.

    Attributes:
        id: logical id of the parameter.
        numel: elements of the whole piece.
        slot: index of its domain in the packed result.
        replicas: ranks that hold the whole piece, ascending.
        holdings: where holders hold intervals only (ZeRO, distributed optimizer), every holder's interval, the
            same on all of them. Also the way to say that a holder set does not count: a tied parameter that is laid
            out differently on two stages is counted by one of them, never by a slice of both.
    """

    id: str
    numel: int
    slot: int
    replicas: tuple[int, ...]
    holdings: tuple[Holding, ...] | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """This rank counts elements [lo, hi) of the piece of item ``index``, in the packed slot ``slot``."""

    index: int
    lo: int
    hi: int
    slot: int


def owned_intervals(item: PlanItem, rank: int) -> list[tuple[int, int]]:
    """Intervals of ``item``'s piece that ``rank`` counts, ascending and disjoint.

    Raises:
        DomainError: some element of the piece has no holder.
    """
    if item.holdings is None:
        owned = _cut(item.id, 0, item.numel, item.replicas, rank)
        return [owned] if owned else []
    holdings = [h for h in item.holdings if h.lo < h.hi]
    cuts = sorted({0, item.numel} | {h.lo for h in holdings} | {h.hi for h in holdings})
    if cuts[0] < 0 or cuts[-1] > item.numel:
        raise DomainError(f"{item.id}: an interval reaches outside the piece of {item.numel} elements: {holdings}")
    intervals = []
    for lo, hi in pairwise(cuts):
        holders = tuple(sorted({h.rank for h in holdings if h.lo <= lo and hi <= h.hi}))
        if not holders:
            raise DomainError(f"{item.id}: nobody holds elements [{lo}, {hi}) of {item.numel}; holders: {holdings}")
        if rank in holders and (owned := _cut(item.id, lo, hi, holders, rank)):
            intervals.append(owned)
    return intervals


def _cut(name: str, lo: int, hi: int, holders: Sequence[int], rank: int) -> tuple[int, int] | None:
    """The part of [lo, hi) that ``rank`` counts: part ``i*n//parts``, rotated by the parameter's name."""
    n = hi - lo
    parts = min(len(holders), max(1, n // MIN_SLICE))
    # The rotation spreads small pieces and remainders over the holders; a checksum of the name is the same on all
    # of them without knowing what else each of them holds.
    part = (holders.index(rank) - zlib.crc32(name.encode())) % len(holders) if rank in holders else parts
    if part >= parts or n == 0:
        return None
    return lo + part * n // parts, lo + (part + 1) * n // parts


def plan_norm(items: Sequence[PlanItem], rank: int) -> tuple[Slice, ...]:
    """What ``rank`` reads to compute its share of the norm, in the order of ``items``."""
    return tuple(
        Slice(index, lo, hi, item.slot) for index, item in enumerate(items) for lo, hi in owned_intervals(item, rank)
    )


@dataclass(frozen=True, slots=True, order=True)
class BucketItem:
    """One pending reduction of one parameter.

    The field order is the total order of the schedule: every rank sorts its reductions by it, so that of two ranks
    that share two buckets both run them in the same order, and no schedule can deadlock.

    Attributes:
        stage: 0 for a reduction over the first pending axis of the parameter's domain, 1 for one over its second, ...
        ranks: the group.
        dtype: name of the dtype in which it runs.
        divisor: the SUM is divided by this.
        id: logical id.
        piece: smallest rank that holds the piece; keeps equal names of different pieces apart.
        numel: elements.
        axis: for messages.
    """

    stage: int
    ranks: tuple[int, ...]
    dtype: str
    divisor: float
    id: str
    piece: int
    numel: int
    axis: str

    @classmethod
    def of(
        cls, reductions: Iterable[PendingReduction], *, name: str, piece: int, numel: int, dtype: str
    ) -> list[BucketItem]:
        """The items of one parameter's pending reductions."""
        return [cls(r.stage, r.ranks, dtype, r.divisor, name, piece, numel, r.axis) for r in reductions]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Reductions that travel in one collective: one group, one dtype, one divisor."""

    items: tuple[BucketItem, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group."""
        return self.items[0].ranks

    @property
    def divisor(self) -> float:
        """The SUM is divided by this."""
        return self.items[0].divisor

    @property
    def numel(self) -> int:
        """Elements of the flat buffer."""
        return sum(item.numel for item in self.items)


def plan_buckets(items: Iterable[BucketItem], rank: int, *, bucket_elements: int) -> tuple[Bucket, ...]:
    """The collective schedule of ``rank``.

    Args:
        items: the reductions of *all* ranks (repeats are dropped); those of groups without ``rank`` are ignored. A
            rank that holds no such parameter joins with zeros.
        bucket_elements: a bucket is closed once it holds this many elements; a larger parameter travels alone.
    """
    buckets: list[Bucket] = []
    pending: list[BucketItem] = []
    elements = 0
    for item in sorted({item for item in items if rank in item.ranks}):
        same = pending and (pending[0].stage, pending[0].ranks, pending[0].dtype, pending[0].divisor) == (
            item.stage, item.ranks, item.dtype, item.divisor,
        )  # fmt: skip
        if pending and (not same or elements + item.numel > bucket_elements):
            buckets.append(Bucket(tuple(pending)))
            pending, elements = [], 0
        pending.append(item)
        elements += item.numel
    if pending:
        buckets.append(Bucket(tuple(pending)))
    return tuple(buckets)
