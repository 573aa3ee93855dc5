"""Process groups by rank set: reuse the framework's, create the missing ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from ep_hooks.errors import TopologyError
from ep_hooks.patching import PatchSet
from ep_hooks.topology import Axis, Topology

__all__ = ["ProcessGroups", "distributed_rank", "is_distributed", "packed_dtype", "topology_from_groups"]


def is_distributed() -> bool:
    """Whether a default process group of several ranks exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def distributed_rank() -> int:
    """Global rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class ProcessGroups:
    """Process groups keyed by their ranks.

    Groups are reused where one with the same ranks is known. Others are created with local synchronisation: only
    their members take part, in the total order of the schedule, so that a job with ranks that never call works. They
    are kept for the life of the default group: created again under the same name, a group would find its old entries
    in the store and wait for ranks that never come.
    """

    def __init__(self) -> None:
        self._known: dict[frozenset[int], ProcessGroup] = {}
        if dist.is_available() and dist.is_initialized():
            self.add(dist.group.WORLD)

    def add(self, group: ProcessGroup | None) -> None:
        """Make a framework's group available for reuse."""
        if isinstance(group, ProcessGroup):  # ranks outside a group hold a placeholder
            self._known.setdefault(frozenset(dist.get_process_group_ranks(group)), group)

    def get(self, ranks: Sequence[int]) -> ProcessGroup:
        """The group of ``ranks``; created on first use (a collective among its members only)."""
        key = frozenset(ranks)
        if key in self._known:
            return self._known[key]
        if not dist.is_initialized():
            raise TopologyError(f"a collective over ranks {sorted(key)} needs torch.distributed to be initialised")
        created = _created()
        if key not in created:
            created[key] = _new_group(sorted(key))
        return created[key]

    def device(self, ranks: Sequence[int], preferred: torch.device) -> torch.device:
        """Where tensors for a collective over ``ranks`` must live: ``preferred`` if its backend serves it."""
        types = [device.type for device in _devices(self.get(ranks))]
        if preferred.type in types or not types:
            return preferred
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is not None and accelerator.type in types:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
        return torch.device(types[0])


def _new_group(ranks: list[int]) -> ProcessGroup:
    """A group that only its members take part in creating.

    torch (2.13, distributed_c10d.py) names such a group by its ranks *and the number of groups that this process
    knows*. Ranks that know different numbers, as members of overlapping groups do, would wait for each other under
    different names for ever. So the name is made of the ranks alone while the group is created.
    """
    with PatchSet() as patches:
        if hasattr(distributed_c10d, "_hash_ranks_to_str"):
            patches.replace(distributed_c10d, "_hash_ranks_to_str", _name_of_group)
        group: ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
        return group


def _name_of_group(original: Callable[[list[int]], str], ranks: list[int]) -> str:
    return hashlib.sha1(f"ep_hooks {ranks}".encode(), usedforsecurity=False).hexdigest()


_CREATED: list[tuple[ProcessGroup, dict[frozenset[int], ProcessGroup]]] = []


def _created() -> dict[frozenset[int], ProcessGroup]:
    """Groups created here under today's default group."""
    world = dist.group.WORLD
    assert world is not None
    if not _CREATED or _CREATED[0][0] is not world:
        _CREATED[:] = [(world, {})]
    return _CREATED[0][1]


def topology_from_groups(
    factorisations: Mapping[str, Mapping[str, ProcessGroup]], group: ProcessGroup | None = None
) -> Topology:
    """Topology of a framework that keeps process groups instead of a mesh.

    Args:
        factorisations: name -> {axis: this rank's group along it}, on every rank with the same names; a rank that is
            alone on an axis may leave it out.
        group: the rank set; all ranks if ``None``.

    One ``all_gather_object`` over ``group``, since a rank knows only its own groups.
    """
    mine = {
        name: {axis: tuple(dist.get_process_group_ranks(pg)) for axis, pg in axes.items()}
        for name, axes in factorisations.items()
    }
    gathered: list[dict[str, dict[str, tuple[int, ...]]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    listed: dict[str, dict[str, set[tuple[int, ...]]]] = {}
    for other in gathered:
        for name, axes in other.items():
            for axis, ranks in axes.items():
                listed.setdefault(name, {}).setdefault(axis, set()).add(ranks)
    return Topology(
        tuple(sorted(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))),
        {
            name: tuple(Axis(axis, tuple(sorted(groups))) for axis, groups in axes.items())
            for name, axes in listed.items()
        },
    )


def packed_dtype(group: ProcessGroup | None, device: torch.device) -> torch.dtype:
    """dtype of the packed norm result: float64 where the group's *backend* takes it, else float32.

    HCCL on Ascend 910B refuses float64 and MPS has none. In float32 the sum of squares overflows at a norm of
    1.8e19 and is rounded to 6e-8.
    """
    if device.type == "mps":
        return torch.float32
    if group is None:
        return torch.float64
    return torch.float32 if "hccl" in group._get_backend(device).name().lower() else torch.float64


def _devices(group: Any) -> list[torch.device]:
    return list(getattr(group, "_device_types", []) or [])
