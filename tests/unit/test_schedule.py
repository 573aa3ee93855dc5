"""The collective schedule of all ranks never deadlocks, and members of a group see the same buckets."""

from __future__ import annotations

import random

import pytest

from ep_hooks.plan import Bucket, BucketItem, plan_buckets


def _items(rng: random.Random, ranks: int) -> list[BucketItem]:
    """Reductions over random overlapping groups, some in two stages."""
    items = []
    for number in range(rng.randrange(1, 25)):
        for stage in range(rng.choice((1, 1, 2))):
            group = tuple(sorted(rng.sample(range(ranks), rng.randrange(2, ranks + 1))))
            dtype = rng.choice(("float32", "bfloat16"))
            items.append(
                BucketItem(stage, group, dtype, rng.choice((1.0, 2.0)), f"p{number}", 0, rng.randrange(900), "ep")
            )
    return items


def _finishes(schedules: list[list[tuple[object, tuple[int, ...]]]]) -> bool:
    """Blocking rendezvous: a collective runs when all ranks of its group have come to it."""
    position = [0] * len(schedules)
    while True:
        moved = False
        for rank, schedule in enumerate(schedules):
            if position[rank] == len(schedule):
                continue
            what, group = schedule[position[rank]]
            if all(position[r] < len(schedules[r]) and schedules[r][position[r]] == (what, group) for r in group):
                for r in group:
                    position[r] += 1
                moved = True
        if not moved:
            return all(p == len(s) for p, s in zip(position, schedules, strict=True))


def _schedules(items: list[BucketItem], ranks: int) -> list[list[tuple[Bucket, tuple[int, ...]]]]:
    return [[(b, b.ranks) for b in plan_buckets(items, rank, bucket_elements=1000)] for rank in range(ranks)]


@pytest.mark.parametrize("seed", range(200))
def test_schedules_never_deadlock(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randrange(2, 9)
    items = _items(rng, ranks)
    schedules = _schedules(items, ranks)
    for group in {item.ranks for item in items}:
        assert len({tuple(b for b, g in schedules[rank] if g == group) for rank in group}) == 1
    world = tuple(range(ranks))
    assert _finishes([[*schedule, ("norm", world)] for schedule in schedules])


def test_an_order_of_each_ranks_own_would_deadlock() -> None:
    deadlocks = 0
    for seed in range(50):
        rng = random.Random(seed)
        schedules = _schedules(_items(rng, 5), 5)
        for schedule in schedules:
            rng.shuffle(schedule)
        deadlocks += not _finishes(schedules)
    assert deadlocks > 25


def test_buckets_are_bounded_and_complete() -> None:
    items = _items(random.Random(1), 4)
    for rank in range(4):
        buckets = plan_buckets(items, rank, bucket_elements=1000)
        assert sorted(i for b in buckets for i in b.items) == sorted({i for i in items if rank in i.ranks})
        assert all(b.numel <= 1000 or len(b.items) == 1 for b in buckets)
