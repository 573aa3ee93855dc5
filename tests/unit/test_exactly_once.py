"""Every logical element is counted exactly once, in random worlds of up to 64 ranks; and a wrong plan is noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ep_hooks import plan
from ep_hooks.domains import REPLICATE, SHARD, Domain, PlacementKind
from ep_hooks.topology import Topology
from tests.support.enumeration import check, make_world

EXAMPLES = 2200
SEEN: Counter[str] = Counter()


@settings(
    max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(st.integers(0, 2**32 - 1))
def test_every_element_is_counted_exactly_once(seed: int) -> None:
    world = make_world(seed)
    SEEN.update(["all", *world.kinds])
    check(world)


def test_the_examples_hold_what_they_should() -> None:
    if not SEEN:
        pytest.skip("runs after test_every_element_is_counted_exactly_once")
    assert SEEN["all"] >= 2000
    for kind in ("ties", "uneven ep", "uneven pp", "intervals"):
        assert SEEN[kind] >= 200, SEEN


# ------------------------------------------------------------------------------------------------------------ mutants

CUT, OWNED, RESOLVE, CLOSURE = plan._cut, plan.owned_intervals, Domain.resolve, Topology.closure


def _cut_off_by_one(name: str, lo: int, hi: int, holders: Any, rank: int) -> Any:
    found = CUT(name, lo, hi, holders, rank)
    return (found[0], found[1] - 1) if found and found[1] == hi and hi - lo > 1 else found


def _last_holder_drops_out(name: str, lo: int, hi: int, holders: Any, rank: int) -> Any:
    return CUT(name, lo, hi, holders, rank) if len(holders) == 1 or rank != holders[-1] else None


def _everybody_counts(name: str, lo: int, hi: int, holders: Any, rank: int) -> Any:
    return (lo, hi) if hi > lo else None


def _rotation_by_rank(name: str, lo: int, hi: int, holders: Any, rank: int) -> Any:
    return CUT(f"{name}{rank}", lo, hi, holders, rank)


def _remainder_dropped(name: str, lo: int, hi: int, holders: Any, rank: int) -> Any:
    found = CUT(name, lo, hi, holders, rank)
    size = (hi - lo) // len(holders)
    return found and (found[0], min(found[1], found[0] + max(size, 1)))


def _first_holder_only_its_share(name: str, lo: int, hi: int, holders: Any, rank: int) -> Any:
    return CUT(name, lo, hi, holders, rank) if rank == holders[0] else None


def _forgets_the_offset(name: str, lo: int, hi: int, holders: Any, rank: int) -> Any:
    found = CUT(name, lo, hi, holders, rank)
    return found and (found[0] - lo, found[1] - lo)


def _intervals_ignored(item: Any, rank: int) -> Any:
    return OWNED(replace(item, holdings=None), rank)


def _overlap_counted_twice(item: Any, rank: int) -> Any:
    if item.holdings is None:
        return OWNED(item, rank)
    return [(h.lo, h.hi) for h in item.holdings if h.rank == rank and h.lo < h.hi]


def _uncounted_set_counts(item: Any, rank: int) -> Any:
    holders = {h.rank for h in item.holdings or ()}
    return OWNED(replace(item, holdings=None) if holders and rank not in holders else item, rank)


def _without(kind: PlacementKind, instead: Any) -> Callable[..., Any]:
    def resolve(self: Domain, topology: Topology, rank: int) -> Any:
        placements = {a: (instead if p.kind is kind and isinstance(a, str) else p) for a, p in self.placements.items()}
        return RESOLVE(Domain(self.name, placements, self.rest), topology, rank)

    return resolve


def _rest_is_shard(self: Domain, topology: Topology, rank: int) -> Any:
    return RESOLVE(Domain(self.name, self.placements, SHARD if self.rest else None), topology, rank)


def _ties_cover_all_stages(self: Domain, topology: Topology, rank: int) -> Any:
    placements = {axis: replace(placement, at=()) for axis, placement in self.placements.items()}
    return RESOLVE(Domain(self.name, placements, self.rest), topology, rank)


def _one_step_only(self: Topology, rank: int, axes: Any) -> Any:
    return tuple(sorted({rank, *(other for axis in axes for other in axis.group_of(rank))}))


def _stage_axis_replicated(self: Domain, topology: Topology, rank: int) -> Any:
    placements = dict(self.placements)
    if self.rest is not None and "pp" not in placements:
        placements["pp"] = REPLICATE
    return RESOLVE(Domain(self.name, placements, self.rest), topology, rank)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "cut off by one": (plan, "_cut", _cut_off_by_one),
    "last holder drops out": (plan, "_cut", _last_holder_drops_out),
    "every replica counts": (plan, "_cut", _everybody_counts),
    "rotation differs by rank": (plan, "_cut", _rotation_by_rank),
    "remainder dropped": (plan, "_cut", _remainder_dropped),
    "only the first holder counts": (plan, "_cut", _first_holder_only_its_share),
    "offset of a segment forgotten": (plan, "_cut", _forgets_the_offset),
    "intervals ignored": (plan, "owned_intervals", _intervals_ignored),
    "overlap counted twice": (plan, "owned_intervals", _overlap_counted_twice),
    "tie of another layout counted twice": (plan, "owned_intervals", _uncounted_set_counts),
    "shard taken for replicate": (Domain, "resolve", _without(PlacementKind.SHARD, REPLICATE)),
    "replicate taken for shard": (Domain, "resolve", _rest_is_shard),
    "tie covers all stages": (Domain, "resolve", _ties_cover_all_stages),
    "stage axis replicated": (Domain, "resolve", _stage_axis_replicated),
    "closure stops after one axis": (Topology, "closure", _one_step_only),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutant = MUTANTS[name]
    for seed in range(300):
        check(make_world(seed))  # the plan as it is passes
        with monkeypatch.context() as patched:
            patched.setattr(owner, attribute, mutant)
            try:
                check(make_world(seed))
            except Exception:
                return
    pytest.fail(f"{name}: nobody noticed")
