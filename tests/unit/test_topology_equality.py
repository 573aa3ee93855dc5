"""Symbolic topology equals ``DeviceMesh`` and Megatron's ``RankGenerator`` on random configurations."""

from __future__ import annotations

import math
import random

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ep_hooks.integrations.megatron_ranks import megatron_topology
from ep_hooks.topology import Topology

CONFIGURATIONS = 200


def test_equals_device_mesh() -> None:
    rng = random.Random(0)
    done = 0
    while done < CONFIGURATIONS:
        sizes = {
            name: rng.choice((1, 2, 3, 4))
            for name in rng.sample(("pp", "rep", "fsdp", "ep", "tp"), rng.randrange(1, 5))
        }
        world = math.prod(sizes.values())
        if world > 48:
            continue
        dist.init_process_group("fake", store=FakeStore(), rank=rng.randrange(world), world_size=world)
        try:
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            symbolic = Topology.grid({"mesh": sizes})
            part = mesh[tuple(sizes)[-1]] if len(sizes) > 1 else mesh
            for found in (Topology.from_meshes([mesh]), Topology.from_meshes([part])):
                assert found.ranks == symbolic.ranks
                for name in sizes:
                    assert {*found.axis(name).groups} == {*symbolic.axis(name).groups}, (sizes, name)
        finally:
            dist.destroy_process_group()
        done += 1


def test_equals_megatron() -> None:
    state = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is not installed here")
    rng = random.Random(1)
    done = 0
    while done < CONFIGURATIONS:
        tp, cp, dp, pp = (rng.choice((1, 2, 3, 4)) for _ in range(4))
        world = tp * cp * dp * pp
        etp, ep = rng.choice((1, 2, 4)), rng.choice((1, 2, 3, 4))
        if world > 96 or world % (etp * ep * pp):
            continue
        # The order in which pp comes last is the one in which both factorisations have the same stages (Megatron
        # asserts that they do).
        order = rng.choice(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"))
        dense = state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        expert = state.RankGenerator(tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order=order)
        if dense.get_ranks("pp") != expert.get_ranks("pp"):
            continue
        ours = megatron_topology(world, tp=tp, etp=etp, cp=cp, pp=pp, ep=ep, order=order)
        for generator, names in ((dense, {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}),
                                 (expert, {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"})):  # fmt: skip
            for theirs, name in names.items():
                groups = {tuple(group) for group in generator.get_ranks(theirs)}
                assert groups == {*ours.axis(name).groups}, (order, tp, cp, dp, pp, etp, ep, name)
        done += 1
