"""Domains seen from each rank: holders, pending reductions, and the errors of what cannot be resolved."""

from __future__ import annotations

import math

import pytest

from ep_hooks.domains import REPLICATE, SHARD, Domain, PendingReduction, Placement, PlacementKind, partial
from ep_hooks.errors import DomainError, TopologyError
from ep_hooks.topology import Axis, Topology

GRID = Topology.grid({"dense": {"dp": 4, "tp": 2}, "expert": {"edp": 2, "ep": 4}})
STAGED = Topology.grid({"dense": {"pp": 2, "dp": 4}, "expert": {"pp": 2, "edp": 2, "ep": 2}})
PIPE = Topology.grid({"dense": {"pp": 4, "dp": 2}})
UNEVEN = Topology(
    tuple(range(5)),
    {"expert": (Axis("edp", ((0, 2), (1, 3))), Axis("ep", ((0, 1), (2, 3, 4))))},
)


def replicas(domain: Domain, topology: Topology, rank: int) -> tuple[int, ...]:
    return domain.resolve(topology, rank).replicas


@pytest.mark.parametrize("rank", range(8))
def test_built_in_domains(rank: int) -> None:
    assert replicas(Domain.replicated(), GRID, rank) == tuple(range(8))
    assert replicas(Domain.expert(), GRID, rank) == tuple(r for r in range(8) if r % 4 == rank % 4)
    assert replicas(Domain.ep_sum(), GRID, rank) == tuple(range(8))
    row = tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))
    assert Domain.ep_sum().resolve(GRID, rank).reductions == (PendingReduction(row, 1.0, "ep"),)


def test_domains_by_name() -> None:
    assert Domain.named("dense") == Domain.named("replicated") == Domain.replicated()
    assert Domain.named("expert") == Domain.expert()
    assert Domain.named("ep_sum") == Domain.ep_sum()
    with pytest.raises(DomainError, match="no domain 'experts'; built in are dense, replicated, expert and ep_sum"):
        Domain.named("experts")


def test_stages_are_pinned_unless_a_rule_ties_them() -> None:
    assert replicas(Domain.replicated(), STAGED, 1) == (0, 1, 2, 3)
    assert replicas(Domain.expert(), STAGED, 5) == (5, 7)
    tied = Domain("tied", {"pp": REPLICATE}, REPLICATE)
    assert replicas(tied, STAGED, 1) == tuple(range(8))


@pytest.mark.parametrize(
    ("at", "rank", "expected"),
    [
        ((0, -1), 0, (0, 1, 6, 7)),
        ((0, -1), 7, (0, 1, 6, 7)),
        ((0, -1), 3, (2, 3)),
        ((1, 2), 4, (2, 3, 4, 5)),
        ((0, 0, -4), 1, (0, 1)),
        ((), 2, tuple(range(8))),
    ],
)
def test_coordinates_that_take_part(at: tuple[int, ...], rank: int, expected: tuple[int, ...]) -> None:
    domain = Domain("tied", {"pp": Placement(PlacementKind.REPLICATE, at=at)}, REPLICATE)
    assert replicas(domain, PIPE, rank) == expected


def test_pending_reductions_at_coordinates() -> None:
    domain = Domain("tied", {"pp": partial("avg", at=(0, -1))}, REPLICATE)
    assert domain.resolve(PIPE, 1).reductions == (PendingReduction((1, 7), 2.0, "pp"),)
    assert domain.resolve(PIPE, 1).replicas == (0, 1, 6, 7)
    assert domain.resolve(PIPE, 3).reductions == ()


@pytest.mark.parametrize("at", [(4,), (0, -5)])
def test_coordinates_that_do_not_exist(at: tuple[int, ...]) -> None:
    domain = Domain("tied", {"pp": Placement(PlacementKind.REPLICATE, at=at)}, REPLICATE)
    with pytest.raises(DomainError, match=r"coordinates .* do not exist on axis 'pp' of 4"):
        domain.resolve(PIPE, 0)


def test_order_and_divisors_of_pending_reductions() -> None:
    domain = Domain("factor", {"ep": partial("sum", 4.0), "edp": partial("avg", 2.0)})
    assert domain.resolve(GRID, 5).reductions == (
        PendingReduction((4, 5, 6, 7), 4.0, "ep", 0),
        PendingReduction((1, 5), 4.0, "edp", 1),
    )
    turned = Domain("factor", {"edp": partial("avg", 2.0), "ep": partial("sum", 4.0)})
    assert [r.axis for r in turned.resolve(GRID, 5).reductions] == ["edp", "ep"]


@pytest.mark.parametrize(
    ("axis", "placement"),
    [("ep", partial("sum", 2.0)), ("ep", partial("avg", 2.0)), ("edp", partial("sum", 2.0, (-1,)))],
)
def test_a_divisor_needs_a_reduction(axis: str, placement: Placement) -> None:
    """Regression: no reduction runs over one rank, and the divisor was lost."""
    topology = Topology.grid({"expert": {"edp": 2, "ep": 1}})
    for rank in topology.ranks:
        with pytest.raises(DomainError, match=rf"'factor' divides by 2 along axis '{axis}', on which only one rank"):
            Domain("factor", {axis: placement}, REPLICATE).resolve(topology, rank)
    undivided = Domain("factor", {axis: partial(placement.op, at=placement.at)}, REPLICATE)
    assert undivided.resolve(topology, 0).reductions == ()


def test_a_divisor_needs_a_reduction_on_every_rank_of_an_uneven_axis() -> None:
    axis = Axis("ep", ((0,), (1, 2)))
    domain = Domain("factor", {axis: partial("sum", 2.0)})
    topology = Topology((0, 1, 2, 3))
    with pytest.raises(DomainError, match=r"'ep', on which rank 0 is alone"):
        domain.resolve(topology, 0)
    assert [r.divisor for r in domain.resolve(topology, 1).reductions] == [2.0]
    assert domain.resolve(topology, 3).reductions == (), "an axis says nothing about a rank that it does not hold"


def test_text() -> None:
    assert Domain("x", {"ep": SHARD, "edp": partial("avg")}).resolve(GRID, 0).text == "ep:shard edp:partial(avg)"
    assert Domain.replicated().resolve(Topology((0,)), 0).text == "local"


# ------------------------------------------------------------------------------------------------------- fail closed


def test_an_axis_that_does_not_exist() -> None:
    with pytest.raises(TopologyError, match=r"no axis 'epp'.*it has: dp \(4\), tp \(2\), edp \(2\), ep \(4\)"):
        Domain("x", {"epp": SHARD}, REPLICATE).resolve(GRID, 0)
    with pytest.raises(TopologyError, match="no named axis at all"):
        Domain.expert().resolve(Topology((0, 1)), 0)


def test_axes_about_which_nothing_is_said() -> None:
    with pytest.raises(DomainError, match=r"'x' says nothing about axis 'edp' \(2 ranks\)"):
        Domain("x", {"ep": SHARD}).resolve(GRID, 0)
    one = Topology.grid({"expert": {"edp": 1, "ep": 4}})
    assert replicas(Domain("x", {"ep": SHARD}), one, 2) == (2,)


def test_built_in_expert_domains_do_not_guess_along_tensor_axes() -> None:
    topology = Topology.grid({"expert": {"edp": 2, "ep": 2, "etp": 2}})
    for domain in (Domain.expert(), Domain.ep_sum()):
        with pytest.raises(DomainError, match=r"says nothing about axis 'etp' \(2 ranks\)"):
            domain.resolve(topology, 0)


def test_axes_of_two_factorisations_leave_no_rest() -> None:
    """Regression: ``rest`` ran over all ranks then and made replicas of what ``tp`` and ``ep`` cut."""
    topology = Topology.grid({"dense": {"dp": 2, "tp": 2}, "expert": {"edp": 2, "ep": 2}})
    with pytest.raises(DomainError, match=r"axes of different factorisations \(tp, ep\)"):
        Domain("x", {"tp": SHARD, "ep": SHARD}, REPLICATE).resolve(topology, 0)
    both = Domain("x", {"tp": REPLICATE, "edp": REPLICATE})  # together they reach all ranks
    assert replicas(both, topology, 3) == (0, 1, 2, 3)


def test_words_that_make_no_domain() -> None:
    with pytest.raises(DomainError, match="'max'"):
        partial("max")
    for divisor in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(DomainError, match="divisor"):
            partial(divisor=divisor)
    with pytest.raises(DomainError, match="cannot be `rest`"):
        Domain("x", {}, partial())
    for name in ("", "a b", "a/b"):
        with pytest.raises(DomainError, match="a domain's name"):
            Domain(name)


# -------------------------------------------------------------------------------------------------------- uneven axes


@pytest.mark.parametrize("rank", range(5))
def test_a_rank_alone_on_an_axis_has_the_holders_of_its_neighbours(rank: int) -> None:
    """Regression: rank 4 has no neighbour along ``edp`` and left 0 and 1, which hold the same, out."""
    for domain in (Domain.ep_sum(), Domain("dense", {"ep": REPLICATE}, REPLICATE)):
        assert replicas(domain, UNEVEN, rank) == (0, 1, 2, 3, 4)
    assert replicas(Domain.expert(), UNEVEN, rank) == ((0, 2), (1, 3), (0, 2), (1, 3), (4,))[rank]


def test_uneven_groups_agree_on_the_words_and_on_the_stage_of_a_reduction() -> None:
    """Regression: the second reduction was the first one of a rank that is alone on the first axis, and ran twice."""
    topology = Topology((0, 1, 2), {"expert": (Axis("ep", ((0,), (1, 2))), Axis("edp", ((0, 1),)))})
    domain = Domain("factor", {"ep": partial(), "edp": partial("avg")})
    seen = [domain.resolve(topology, rank) for rank in range(3)]
    assert len({r.text for r in seen}) == 1
    assert seen[0].reductions == (PendingReduction((0, 1), 2.0, "edp", 1),)
    assert seen[1].reductions == (PendingReduction((1, 2), 1.0, "ep", 0), PendingReduction((0, 1), 2.0, "edp", 1))


def test_an_axis_of_other_ranks_does_not_concern_this_one() -> None:
    apart = Topology(tuple(range(4)), {"dense": (Axis("dp", ((0, 1),)), Axis("extra", ((2, 3),)))})
    assert replicas(Domain("x", {"dp": REPLICATE}), apart, 0) == (0, 1)
    with pytest.raises(DomainError, match="axis 'extra'"):
        Domain("x", {"dp": REPLICATE}).resolve(apart, 2)


# ------------------------------------------------------------------------------------------------------- holder sets


def test_holder_sets_alone() -> None:
    domain = Domain.of_replicas("uneven", ((0, 3), (1, 2, 5)))
    assert [replicas(domain, GRID, rank) for rank in (0, 3, 5, 7)] == [(0, 3), (0, 3), (1, 2, 5), (7,)]


def test_holder_sets_with_a_pending_reduction_over_more_ranks() -> None:
    axis = Axis("adders", ((0, 1, 2, 3),))
    domain = Domain.of_replicas("listed", ((0, 2),), [(axis, partial("avg"))])
    resolved = domain.resolve(GRID, 2)
    assert resolved.replicas == (0, 2)
    assert resolved.reductions == (PendingReduction((0, 1, 2, 3), 4.0, "adders"),)


# ------------------------------------------------------------------------------------------------------------- merged


def test_a_mesh_completes_a_domain() -> None:
    domain = Domain.expert().merged({"edp": SHARD}, "its mesh")
    assert replicas(domain, GRID, 1) == (1,)
    assert Domain.expert().merged({"ep": SHARD}, "its mesh") == Domain.expert()


@pytest.mark.parametrize(("said", "seen"), [(SHARD, REPLICATE), (REPLICATE, SHARD)])
def test_a_mesh_that_contradicts_a_domain(said: Placement, seen: Placement) -> None:
    with pytest.raises(DomainError, match=rf"says {said.kind.value} along axis 'ep', but its mesh says"):
        Domain("x", {"ep": said}, REPLICATE).merged({"ep": seen}, "its mesh")


def test_what_is_pending_is_no_contradiction() -> None:
    assert Domain.ep_sum().merged({"ep": REPLICATE}, "its mesh") == Domain.ep_sum()
