"""Agreement at set-up: ranks that must be equal are compared, and a difference is an error, not a hang at step 900.

Ranks that rightly differ (pipeline stages, uneven experts, a rank with none) have different tables and the same
schedule. The exchange is one ``all_gather_object`` of a few hundred bytes a rank (digests, not tables); details
travel only when digests differ. Every rank sees the same reports, so every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ep_hooks.domains import EvidenceKind
from ep_hooks.errors import AgreementError, ConfigError, UnsupportedError
from ep_hooks.plan import BucketItem
from ep_hooks.table import Entry, ParameterTable
from ep_hooks.topology import Topology

__all__ = ["Agreed", "Report", "agree", "gather_objects", "portable", "raise_first"]


@dataclass(frozen=True)
class Report:
    """What one rank says of itself at set-up.

    Attributes:
        facts: (label, value) that must be equal everywhere: versions, configuration, rank set.
        axes: (name, digest) of the axes that this rank knows; ranks may know different ones, but not differently.
        rules: (pattern, parameters matched on this rank).
        domains: names of the domains on this rank.
        wide: some gradient is float64.
        assumed: some domain is only assumed and has replicas.
        reductions: its pending reductions.
        holders: holder set -> (number of parameters, digest over id, shape, dtype, domain and reductions).
    """

    facts: tuple[tuple[str, str], ...]
    axes: tuple[tuple[str, str], ...] = ()
    rules: tuple[tuple[str, int], ...] = ()
    domains: tuple[str, ...] = ()
    wide: bool = False
    assumed: bool = False
    reductions: tuple[BucketItem, ...] = ()
    holders: dict[tuple[int, ...], tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, table: ParameterTable, topology: Topology, facts: Iterable[tuple[str, str]], patterns: Sequence[str]
    ) -> Report:
        """The report of a rank with ``table``."""
        by_holders: dict[tuple[int, ...], list[Entry]] = {}
        for entry in table:
            by_holders.setdefault(entry.domain.replicas, []).append(entry)
        return cls(
            facts=tuple(facts),
            axes=topology.digests(),
            rules=tuple(zip(patterns, table.hits, strict=True)),
            domains=table.domains(),
            wide=any(entry.source.dtype == torch.float64 for entry in table),
            assumed=any(e.evidence.kind is EvidenceKind.ASSUMED and len(e.domain.replicas) > 1 for e in table),
            reductions=tuple(item for entry in table for item in entry.bucket_items()),
            holders={ranks: (len(entries), _digest(entries)) for ranks, entries in by_holders.items()},
        )


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the agreement.

    Attributes:
        domains: union of the domain names, sorted: the layout of the packed result.
        reductions: union of the pending reductions.
        wide: some rank has float64 gradients, so the norm is returned in float64.
        assumed: some rank has replicas that are only assumed, to be measured.
    """

    domains: tuple[str, ...]
    reductions: tuple[BucketItem, ...]
    wide: bool
    assumed: bool


def gather_objects(value: Any, group: ProcessGroup | None) -> list[Any]:
    """``value`` of every rank of ``group`` in group order (one ``all_gather_object``); ``[value]`` without a group."""
    if group is None:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def raise_first(
    mine: Exception | None, errors: Sequence[tuple[str, type[Exception]] | None], ranks: Sequence[int]
) -> None:
    """Raise if any rank has an error: a rank with one its own, the others the first, in its class."""
    if mine is not None:
        raise mine
    for rank, found in zip(ranks, errors, strict=True):
        if found is not None:
            text, kind = found
            raise kind(f"rank {rank} failed: {text}")


def check_all_reduce(group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
    """See that ``torch.distributed.all_reduce``, which some frameworks replace, adds up what the norm will give it.

    Collectives: one all-reduce of one element, one exchange.

    Raises:
        UnsupportedError: on some rank it does not; on all ranks together.
    """
    ranks = dist.get_process_group_ranks(group)
    one = torch.ones(1, dtype=dtype, device=device)
    dist.all_reduce(one, dist.ReduceOp.SUM, group)
    function = dist.all_reduce
    problem: Exception | None = None
    if (total := float(one)) != len(ranks):
        name = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
        problem = UnsupportedError(
            f"torch.distributed.all_reduce (here {name}) of a {str(dtype).removeprefix('torch.')} one over "
            f"{len(ranks)} ranks gives {total:g}: no norm can be had from it. Take out whatever has replaced it"
        )
    raise_first(problem, gather_objects(portable(problem), group), ranks)


def agree(table: ParameterTable, report: Report, ranks: Sequence[int], group: ProcessGroup | None) -> Agreed:
    """Compare the ranks' reports.

    Args:
        ranks: the rank set, in the order of ``group``.
        group: its process group; ``None`` for a single process.

    Raises:
        AgreementError: the first difference, named, on every rank.
        ConfigError: a rule matched no parameter on any rank.
    """
    reports: list[Report] = gather_objects(report, group)
    for rank, other in zip(ranks, reports, strict=True):
        for (label, mine), (_, theirs) in zip(reports[0].facts, other.facts, strict=True):
            if mine != theirs:
                raise AgreementError(
                    f"ranks {ranks[0]} and {rank} disagree about {label}: {mine!r} and {theirs!r}. "
                    "Start all ranks with the same packages, configuration and environment."
                )
    known: dict[str, tuple[int, str]] = {}
    for rank, other in zip(ranks, reports, strict=True):
        for name, digest in other.axes:
            first, seen = known.setdefault(name, (rank, digest))
            if seen != digest:
                raise AgreementError(f"ranks {first} and {rank} disagree about which ranks lie along axis {name!r}")
    for index, (pattern, _) in enumerate(report.rules):
        if not any(other.rules[index][1] for other in reports):
            raise ConfigError(
                f"the rule with match {pattern!r} matches no trainable parameter on any rank; "
                "`ep-hooks explain` and the start-up table list the logical names"
            )
    _compare_holders(table, reports, ranks, group)
    return Agreed(
        domains=tuple(sorted({name for other in reports for name in other.domains})),
        reductions=tuple(sorted({item for other in reports for item in other.reductions})),
        wide=any(other.wide for other in reports),
        assumed=any(other.assumed for other in reports),
    )


def _compare_holders(
    table: ParameterTable, reports: Sequence[Report], ranks: Sequence[int], group: ProcessGroup | None
) -> None:
    by_rank = dict(zip(ranks, reports, strict=True))
    differing = []
    for holders in sorted({holders for report in reports for holders in report.holders}):
        outside = [rank for rank in holders if rank not in by_rank]
        if outside:
            raise AgreementError(f"a domain names ranks {outside}, which are outside the rank set {list(ranks)}")
        if len({by_rank[rank].holders.get(holders) for rank in holders}) > 1:
            differing.append(holders)
    if not differing:
        return
    holders = differing[0]
    mine = {entry.id: entry.describe() for entry in table if entry.domain.replicas == holders}
    listed = dict(zip(ranks, gather_objects(mine, group), strict=True))
    names = sorted({name for rank in holders for name in listed[rank]})
    first = next(name for name in names if len({listed[rank].get(name) for rank in holders}) > 1)
    # A rank that lacks it in this holder set may have it in another one: say so, it is the usual cause.
    elsewhere = [f"{entry.describe()}, held by {list(entry.domain.replicas)}" for entry in table if entry.id == first]
    descriptions = dict(zip(ranks, gather_objects(elsewhere, group), strict=True))
    lines = [f"  rank {rank}: {'; '.join(descriptions[rank]) or 'has no such parameter'}" for rank in holders]
    raise AgreementError(
        f"ranks {list(holders)} should hold the same piece of {first!r}, but they differ:\n" + "\n".join(lines[:16])
    )


def _digest(entries: Sequence[Entry]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for line in sorted(f"{entry.id}\0{entry.describe()}\1" for entry in entries):
        hasher.update(line.encode())
    return hasher.hexdigest()


def portable(error: Exception | None) -> tuple[str, type[Exception]] | None:
    """Text and class to send; a class that the other ranks could not rebuild is sent as AgreementError."""
    if error is None:
        return None
    kind = type(error)
    try:
        pickle.loads(pickle.dumps(kind))
        kind("probe")
    except Exception:
        kind = AgreementError
    return str(error), kind
