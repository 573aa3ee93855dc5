"""Pending reductions in enumerated worlds with uneven stages and expert groups; and a wrong schedule is noticed.

The truth is made first: what every holder must have after the reductions. Each rank's local gradient is a random
integer split of it, by rank lists of the enumeration's own. Then all ranks run their schedules as blocking rendezvous.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from ep_hooks import plan
from ep_hooks.domains import REPLICATE, Domain, PlacementKind, partial
from ep_hooks.plan import Bucket, BucketItem, PlanItem
from ep_hooks.topology import Axis, Topology

SEEDS = 400
MUTANT_SEEDS = 60


@dataclass
class Pending:
    """One piece whose gradient is still to be reduced: the value in the end, and what each rank holds before."""

    name: str
    domain: Domain
    value: np.ndarray
    local: dict[int, np.ndarray]


@dataclass
class World:
    """Ranks, the topology that ep_hooks is told, and the pieces."""

    topology: Topology
    pieces: list[Pending]
    kinds: set[str]


def make_world(seed: int) -> World:
    """Stages of different sizes, in each a random partition into expert groups; sometimes a regular grid."""
    rng = random.Random(seed)
    return _grid(rng) if rng.random() < 0.4 else _uneven(rng)


def _values(rng: random.Random) -> np.ndarray:
    size = rng.choice((0, 1, 3, 64, 700, 4096, 9001))
    return np.random.default_rng(rng.randrange(2**32)).integers(-9, 10, size).astype(float)


def _split(rng: random.Random, value: np.ndarray, parts: int) -> list[np.ndarray]:
    """Integer arrays that add up to ``value``."""
    noise = np.random.default_rng(rng.randrange(2**32))
    pieces = [noise.integers(-9, 10, len(value)).astype(float) for _ in range(parts - 1)]
    return [*pieces, value - sum(pieces)]


def _grid(rng: random.Random) -> World:
    """``SUM over ep / divisor``, then ``AVG over edp``, in each stage of a regular grid."""
    pp, edp, ep = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3, 4))
    topology = Topology.grid({"dense": {"pp": pp, "dp": edp * ep}, "expert": {"pp": pp, "edp": edp, "ep": ep}})
    pieces = []
    for stage in range(pp):
        for number in range(rng.randrange(1, 4)):
            divisor = rng.choice((1.0, 2.0, 3.0)) if ep > 1 else 1.0
            domain = Domain("factor", {"ep": partial("sum", divisor), "edp": partial("avg")}, REPLICATE)
            value = _values(rng)
            local: dict[int, np.ndarray] = {}
            for row, mean in enumerate(_split(rng, value * edp, edp)):
                for column, part in enumerate(_split(rng, mean * divisor, ep)):
                    local[(stage * edp + row) * ep + column] = part
            pieces.append(Pending(f"layers.{number}.factor", domain, value, local))
    return World(topology, pieces, {"two reductions"} if edp > 1 and ep > 1 else set())


def _uneven(rng: random.Random) -> World:
    sizes = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 5))]
    total = sum(sizes)
    stages = [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]
    groups = [group for stage in stages for group in _partition(rng, stage)]
    kinds = {"uneven ep"} if len({len(group) for group in groups}) > 1 else set()
    stage_axis = Axis("stage", tuple(map(tuple, stages)))
    ep_axis = Axis("ep", tuple(map(tuple, groups)))
    pieces = []
    for stage in stages:
        for number in range(rng.randrange(1, 4)):
            value, local = _values(rng), dict[int, np.ndarray]()
            # A divisor where a rank is alone is refused: no reduction could apply it.
            divisor = rng.choice((1.0, 2.0)) if all(len(g) > 1 for g in groups if g[0] in stage) else 1.0
            summed = rng.random() < 0.7
            for group in (g for g in groups if g[0] in stage):
                scale = divisor if summed else len(group)
                local.update(zip(group, _split(rng, value * scale, len(group)), strict=True))
            domain = Domain(
                "factor", {ep_axis: partial("sum", divisor) if summed else partial("avg"), stage_axis: REPLICATE}
            )
            pieces.append(Pending(f"layers.{number}.factor", domain, value, local))
    order = list(range(total))
    rng.shuffle(order)
    chains = _partition(rng, order)  # pipelines of different lengths; first and last of each add up a tied gradient
    value, local, op = _values(rng), {}, rng.choice(("sum", "avg"))
    for chain in chains:
        ends = list(dict.fromkeys((chain[0], chain[-1])))
        local.update(zip(ends, _split(rng, value * (len(ends) if op == "avg" else 1), len(ends)), strict=True))
    domain = Domain(
        "tied",
        {
            Axis("pp", tuple(map(tuple, chains))): partial(op, at=(0, -1)),
            Axis("holders", (tuple(local),)): REPLICATE,
        },
    )
    pieces.append(Pending("embedding", domain, value, local))
    kinds |= {"ties"} | ({"uneven pp"} if len({len(chain) for chain in chains}) > 1 else set())
    return World(Topology(tuple(range(total))), pieces, kinds)


def _partition(rng: random.Random, members: list[int]) -> list[list[int]]:
    groups = []
    while members:
        size = rng.randrange(1, len(members) + 1)
        groups.append(members[:size])
        members = members[size:]
    return groups


def check(world: World) -> None:
    """Run all schedules, then count.

    Raises:
        AssertionError: a deadlock, a wrong gradient after the reductions, or an element not counted exactly once.
    """
    ranks = world.topology.ranks
    data: dict[tuple[str, int], dict[int, np.ndarray]] = {}
    items: list[BucketItem] = []
    held: dict[int, list[tuple[PlanItem, int]]] = {rank: [] for rank in ranks}
    for index, piece in enumerate(world.pieces):
        for rank in piece.local:
            resolved = piece.domain.resolve(world.topology, rank)
            assert resolved.replicas == tuple(sorted(piece.local)), f"{piece.name}: held by {resolved.replicas}"
            numel, first = len(piece.value), min(resolved.replicas)
            items += BucketItem.of(resolved.reductions, name=piece.name, piece=first, numel=numel, dtype="float32")
            held[rank].append((PlanItem(piece.name, numel, 0, resolved.replicas), index))
        data[piece.name, min(piece.local)] = dict(piece.local)
    _run([list(plan.plan_buckets(items, rank, bucket_elements=1000)) for rank in ranks], data)
    counts = [np.zeros(len(piece.value), dtype=int) for piece in world.pieces]
    total, largest = 0.0, 0.0
    for rank in ranks:
        for part in plan.plan_norm([item for item, _ in held[rank]], rank):
            index = held[rank][part.index][1]
            piece = world.pieces[index]
            read = data[piece.name, min(piece.local)][rank][part.lo : part.hi]
            counts[index][part.lo : part.hi] += 1
            total += float((read**2).sum())
            largest = max(largest, float(abs(read).max(initial=0)))
    assert all((count == 1).all() for count in counts), "an element is not counted exactly once"
    assert total == sum(float((piece.value**2).sum()) for piece in world.pieces)
    assert largest == max(float(abs(piece.value).max(initial=0)) for piece in world.pieces)
    for piece in world.pieces:
        for rank, found in data[piece.name, min(piece.local)].items():
            assert (found == piece.value).all(), f"{piece.name}: rank {rank} has a wrong gradient"


def _run(schedules: list[list[Bucket]], data: dict[tuple[str, int], dict[int, np.ndarray]]) -> None:
    """Blocking rendezvous: a bucket travels when all ranks of its group have come to it."""
    position = [0] * len(schedules)

    def head(rank: int) -> Bucket | None:
        return schedules[rank][position[rank]] if position[rank] < len(schedules[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(schedules)):
            bucket = head(rank)
            if bucket is None or any(head(other) != bucket for other in bucket.ranks):
                continue
            for item in bucket.items:
                copies = data[item.id, item.piece]
                zeros = np.zeros(item.numel)
                reduced = sum((copies.get(other, zeros) for other in bucket.ranks), zeros) / bucket.divisor
                copies.update({other: reduced for other in bucket.ranks if other in copies})
            for other in bucket.ranks:
                position[other] += 1
            moved = True
    assert all(head(rank) is None for rank in range(len(schedules))), "deadlock"


def test_reductions_and_norm_are_exact() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = make_world(seed)
        seen.update(world.kinds)
        check(world)
    for kind in ("uneven ep", "uneven pp", "ties", "two reductions"):
        assert seen[kind] >= 50, seen


# ------------------------------------------------------------------------------------------------------------ mutants

OF, BUCKETS, RESOLVE = BucketItem.of, plan.plan_buckets, Domain.resolve


def _of(change: Callable[[BucketItem], Any]) -> Any:
    """``BucketItem.of`` with every item changed; an item changed into None is dropped."""

    def of(reductions: Any, **said: Any) -> Any:
        return [changed for item in OF(reductions, **said) if (changed := change(item)) is not None]

    return staticmethod(of)


def _placements(change: Callable[[Any], Any]) -> Any:
    def resolve(self: Domain, topology: Topology, rank: int) -> Any:
        placements = {
            axis: change(placement) if placement.kind is PlacementKind.PARTIAL else placement
            for axis, placement in self.placements.items()
        }
        return RESOLVE(replace(self, placements=placements), topology, rank)

    return resolve


def _order_of_each_rank(items: Any, rank: int, *, bucket_elements: int) -> Any:
    buckets = list(BUCKETS(items, rank, bucket_elements=bucket_elements))
    random.Random(rank).shuffle(buckets)
    return tuple(buckets)


def _bucket_size_of_each_rank(items: Any, rank: int, *, bucket_elements: int) -> Any:
    return BUCKETS(items, rank, bucket_elements=bucket_elements if rank % 2 else 0)


def _groups_of_others_too(items: Any, rank: int, *, bucket_elements: int) -> Any:
    items = list(items)
    found = {b: None for r in {r for i in items for r in i.ranks} for b in BUCKETS(items, r, bucket_elements=1)}
    return tuple(sorted(found, key=lambda bucket: bucket.items))


def _repeats_kept(items: Any, rank: int, *, bucket_elements: int) -> Any:
    return tuple(Bucket(b.items * 2) for b in BUCKETS(items, rank, bucket_elements=bucket_elements))


def _divisors_mixed(items: Any, rank: int, *, bucket_elements: int) -> Any:
    merged: dict[Any, list[BucketItem]] = {}
    for bucket in BUCKETS(items, rank, bucket_elements=bucket_elements):
        merged.setdefault((bucket.items[0].stage, bucket.ranks), []).extend(bucket.items)
    return tuple(Bucket(tuple(found)) for found in merged.values())


def _last_bucket_forgotten(items: Any, rank: int, *, bucket_elements: int) -> Any:
    last = max(items, default=None)
    return BUCKETS([item for item in items if item != last], rank, bucket_elements=bucket_elements)


def _only_one_item_travels(items: Any, rank: int, *, bucket_elements: int) -> Any:
    return tuple(Bucket(b.items[:1]) for b in BUCKETS(items, rank, bucket_elements=bucket_elements))


def _reduced_over_holders(self: Domain, topology: Topology, rank: int) -> Any:
    found = RESOLVE(self, topology, rank)
    reductions = tuple(replace(r, ranks=found.replicas) for r in found.reductions)
    return replace(found, reductions=reductions)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "divisor applied twice": (BucketItem, "of", _of(lambda item: replace(item, divisor=item.divisor**2))),
    "divisor ignored": (BucketItem, "of", _of(lambda item: replace(item, divisor=1.0))),
    "group loses its last rank": (BucketItem, "of", _of(lambda item: replace(item, ranks=item.ranks[:-1]))),
    "second reduction dropped": (BucketItem, "of", _of(lambda item: item if item.stage == 0 else None)),
    "first reduction dropped": (BucketItem, "of", _of(lambda item: item if item.stage else None)),
    "reduced over the holders": (Domain, "resolve", _reduced_over_holders),
    "sum taken for avg": (Domain, "resolve", _placements(lambda placement: replace(placement, op="avg"))),
    "avg taken for sum": (Domain, "resolve", _placements(lambda placement: replace(placement, op="sum"))),
    "coordinates of a tie ignored": (Domain, "resolve", _placements(lambda placement: replace(placement, at=()))),
    "pending taken for replicated": (
        Domain, "resolve", _placements(lambda placement: replace(placement, kind=PlacementKind.REPLICATE)),
    ),
    "pending taken for shard": (
        Domain, "resolve", _placements(lambda placement: replace(placement, kind=PlacementKind.SHARD)),
    ),
    "bucket order of each rank": (plan, "plan_buckets", _order_of_each_rank),
    "bucket size of each rank": (plan, "plan_buckets", _bucket_size_of_each_rank),
    "groups of others too": (plan, "plan_buckets", _groups_of_others_too),
    "repeats reduced twice": (plan, "plan_buckets", _repeats_kept),
    "divisors mixed in a bucket": (plan, "plan_buckets", _divisors_mixed),
    "last item forgotten": (plan, "plan_buckets", _last_bucket_forgotten),
    "first item of a bucket only": (plan, "plan_buckets", _only_one_item_travels),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutant = MUTANTS[name]
    for seed in range(MUTANT_SEEDS):
        world = make_world(seed)
        with monkeypatch.context() as patched:
            patched.setattr(owner, attribute, mutant)
            try:
                check(world)
            except AssertionError:  # noticed; any other exception would be the mutant's own fault
                return
    pytest.fail(f"{name}: nobody noticed")
