"""Process groups: topology from a framework's groups, reuse, creation, and ranks that never call."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ep_hooks
from ep_hooks.groups import ProcessGroups, topology_from_groups
from ep_hooks.topology import Axis, Topology
from tests.support.ranks import run_ranks


def _from_groups() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    groups = {"expert": {name: mesh.get_group(name) for name in ("edp", "ep")}, "dense": {"dp": dist.group.WORLD}}
    found = topology_from_groups(groups)
    expected = Topology(
        (0, 1, 2, 3),
        {
            "expert": (Axis("edp", ((0, 2), (1, 3))), Axis("ep", ((0, 1), (2, 3)))),
            "dense": (Axis("dp", ((0, 1, 2, 3),)),),
        },
    )
    return found.ranks == expected.ranks and found.factorisations == expected.factorisations


def test_topology_from_process_groups() -> None:
    assert run_ranks(_from_groups, 4) == [True] * 4


def _reuse() -> tuple[bool, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    groups = ProcessGroups()
    groups.add(mesh.get_group("ep"))
    mine = dist.get_process_group_ranks(mesh.get_group("ep"))
    reused = groups.get(mine) is mesh.get_group("ep") and groups.get([3, 2, 1, 0]) is dist.group.WORLD
    created = groups.get([dist.get_rank()])
    kept = ProcessGroups().get([dist.get_rank()]) is created
    return reused and kept, dist.get_world_size(created)


def test_groups_with_the_same_ranks_are_reused() -> None:
    assert run_ranks(_reuse, 4) == [(True, 1)] * 4


def _some_ranks_never_call() -> float | None:
    """A rollout worker shares the job and the default group, and knows nothing of the norm."""
    if dist.get_rank() == 0:
        return None
    model = nn.Module()
    model.dense = nn.Parameter(torch.zeros(1))
    model.expert = nn.Parameter(torch.zeros(1))
    config = {
        "ranks": [1, 2],
        "axes": {"ep": 2},
        "domains": [{"match": "expert", "domain": "expert"}, {"match": "dense", "domain": "dense"}],
    }
    with ep_hooks.attach(model, config=config):
        model.dense.grad = torch.tensor([3.0])
        model.expert.grad = torch.tensor([4.0 if dist.get_rank() == 1 else 12.0])
        return float(ep_hooks.clip_grad_norm_(model, 1.0))


def test_the_rank_set_is_given_and_other_ranks_are_not_waited_for() -> None:
    assert run_ranks(_some_ranks_never_call, 3) == [None, 13.0, 13.0]
