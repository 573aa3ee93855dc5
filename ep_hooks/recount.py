"""The norm, computed a second time and in another way: is every element in it, and only once?

The norm itself has an owner for each element. Here every holder counts all that it holds, divided by the number of
holders, which needs no plan; so a gap in the plan, an element with two owners, or an all-reduce that does not reduce
makes the two differ. Only then do the ranks compare who counts what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from ep_hooks.agreement import gather_objects
from ep_hooks.assumptions import TOLERANCE, holding_the_same
from ep_hooks.findings import Finding, Kind, Severity
from ep_hooks.norm import Verdict
from ep_hooks.session import Session
from ep_hooks.table import Entry

__all__ = ["recount"]

Piece = tuple[str, tuple[int, ...]]
"""(logical id, ranks that hold the piece)."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """Of one piece, what a rank counts.

    Attributes:
        numel: elements of the whole piece.
        intervals: in the piece's logical order.
    """

    numel: int
    intervals: tuple[tuple[int, int], ...]


def recount(session: Session, squares: Tensor, verdict: Verdict, *, sure: bool) -> list[Finding]:
    """Compare the norm with that of a count by division.

    Args:
        squares: [entries], float64: sums of squares of this rank's gradients.
        verdict: of the norm with ``norm_type`` 2.
        sure: on this rank all holders have the same gradient, as far as it knows.

    Returns:
        Findings; the same on all ranks. None where holders differ: they have other findings.

    Collectives: one exchange of a number per domain; another one of what is counted where they differ.
    """
    shares = [_share(entry, session.rank) for entry in session.entries]
    mine = dict.fromkeys(session.slots, 0.0)
    for index, share in enumerate(shares):
        if share is not None:
            mine[session.slots[session.slot_of(index)]] += float(squares[index]) * share
    answers = gather_objects((mine, sure and None not in shares), session.group)
    if not all(certain for _, certain in answers):
        return []
    wrong = []
    for name, norm in verdict.domains.items():
        true, seen = math.sqrt(sum(sums[name] for sums, _ in answers)), float(norm)
        if math.isfinite(true) and not abs(true - seen) <= TOLERANCE * max(true, seen):
            wrong.append((name, true, seen))
    if not wrong:
        return []
    names = {name for name, _, _ in wrong}
    everyone = gather_objects(_counted(session, names), session.group)
    found = [_miscounted(session, piece, times) for piece, times in _not_once(everyone)]
    return found or [_not_their_sum(session, *numbers) for numbers in wrong]


def _share(entry: Entry, rank: int) -> float | None:
    """By what this rank's squares are multiplied; ``None`` where intervals overlap without being the same."""
    holdings = entry.source.holdings
    if holdings is None:
        return 1 / len(entry.domain.replicas)
    intervals = {(held.lo, held.hi) for held in holdings if held.lo < held.hi}
    if sum(hi - lo for lo, hi in intervals) != entry.source.numel:
        return None
    holds = any(held.rank == rank and held.lo < held.hi for held in holdings)
    return 1 / len(holding_the_same(entry, rank)) if holds else 0.0


def _counted(session: Session, domains: set[str]) -> dict[Piece, _Counted]:
    intervals: dict[int, list[tuple[int, int]]] = {}
    for piece in session.slices:
        start = session.interval(session.entries[piece.index])[0]
        intervals.setdefault(piece.index, []).append((piece.lo + start, piece.hi + start))
    return {
        (entry.id, entry.domain.replicas): _Counted(entry.source.numel, tuple(intervals.get(index, ())))
        for index, entry in enumerate(session.entries)
        if session.slots[session.slot_of(index)] in domains
    }


def _not_once(everyone: Sequence[dict[Piece, _Counted]]) -> list[tuple[Piece, set[int]]]:
    """Pieces of which some element is not counted once, and how often elements are counted."""
    found = []
    for piece in sorted({piece for counted in everyone for piece in counted}):
        held = [counted[piece] for counted in everyone if piece in counted]
        spans = [interval for counted in held for interval in counted.intervals]
        cuts = sorted({0, held[0].numel}.union(*spans))
        times = {sum(lo <= a and b <= hi for lo, hi in spans) for a, b in pairwise(cuts)}
        if times - {1}:
            found.append((piece, times - {1}))
    return found


_REMEDY = "take the hooks off and attach again (handle.remove(), ep_hooks.attach(...)); if it comes back, report it"


def _miscounted(session: Session, piece: Piece, times: set[int]) -> Finding:
    name, holders = piece
    how = " and ".join(f"{n} times" for n in sorted(times))
    return Finding(
        Kind.MISCOUNTED,
        Severity.ERROR,
        name,
        ranks=holders,
        declared="every element is counted once",
        seen=f"elements of it are counted {how}",
        evidence="the plans of all ranks",
        consequence="the norm is not that of the gradients, and the clip follows it",
        remedy=_REMEDY,
    )


def _not_their_sum(session: Session, domain: str, true: float, seen: float) -> Finding:
    return Finding(
        Kind.MISCOUNTED,
        Severity.ERROR,
        ranks=session.topology.ranks,
        declared=f"norm {true:.6g} of domain {domain}, added up from the ranks' numbers",
        seen=f"norm {seen:.6g}, {seen / true if true else math.inf:.4g} times that",
        evidence="gathered numbers",
        consequence="torch.distributed.all_reduce has not summed over the ranks: norm and clip are wrong",
        remedy="take out what replaces torch.distributed.all_reduce, or let it pass float64 on",
    )
