"""Axes and rank sets: groups, coordinates, closures and the errors of grids that do not fit."""

from __future__ import annotations

import pytest

from ep_hooks.errors import TopologyError
from ep_hooks.topology import Axis, Topology


def test_grids_number_ranks_from_either_end() -> None:
    last = Topology.grid({"mesh": {"dp": 2, "tp": 3}})
    assert last.axis("tp").groups == ((0, 1, 2), (3, 4, 5))
    assert last.axis("dp").groups == ((0, 3), (1, 4), (2, 5))
    first = Topology.grid({"mesh": {"dp": 2, "tp": 3}}, fastest="first")
    assert first.axis("dp").groups == ((0, 1), (2, 3), (4, 5))
    assert first.axes == last.axes == ("dp", "tp")


def test_a_rank_set_with_gaps() -> None:
    topology = Topology.grid({"mesh": {"dp": 2, "tp": 2}}, ranks=[3, 5, 8, 9])
    assert topology.axis("tp").groups == ((3, 5), (8, 9))
    assert topology.axis("dp").group_of(9) == (5, 9)
    assert topology.axis("dp").coordinate(9) == 1


def test_a_rank_in_no_group_is_alone() -> None:
    axis = Axis("ep", ((0, 1), (4, 2, 3)))
    assert axis.group_of(7) == (7,)
    assert (axis.size(7), axis.size(2), axis.largest) == (1, 3, 3)
    assert axis.coordinate(2) == 1
    assert Axis("ep", ()).largest == 1


@pytest.mark.parametrize("groups", [((),), ((0, 0),), ((0, 1), (1, 2))])
def test_groups_are_disjoint(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(TopologyError, match="axis 'ep': groups must be non-empty and disjoint"):
        Axis("ep", groups)


@pytest.mark.parametrize("ranks", [(), (1, 0), (0, 0)])
def test_rank_sets_are_ascending(ranks: tuple[int, ...]) -> None:
    with pytest.raises(TopologyError, match="non-empty, ascending and without repeats"):
        Topology(ranks)


def test_grids_that_do_not_fit() -> None:
    with pytest.raises(TopologyError, match=r"factorisation 'expert' = .* numbers 6 ranks, but the rank set has 4"):
        Topology.grid({"dense": {"dp": 4}, "expert": {"edp": 2, "ep": 3}})
    with pytest.raises(TopologyError, match="must have size >= 1, got 0"):
        Topology.grid({"dense": {"dp": 0}})
    with pytest.raises(TopologyError, match="'first' or 'last'"):
        Topology.grid({"dense": {"dp": 2}}, fastest="middle")
    with pytest.raises(TopologyError, match="at least one factorisation"):
        Topology.grid({})


def test_one_name_means_one_axis() -> None:
    with pytest.raises(TopologyError, match="axis 'dp' means different ranks in two meshes"):
        Topology((0, 1, 2, 3), {"a": (Axis("dp", ((0, 1), (2, 3))),), "b": (Axis("dp", ((0, 2), (1, 3))),)})
    with pytest.raises(TopologyError, match=r"names ranks \[7\] outside the rank set"):
        Topology((0, 1), {"a": (Axis("dp", ((0, 7),)),)})
    part = Topology((0, 1, 2, 3), {"a": (Axis("dp", ((0, 1),)),), "b": (Axis("dp", ((0, 1), (2, 3))),)})
    assert part.axis("dp").group_of(2) == (2, 3)


def test_an_unknown_axis_lists_the_known_ones() -> None:
    with pytest.raises(TopologyError, match=r"no axis 'ep' in this topology; it has: dp \(2\), tp \(4\)"):
        Topology.grid({"mesh": {"dp": 2, "tp": 4}}).axis("ep")


def test_closures() -> None:
    topology = Topology.grid({"mesh": {"pp": 2, "dp": 2, "tp": 2}})
    pp, dp, tp = (topology.axis(name) for name in ("pp", "dp", "tp"))
    assert topology.closure(5, []) == (5,)
    assert topology.closure(5, [dp, tp]) == (4, 5, 6, 7)
    assert topology.closure(5, [tp, pp]) == (0, 1, 4, 5)
    assert topology.closure(5, [dp, Axis("other", ((5, 1), (3, 0)))]) == (0, 1, 2, 3, 5, 7)
    chain = Axis("chain", ((0, 1), (2, 3))), Axis("links", ((1, 2),))
    assert topology.closure(3, chain) == (0, 1, 2, 3)


def test_an_axis_of_the_same_name_is_not_taken_for_the_topologys_own() -> None:
    topology = Topology.grid({"mesh": {"dp": 4}})
    assert topology.closure(0, [topology.axis("dp")]) == (0, 1, 2, 3)
    assert topology.closure(0, [Axis("dp", ((0, 3),))]) == (0, 3)
    assert topology.spans([topology.axis("dp")], Axis("dp", ((0, 3),)), (0,))
    assert not topology.spans([Axis("dp", ((0, 3),))], topology.axis("dp"), (0,))


def test_digests_differ_with_the_groups_only() -> None:
    one = Topology.grid({"mesh": {"dp": 2, "tp": 2}})
    same = Topology.grid({"other": {"dp": 2, "tp": 2}})
    assert one.digests() == same.digests()
    turned = dict(Topology.grid({"mesh": {"tp": 2, "dp": 2}}).digests())
    assert turned["dp"] != dict(one.digests())["dp"]
