"""Axes of the rank grid: which ranks lie along ``dp``, ``ep``, ``tp``, ... and which of them share a piece.

A *factorisation* is an ordered set of axes that numbers the ranks; dense and expert parameters may use two
factorisations of the same ranks (Megatron: tp x cp x dp x pp and etp x ep x edp x pp). The rank set is given,
never the whole world by default: reinforcement-learning and heterogeneous jobs have ranks that never call.
Nothing here needs a process group.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ep_hooks.errors import TopologyError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Axis", "Groups", "Topology", "axes_of_mesh", "axis_names"]

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Axis:
    """A named dimension of the rank grid.

    Attributes:
        name: ``"ep"``, ``"dp"``, ... in the framework's own words.
        groups: disjoint groups of ranks; a rank's position in its group is its coordinate. A rank in no group
            is alone on the axis.
        complete: all groups are listed, not only the one that holds this rank.
    """

    name: str
    groups: Groups
    complete: bool = True

    def __post_init__(self) -> None:
        seen: set[int] = set()
        for group in self.groups:
            if not group or len(set(group)) != len(group) or seen & set(group):
                raise TopologyError(f"axis {self.name!r}: groups must be non-empty and disjoint, got {self.groups}")
            seen |= set(group)

    @cached_property
    def _group_of(self) -> dict[int, tuple[int, ...]]:
        return {rank: group for group in self.groups for rank in group}

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Ranks along this axis from ``rank``, in coordinate order; ``(rank,)`` if the axis does not hold it."""
        return self._group_of.get(rank, (rank,))

    def agrees_with(self, other: Axis) -> bool:
        """Whether no rank has different neighbours on the two axes; each may leave out ranks that the other has."""
        mine = {rank: group for group in self.groups if len(group) > 1 for rank in group}
        return all(mine.get(rank, group) == group for group in other.groups if len(group) > 1 for rank in group)

    @cached_property
    def largest(self) -> int:
        """Ranks in the largest group."""
        return max(map(len, self.groups), default=1)

    def size(self, rank: int) -> int:
        """Number of ranks along this axis from ``rank``."""
        return len(self.group_of(rank))

    def coordinate(self, rank: int) -> int:
        """Position of ``rank`` in its group."""
        return self.group_of(rank).index(rank)


@dataclass(frozen=True)
class Topology:
    """A rank set and its factorisations.

    Attributes:
        ranks: the ranks that take part, ascending.
        factorisations: name -> axes in order. An axis that stands in two factorisations (``pp``) has the same
            groups in both.
    """

    ranks: tuple[int, ...]
    factorisations: Mapping[str, tuple[Axis, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)):
            raise TopologyError(f"the rank set must be non-empty, ascending and without repeats, got {self.ranks}")
        members = set(self.ranks)
        for name, axes in self.factorisations.items():
            for axis in axes:
                outside = {rank for group in axis.groups for rank in group} - members
                if outside:
                    raise TopologyError(
                        f"axis {axis.name!r} of factorisation {name!r} names ranks {sorted(outside)} "
                        f"outside the rank set {_ranks_text(self.ranks)}"
                    )
                known = self._axes_by_name.setdefault(axis.name, axis)
                if not known.agrees_with(axis):
                    raise TopologyError(
                        f"axis {axis.name!r} means different ranks in two meshes: {known.groups} and {axis.groups}. "
                        "Give the two axes different names (for example 'dp' and 'edp')."
                    )
                if len(axis.groups) > len(known.groups):  # the other mesh covers a part of the ranks, say one stage
                    self._axes_by_name[axis.name] = axis

    @cached_property
    def _axes_by_name(self) -> dict[str, Axis]:
        return {}

    @classmethod
    def grid(
        cls,
        factorisations: Mapping[str, Mapping[str, int]],
        *,
        ranks: Sequence[int] | None = None,
        fastest: str = "last",
    ) -> Topology:
        """Topology from axis sizes alone (symbolic: no process group needed).

        Args:
            factorisations: name -> {axis: size} in order, for example
                ``{"dense": {"dp": 2, "tp": 2}, "expert": {"edp": 1, "ep": 4}}``.
            ranks: the rank set; ``range(product of the sizes)`` if not given.
            fastest: which end of the order varies fastest with the rank: ``"last"`` as in ``DeviceMesh``,
                ``"first"`` as in Megatron's ``RankGenerator`` orders such as ``tp-cp-ep-dp-pp``.

        Raises:
            TopologyError: sizes that do not multiply to the number of ranks.
        """
        if fastest not in ("first", "last"):
            raise TopologyError(f"fastest must be 'first' or 'last', got {fastest!r}")
        if not factorisations:
            raise TopologyError("at least one factorisation is needed")
        for name, sizes in factorisations.items():
            for axis, size in sizes.items():
                if size < 1:
                    raise TopologyError(f"axis {axis!r} of factorisation {name!r} must have size >= 1, got {size}")
        if ranks is None:
            ranks = range(math.prod(next(iter(factorisations.values())).values()))
        ranks = tuple(ranks)
        built = {}
        for name, sizes in factorisations.items():
            if math.prod(sizes.values()) != len(ranks):
                raise TopologyError(
                    f"factorisation {name!r} = {dict(sizes)} numbers {math.prod(sizes.values())} ranks, "
                    f"but the rank set has {len(ranks)}"
                )
            order = list(sizes.items())
            if fastest == "last":
                order.reverse()
            stride, axes = 1, {}
            for axis, size in order:
                axes[axis] = Axis(axis, _grid_groups(ranks, stride, size))
                stride *= size
            built[name] = tuple(axes[axis] for axis in sizes)
        return cls(ranks, built)

    @classmethod
    def from_meshes(cls, meshes: Iterable[DeviceMesh]) -> Topology:
        """Topology from device meshes; a sub-mesh brings its whole root mesh's ranks.

        The rank set is the union of the root meshes' ranks. Runs no collective.
        """
        ranks: set[int] = set()
        factorisations: dict[str, tuple[Axis, ...]] = {}
        for mesh in meshes:
            root = _root_mesh(mesh)
            ranks |= set(root.mesh.flatten().tolist())
            axes = axes_of_mesh(root)
            if mesh is not root:  # flattened or sliced dimensions that the root does not name
                axes += tuple(axis for axis in axes_of_mesh(mesh) if axis.name not in {a.name for a in axes})
            name = "x".join(axis.name for axis in axes)
            while factorisations.get(name, axes) != axes:
                name += "'"
            factorisations[name] = axes
        if not ranks:
            raise TopologyError("no device mesh was given")
        return cls(tuple(sorted(ranks)), factorisations)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of all axes."""
        return tuple(self._axes_by_name)

    def axis(self, name: str) -> Axis:
        """The axis called ``name``.

        Raises:
            TopologyError: no such axis; the message lists the axes that exist.
        """
        try:
            return self._axes_by_name[name]
        except KeyError:
            have = ", ".join(f"{a} ({max(map(len, self._axes_by_name[a].groups), default=1)})" for a in self.axes)
            raise TopologyError(
                f"no axis {name!r} in this topology; it has: {have or 'no named axis at all'}. "
                "Name the axis in `axes:` of the config or pass a mesh that has it."
            ) from None

    def closure(self, rank: int, axes: Iterable[Axis]) -> tuple[int, ...]:
        """Ranks reachable from ``rank`` along ``axes``, ascending: the holders of one piece."""
        axes = tuple(axes)
        if any(self._axes_by_name.get(axis.name) != axis for axis in axes):
            return _reach(rank, axes)
        known = self._closures.setdefault(frozenset(axis.name for axis in axes), {})
        if rank not in known:
            reached = _reach(rank, axes)
            known.update(dict.fromkeys(reached, reached))
        return known[rank]

    @cached_property
    def _closures(self) -> dict[frozenset[str], dict[int, tuple[int, ...]]]:
        return {}

    def spans(self, axes: Sequence[Axis], axis: Axis, ranks: Sequence[int]) -> bool:
        """Whether ``axes`` together reach, from every one of ``ranks``, all of its neighbours on ``axis``."""
        mine = all(self._axes_by_name.get(each.name) == each for each in (*axes, axis))
        key = (frozenset(each.name for each in axes), axis.name, tuple(ranks))
        if mine and key in self._spans:
            return self._spans[key]
        label: dict[int, int] = {}
        for rank in ranks:
            if rank not in label:
                label.update(dict.fromkeys(self.closure(rank, axes), rank))
        groups = {axis.group_of(rank) for rank in ranks}
        spanned = all(len({label.get(other, -1) for other in group}) == 1 for group in groups)
        if mine:
            self._spans[key] = spanned
        return spanned

    @cached_property
    def _spans(self) -> dict[tuple[frozenset[str], str, tuple[int, ...]], bool]:
        return {}

    def digests(self) -> tuple[tuple[str, str], ...]:
        """(axis name, short hash of its groups) of every axis whose groups are all known here, sorted by name."""
        found = []
        for name, axis in sorted(self._axes_by_name.items()):
            if axis.complete and {rank for group in axis.groups for rank in group} == set(self.ranks):
                text = repr(sorted(group for group in axis.groups if len(group) > 1))
                found.append((name, hashlib.blake2b(text.encode(), digest_size=8).hexdigest()))
        return tuple(found)


def axes_of_mesh(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """One axis per mesh dimension, under the names of :func:`axis_names`.

    All slices of a sub-mesh are listed where torch tells them (``DeviceMesh._layout``, torch >= 2.9), else
    only the slice that holds the calling rank.
    """
    layout, rank_map = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is not None and rank_map is not None:
        slices, complete = layout.remap_to_tensor(rank_map), True
    else:
        slices, complete = mesh.mesh.unsqueeze(0), False
    axes = []
    for dim, name in enumerate(axis_names(mesh)):
        lines = slices.movedim(dim + 1, -1).reshape(-1, slices.shape[dim + 1]).tolist()
        axes.append(Axis(name, tuple(sorted({tuple(line) for line in lines})), complete))
    return tuple(axes)


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of a mesh's dimensions; unnamed ones (``fully_shard(model)`` makes such meshes) are called by place."""
    return mesh.mesh_dim_names or tuple(f"dim{i}of{mesh.ndim}x{size}" for i, size in enumerate(mesh.shape))


def _root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    get = getattr(mesh, "_get_root_mesh", None)  # a method since torch 2.9; before it, a global registry
    if get is not None:
        root: DeviceMesh = get()
    else:
        from torch.distributed import device_mesh

        root = device_mesh._mesh_resources.get_root_mesh(mesh)
    return root


def _grid_groups(ranks: Sequence[int], stride: int, size: int) -> Groups:
    """Groups of ``size`` ranks whose indices differ by multiples of ``stride``."""
    return tuple(
        tuple(ranks[block + offset + i * stride] for i in range(size))
        for block in range(0, len(ranks), stride * size)
        for offset in range(stride)
    )


def _reach(rank: int, axes: Sequence[Axis]) -> tuple[int, ...]:
    reached, frontier = {rank}, [rank]
    done: set[tuple[int, int]] = set()
    while frontier:
        here = frontier.pop()
        for index, axis in enumerate(axes):
            group = axis.group_of(here)
            if (index, group[0]) not in done:
                done.add((index, group[0]))
                frontier.extend(other for other in group if other not in reached)
                reached.update(group)
    return tuple(sorted(reached))


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    return str(list(ranks))
