"""The agreement of several ranks in one process: a thread each, and all must give or raise the same."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_hooks import agreement
from ep_hooks.agreement import Agreed, Report, agree, gather_objects, portable, raise_first
from ep_hooks.domains import REPLICATE, Domain, Evidence, EvidenceKind, partial
from ep_hooks.errors import AgreementError, ConfigError, DomainError
from ep_hooks.rules import Rule
from ep_hooks.table import ParameterTable, Source, classify
from ep_hooks.topology import Axis, Topology

GRID = Topology.grid({"expert": {"edp": 2, "ep": 2}})
RULES = [Rule("expert*", Domain.expert()), Rule("shared*", Domain.ep_sum()), Rule("dense*", Domain.replicated())]
FACTS = (("the torch version", "2.x"),)
NAMES = ("dense", "expert", "shared")

Agree = Callable[[Sequence[ParameterTable], Sequence[Report]], Agreed]


def table(
    rank: int,
    names: Sequence[str] = NAMES,
    topology: Topology = GRID,
    shape: tuple[int, ...] = (3,),
    dtype: torch.dtype = torch.float32,
) -> ParameterTable:
    return classify([Source(name, torch.zeros(shape), shape, dtype) for name in names], topology, rank, RULES)


def report(found: ParameterTable, topology: Topology = GRID, facts: Sequence[tuple[str, str]] = FACTS) -> Report:
    return Report.of(found, topology, facts, [rule.match for rule in RULES])


@pytest.fixture
def agree_all(monkeypatch: pytest.MonkeyPatch) -> Agree:
    def run(tables: Sequence[ParameterTable], reports: Sequence[Report]) -> Agreed:
        world = len(tables)
        barrier, board = threading.Barrier(world, timeout=20), [None] * world

        def gather(value: Any, rank: Any) -> list[Any]:
            board[rank] = pickle.loads(pickle.dumps(value))
            barrier.wait()
            everyone = list(board)
            barrier.wait()
            return everyone

        def one(rank: int) -> Agreed | Exception:
            try:
                return agree(tables[rank], reports[rank], range(world), rank)  # type: ignore[arg-type]
            except Exception as error:
                return error

        monkeypatch.setattr(agreement, "gather_objects", gather)
        with ThreadPoolExecutor(world) as pool:
            outcomes = list(pool.map(one, range(world)))
        assert len({str(outcome) for outcome in outcomes}) == 1, outcomes
        if isinstance(outcomes[0], Exception):
            raise outcomes[0]
        return outcomes[0]

    return run


def test_ranks_that_agree(agree_all: Agree) -> None:
    tables = [table(rank) for rank in range(4)]
    agreed = agree_all(tables, [report(t) for t in tables])
    assert agreed.domains == ("dense", "ep_sum", "expert")
    assert [(item.ranks, item.id) for item in agreed.reductions] == [((0, 1), "shared"), ((2, 3), "shared")]
    assert not agreed.wide and not agreed.assumed


def test_ranks_that_rightly_differ(agree_all: Agree) -> None:
    """An expert that only one coordinate has, and parameters in another order."""
    names = [("dense", "expert.0", "shared"), ("shared", "dense"), ("expert.0", "shared", "dense"), ("dense", "shared")]
    tables = [table(rank, names[rank]) for rank in range(4)]
    assert agree_all(tables, [report(t) for t in tables]).domains == ("dense", "ep_sum", "expert")


def test_what_one_rank_has_all_ranks_know(agree_all: Agree) -> None:
    tables = [table(rank) for rank in range(4)]
    reports = [report(t) for t in tables]
    reports[1], reports[2] = replace(reports[1], wide=True), replace(reports[2], assumed=True)
    agreed = agree_all(tables, reports)
    assert agreed.wide and agreed.assumed


@pytest.mark.parametrize(
    "odd",
    [table(3, shape=(4,)), table(3, dtype=torch.bfloat16), table(3, NAMES[1:])],
    ids=["shape", "dtype", "missing"],
)
def test_a_replica_that_differs(odd: ParameterTable, agree_all: Agree) -> None:
    tables = [*(table(rank) for rank in range(3)), odd]
    with pytest.raises(AgreementError, match=r"ranks \[0, 1, 2, 3\] should hold the same piece of 'dense'") as caught:
        agree_all(tables, [report(t) for t in tables])
    assert "  rank 0: shape [3], dtype float32" in str(caught.value) and "  rank 3: " in str(caught.value)


def test_facts_and_axes_that_differ(agree_all: Agree) -> None:
    tables = [table(rank) for rank in range(4)]
    reports = [report(t, facts=[("the torch version", f"2.{rank == 2:d}")]) for rank, t in enumerate(tables)]
    with pytest.raises(AgreementError, match=r"ranks 0 and 2 disagree about the torch version: '2\.0' and '2\.1'"):
        agree_all(tables, reports)
    turned = Topology.grid({"expert": {"ep": 2, "edp": 2}})
    reports = [report(t, turned if rank == 1 else GRID) for rank, t in enumerate(tables)]
    with pytest.raises(AgreementError, match="ranks 0 and 1 disagree about which ranks lie along axis 'edp'"):
        agree_all(tables, reports)


def test_a_rule_that_matches_nothing_anywhere(agree_all: Agree) -> None:
    tables = [table(rank, ("dense", "shared")) for rank in range(4)]
    with pytest.raises(ConfigError, match=r"'expert\*' matches no trainable parameter on any rank"):
        agree_all(tables, [report(t) for t in tables])
    tables[2] = table(2)
    with pytest.raises(AgreementError, match=r"ranks \[0, 2\] should hold the same piece of 'expert'"):
        agree_all(tables, [report(t) for t in tables])


def test_a_domain_outside_the_rank_set(agree_all: Agree) -> None:
    outside = (Evidence(EvidenceKind.ATTRIBUTE, "test", Domain.of_replicas("listed", ((0, 7),))),)
    found = classify([Source("w", torch.zeros(1), (1,), torch.float32, outside)], GRID, 0)
    tables = [found, *(ParameterTable(()) for _ in range(3))]
    with pytest.raises(AgreementError, match=r"names ranks \[7\], which are outside the rank set \[0, 1, 2, 3\]"):
        agree_all(tables, [Report.of(t, GRID, FACTS, ()) for t in tables])


def test_uneven_expert_groups_agree_about_a_shared_factor(agree_all: Agree) -> None:
    uneven = Topology((0, 1, 2), {"expert": (Axis("ep", ((0,), (1, 2))), Axis("edp", ((0, 1),)))})
    tables = [table(rank, NAMES, uneven) for rank in range(3)]
    agree_all(tables, [report(t, uneven) for t in tables])


def test_replicas_that_divide_their_sum_differently(agree_all: Agree) -> None:
    def found(rank: int) -> ParameterTable:
        declared = Domain("halved", {"ep": partial("sum", 2.0 if rank == 1 else 1.0)}, REPLICATE)
        return classify([Source("w", torch.zeros(3), (3,), torch.float32)], GRID, rank, [Rule("w", declared)])

    tables = [found(rank) for rank in range(4)]
    with pytest.raises(AgreementError, match=r"ep:partial\(sum / 2\)"):
        agree_all(tables, [Report.of(t, GRID, FACTS, ["w"]) for t in tables])


def test_one_process_needs_no_group() -> None:
    alone = Topology((0,))
    found = classify([], alone, 0)
    agreed = agree(found, Report.of(found, alone, FACTS, ()), (0,), None)
    assert (agreed.domains, agreed.reductions) == ((), ())
    assert gather_objects("x", None) == ["x"]


def test_every_rank_raises_the_first_error_and_a_failed_rank_its_own() -> None:
    failed = [None, portable(DomainError("wrong")), portable(ValueError("later"))]
    with pytest.raises(DomainError, match="rank 4 failed: wrong"):
        raise_first(None, failed, [3, 4, 5])
    mine = ValueError("later")
    with pytest.raises(ValueError) as caught:
        raise_first(mine, failed, [3, 4, 5])
    assert caught.value is mine
    raise_first(None, [None, None], [0, 1])


class _NeedsTwoError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one, two)


def test_errors_that_other_ranks_could_not_rebuild() -> None:
    class LocalError(Exception):
        pass

    assert portable(None) is None
    assert portable(KeyError("a")) == ("'a'", KeyError)
    assert portable(LocalError("text")) == ("text", AgreementError)
    assert portable(_NeedsTwoError("a", "b")) == ("('a', 'b')", AgreementError)
