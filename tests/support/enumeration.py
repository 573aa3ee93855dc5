"""Worlds whose elements are enumerated one by one: the truth against which the plan is checked.

The enumeration gives every logical piece an array of values and a list of holders, by arithmetic of its own on rank
digits. What ep_hooks needs to know (domains, intervals) is handed over beside it. Nothing of ep_hooks computes a holder
here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ep_hooks.domains import REPLICATE, SHARD, Domain, Placement
from ep_hooks.plan import Holding, PlanItem, Slice, plan_norm
from ep_hooks.topology import Topology

__all__ = ["Parameter", "World", "check", "make_world"]


@dataclass
class Parameter:
    """One logical parameter.

    Attributes:
        name: logical id as each rank sees it; stages use the same local names for different parameters.
        domain: what is declared.
        pieces: values of each distinct piece.
        piece_of: rank -> index of the piece it holds.
        intervals: rank -> interval of the piece that it holds, where not the whole.
        counted: ranks of the holder set that counts, where another one is laid out differently and does not.
    """

    name: str
    domain: Domain
    pieces: list[np.ndarray]
    piece_of: dict[int, int]
    intervals: dict[int, tuple[int, int]] | None = None
    counted: frozenset[int] | None = None


@dataclass
class World:
    """Ranks, the topology as ep_hooks is told it, and all parameters."""

    ranks: range
    topology: Topology
    parameters: list[Parameter]
    kinds: set[str] = field(default_factory=set)


def make_world(seed: int) -> World:
    """A random world of up to 64 ranks."""
    rng = random.Random(seed)
    pp, tp, ep = rng.choice((1, 1, 2, 3, 4)), rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3, 4))
    least = _lcm(tp, ep)
    factor = rng.choice([f for f in (1, 2, 3, 4, 5) if pp * least * f <= 64])
    per_stage = least * factor
    ranks = range(pp * per_stage)
    topology = Topology.grid(
        {
            "dense": {"pp": pp, "dp": per_stage // tp, "tp": tp},
            "expert": {"pp": pp, "edp": per_stage // ep, "ep": ep},
        }
    )
    world = World(ranks, topology, [])

    def stage(rank: int) -> int:
        return rank // per_stage

    def values() -> np.ndarray:
        size = rng.choice((0, 1, 2, 3, 7, 64, 4095, 4096, 4097, rng.randrange(1, 30_000)))
        return np.random.default_rng(rng.randrange(2**32)).integers(-9, 10, size)

    def on_stage(number: int, group_of: dict[int, int]) -> dict[int, int]:
        return {rank: group_of[rank] for rank in ranks if stage(rank) == number}

    for number in range(pp):
        for layer in range(rng.randrange(0, 4)):  # uneven pipeline: stages hold different numbers of layers
            kind = rng.choice(("dense", "cut", "expert", "intervals"))
            name = f"layers.{layer}.{kind}"
            if kind == "dense":
                holders = on_stage(number, dict.fromkeys(ranks, 0))
                world.parameters.append(Parameter(name, Domain.replicated(), [values()], holders))
            elif kind == "cut":
                holders = on_stage(number, {rank: rank % tp for rank in ranks})
                domain = Domain("cut", {"tp": SHARD}, REPLICATE)
                world.parameters.append(Parameter(name, domain, [values() for _ in range(tp)], holders))
            elif kind == "expert":
                holders = on_stage(number, {rank: rank % ep for rank in ranks})
                world.parameters.append(Parameter(name, Domain.expert(), [values() for _ in range(ep)], holders))
            else:
                holders = on_stage(number, dict.fromkeys(ranks, 0))
                piece = values()
                world.kinds.add("intervals")
                intervals = _intervals(rng, len(piece), sorted(holders))
                world.parameters.append(Parameter(name, Domain.replicated("zero"), [piece], holders, intervals))
    if pp > 1:
        world.kinds.add("uneven pp")
    if pp > 1 and rng.random() < 0.8:
        world.kinds.add("ties")
        ends = [rank for rank in ranks if stage(rank) in (0, pp - 1)]
        if rng.random() < 0.5:
            domain = Domain("tied", {"pp": Placement(REPLICATE.kind, at=(0, -1))}, REPLICATE)
            world.parameters.append(Parameter("embedding", domain, [values()], dict.fromkeys(ends, 0)))
        else:  # cut by tp on the first stage, whole on the last: the first stage counts, never a slice of both
            cuts, first = [values() for _ in range(tp)], [rank for rank in ends if stage(rank) == 0]
            last = [rank for rank in ends if stage(rank) != 0]
            counted = frozenset(first)
            cut = Domain("tied", {"tp": SHARD}, REPLICATE)
            world.parameters.append(Parameter("embedding", cut, cuts, {rank: rank % tp for rank in first}))
            whole = np.concatenate(cuts)
            world.parameters.append(
                Parameter("embedding", Domain.replicated("tied"), [whole], dict.fromkeys(last, 0), None, counted)
            )
    if len(ranks) > 1 and rng.random() < 0.6:
        world.kinds.add("uneven ep")
        world.parameters.extend(_uneven_experts(rng, ranks, values))
    return world


def _uneven_experts(rng: random.Random, ranks: range, values: object) -> Iterator[Parameter]:
    """Expert-parallel groups of different sizes: an expert's holders are one rank of each group."""
    order = list(ranks)
    rng.shuffle(order)
    groups, left = [], order
    while left:
        size = rng.randrange(1, len(left) + 1)
        groups.append(left[:size])
        left = left[size:]
    for expert in range(rng.randrange(1, 6)):
        holders = tuple(sorted(group[expert % len(group)] for group in groups))
        domain = Domain.of_replicas("uneven", (holders,))
        yield Parameter(f"experts.{expert}", domain, [values()], dict.fromkeys(holders, 0))  # type: ignore[operator]  # a local function


def _intervals(rng: random.Random, n: int, holders: list[int]) -> dict[int, tuple[int, int]]:
    """Intervals that cover [0, n): uneven, some empty, some overlapping."""
    cuts = sorted([0, n, *(rng.randrange(0, n + 1) for _ in holders[1:])])
    rng.shuffle(holders)
    found = {}
    for rank, lo, hi in zip(holders, cuts, cuts[1:], strict=False):
        if rng.random() < 0.3 and hi < n:
            hi = rng.randrange(hi, n + 1)
        found[rank] = (lo, hi)
    return found


def check(world: World) -> None:
    """Simulate every rank's share of the norm and compare with the enumeration.

    Raises:
        AssertionError: an element is not counted exactly once, or the sum or maximum is not the true one.
    """
    counts = [[np.zeros(len(piece), dtype=int) for piece in p.pieces] for p in world.parameters]
    total, largest = 0, 0
    for rank in world.ranks:
        held = [(i, p) for i, p in enumerate(world.parameters) if rank in p.piece_of]
        items = [_item(world, p, rank) for _, p in held]
        for piece in plan_norm(items, rank):
            index, parameter = held[piece.index]
            part = parameter.pieces[parameter.piece_of[rank]][_bounds(piece)]
            assert piece.lo >= 0 and len(part) == piece.hi - piece.lo, "a slice reaches outside its piece"
            if parameter.intervals is not None:
                lo, hi = parameter.intervals[rank]
                assert lo <= piece.lo and piece.hi <= hi, "a rank counts what it does not hold"
            counts[index][parameter.piece_of[rank]][_bounds(piece)] += 1
            total += int((part**2).sum())
            largest = max(largest, int(abs(part).max(initial=0)))
    true, peak = 0, 0
    for parameter, by_piece in zip(world.parameters, counts, strict=True):
        for piece, counted in zip(parameter.pieces, by_piece, strict=True):
            expected = 0 if parameter.counted is not None else 1
            assert (counted == expected).all(), f"{parameter.name}: elements counted {set(counted.tolist())} times"
            if expected:
                true += int((piece**2).sum())
                peak = max(peak, int(abs(piece).max(initial=0)))
    assert total == true
    assert largest == peak


def _bounds(piece: Slice) -> slice:
    return slice(piece.lo, piece.hi)


def _item(world: World, parameter: Parameter, rank: int) -> PlanItem:
    replicas = parameter.domain.resolve(world.topology, rank).replicas
    mine = parameter.piece_of[rank]
    expected = tuple(sorted(r for r, piece in parameter.piece_of.items() if piece == mine))
    assert replicas == expected, f"{parameter.name}: held by {replicas}, in truth by {expected}"
    numel = len(parameter.pieces[mine])
    holdings = None
    if parameter.intervals is not None:
        holdings = tuple(Holding(r, lo, hi) for r, (lo, hi) in sorted(parameter.intervals.items()))
    elif parameter.counted is not None:
        holdings = tuple(Holding(r, 0, numel) for r in sorted(parameter.counted))
    return PlanItem(parameter.name, numel, 0, replicas, holdings)


def _lcm(a: int, b: int) -> int:
    return a * b // int(np.gcd(a, b))
