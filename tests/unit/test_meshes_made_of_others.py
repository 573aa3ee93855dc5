"""Axes that are made of other axes, and axes whose groups are uneven, change no holder set."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ep_hooks.domains import REPLICATE, SHARD, Domain
from ep_hooks.plan import PlanItem, plan_norm
from ep_hooks.topology import Axis, Topology


@contextmanager
def _fake_world(size: int, rank: int = 0) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(0, 24, 5))
def test_flattened_dimensions_are_axes(rank: int) -> None:
    with _fake_world(24, rank):
        mesh = init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=("pp", "dp", "ep"))
        flat, crossing = mesh["dp", "ep"]._flatten("dp_ep"), mesh["pp", "dp"]._flatten("pp_dp")
        topology = Topology.from_meshes([mesh, flat, crossing])
    assert {*topology.axis("dp_ep").groups} == {tuple(range(12)), tuple(range(12, 24))}
    assert {*topology.axis("pp_dp").groups} == {tuple(range(i, 24, 4)) for i in range(4)}
    symbolic = Topology.grid({"mesh": {"pp": 2, "dp": 3, "ep": 4}})
    for domain in (Domain.replicated(), Domain.expert(), Domain("cut", {"dp": SHARD}, REPLICATE)):
        assert domain.resolve(topology, rank).replicas == domain.resolve(symbolic, rank).replicas
    assert Domain("whole", {"dp_ep": SHARD}, REPLICATE).resolve(topology, rank).replicas == (rank,)


@pytest.mark.skipif(not hasattr(DeviceMesh, "_unflatten"), reason="this torch cannot split a mesh dimension")
@pytest.mark.parametrize("sizes", [(2, 4, 1, 2, 2), (1, 8, 1, 8, 1), (1, 8, 1, 1, 8), (8, 1, 1, 1, 1), (2, 2, 2, 1, 4)])
def test_a_world_mesh_that_was_split_joins_no_more_than_its_parts(sizes: tuple[int, int, int, int, int]) -> None:
    """Regression: torchtitan 0.3 splits a mesh of the whole world (parallel_dims.py), and all became replicas."""
    pp, fsdp, tp, efsdp, ep = sizes
    with _fake_world(8):
        world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        dense = world._unflatten(0, (pp, fsdp, tp), ("pp", "fsdp", "tp"))
        sparse = world._unflatten(0, (pp, efsdp, ep), ("pp", "efsdp", "ep"))
        topology = Topology.from_meshes([dense, sparse])
    symbolic = Topology.grid({"d": {"pp": pp, "fsdp": fsdp, "tp": tp}, "e": {"pp": pp, "efsdp": efsdp, "ep": ep}})
    for domain in (
        Domain.replicated(),
        Domain.expert(),
        Domain("fsdp", {"fsdp": SHARD}, REPLICATE),
        Domain("expert", {"efsdp": SHARD, "ep": SHARD}),
        Domain("fsdp", {"fsdp": SHARD, "tp": REPLICATE}),
    ):
        for rank in range(8):
            assert domain.resolve(topology, rank).replicas == domain.resolve(symbolic, rank).replicas, (domain, rank)


def _cut(rng: random.Random, ranks: list[int]) -> list[list[int]]:
    cuts = [0, *(i for i in range(1, len(ranks)) if rng.random() < 0.4), len(ranks)]
    return [ranks[lo:hi] for lo, hi in pairwise(cuts)]


@pytest.mark.parametrize("seed", range(300))
def test_uneven_named_axes_count_each_element_once(seed: int) -> None:
    """Stages of different sizes, in each of them expert-parallel groups of different sizes."""
    rng = random.Random(seed)
    stages = _cut(rng, list(range(rng.randrange(1, 33))))
    pipes = [[stage[i] for stage in stages if i < len(stage)] for i in range(max(map(len, stages)))]
    by_stage = [_cut(rng, rng.sample(stage, len(stage))) for stage in stages]
    ep = [group for groups in by_stage for group in groups]
    edp = [[g[i] for g in groups if i < len(g)] for groups in by_stage for i in range(max(map(len, groups)))]

    def axis(name: str, groups: list[list[int]]) -> Axis:
        return Axis(name, tuple(map(tuple, groups)))

    topology = Topology(
        tuple(range(sum(map(len, stages)))),
        {
            "dense": (axis("pp", pipes), axis("dp", stages)),
            "expert": (axis("pp", pipes), axis("edp", edp), axis("ep", ep)),
        },
    )
    for domain, holder_sets in ((Domain.replicated(), stages), (Domain.expert(), edp), (Domain.ep_sum(), stages)):
        for holders in holder_sets:
            counts = np.zeros(rng.choice((0, 1, 100, 9000, 100_000)), dtype=int)
            for rank in holders:
                replicas = domain.resolve(topology, rank).replicas
                assert replicas == tuple(sorted(holders))
                for part in plan_norm([PlanItem("w", len(counts), 0, replicas)], rank):
                    counts[part.lo : part.hi] += 1
            assert (counts == 1).all()
