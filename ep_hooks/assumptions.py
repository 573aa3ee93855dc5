"""Measures what was only assumed: that a parameter without evidence has the same gradient on all its replicas."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ep_hooks.agreement import gather_objects
from ep_hooks.domains import EvidenceKind
from ep_hooks.errors import UndeclaredParameterError
from ep_hooks.fingerprints import exact
from ep_hooks.groups import ProcessGroups
from ep_hooks.names import shorten
from ep_hooks.table import Entry

__all__ = ["TOLERANCE", "check_assumptions", "holding_the_same", "tolerance"]

logger = logging.getLogger("ep_hooks")

TOLERANCE = 1e-3
"""Relative difference up to which norms and replicas count as equal."""

_MOST = 16


def tolerance(dtype: torch.dtype) -> float:
    """Largest difference over largest element up to which replicas of this dtype count as equal.

    Nondeterministic kernels differ in the last bits, of which 16-bit numbers have few.
    """
    return max(TOLERANCE, 2 * torch.finfo(dtype).eps)


def check_assumptions(
    entries: Sequence[Entry],
    gradients: Sequence[Tensor | None],
    rank: int,
    ranks: Sequence[int],
    group: ProcessGroup | None,
    process_groups: ProcessGroups,
) -> None:
    """Compare the gradients of assumed replicas, once, at the first step whose gradients are not zero.

    Collectives: one exchange of fingerprints; for the first parameters that differ a broadcast each and one exchange.

    Raises:
        UndeclaredParameterError: some differ by more than :func:`tolerance`; on all ranks, naming them.
    """
    assumed = {
        (entry.id, holding_the_same(entry, rank)): gradient
        for entry, gradient in zip(entries, gradients, strict=True)
        if entry.evidence.kind is EvidenceKind.ASSUMED and gradient is not None
    }
    mine = {key: exact(gradient) for key, gradient in assumed.items() if len(key[1]) > 1}
    seen = dict(zip(ranks, gather_objects(mine, group), strict=True))
    keys = sorted({key for other in ranks for key in seen[other]})
    differing = [key for key in keys if len({seen[other].get(key) for other in key[1]}) > 1]
    if not differing:
        return
    worst: dict[str, float] = {}
    for name, replicas in differing[:_MOST]:
        gradient = assumed.get((name, replicas))
        if any(seen[other].get((name, replicas)) is None for other in replicas):
            worst[name] = float("inf")
        elif gradient is not None:
            first = gradient.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(first, replicas[0], process_groups.get(replicas))
            difference = float((gradient - first).abs().max() / first.abs().max().clamp(min=1e-30))
            if not difference <= tolerance(gradient.dtype):
                worst[name] = difference
    everyone: dict[str, float] = {}
    for other in gather_objects(worst, group):
        for name, value in other.items():
            everyone[name] = max(value, everyone.get(name, 0.0))
    if not everyone:
        logger.info("ep_hooks: assumed replicas differ in the last bits only: %s", shorten(k[0] for k in differing))
        return
    more = f" (and up to {len(differing) - _MOST} more)" if len(differing) > _MOST else ""
    raise UndeclaredParameterError(
        "parameters were assumed to be replicated, but their gradients differ between ranks: "
        + shorten(f"{name} (relative difference {value:.2g})" for name, value in everyone.items())
        + more
        + ". Declare their domain (config `domains`, or ep_hooks.declare), or reduce their gradients first."
    )


def holding_the_same(entry: Entry, rank: int) -> tuple[int, ...]:
    """The replicas whose ready gradient is of the same elements as this rank's."""
    if entry.source.holdings is None:
        return entry.domain.replicas
    held: dict[int, list[tuple[int, int]]] = {}
    for holding in entry.source.holdings:
        held.setdefault(holding.rank, []).append((holding.lo, holding.hi))
    return tuple(other for other in entry.domain.replicas if held.get(other) == held.get(rank))
