"""The parameter table: the strongest evidence wins, contradictions and silence are errors that name the parameter."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from ep_hooks.declarations import declaration_of, declare
from ep_hooks.domains import REPLICATE, SHARD, Domain, Evidence, EvidenceKind, partial
from ep_hooks.errors import DomainError, TopologyError, UndeclaredParameterError
from ep_hooks.plan import Holding
from ep_hooks.rules import Rule
from ep_hooks.table import Entry, ParameterTable, Source, classify
from ep_hooks.topology import Topology

GRID = Topology.grid({"expert": {"edp": 2, "ep": 2}})
DENSE = Evidence(EvidenceKind.ASSUMED, "default", Domain.replicated())


def source(name: str, *evidence: Evidence, shape: tuple[int, ...] = (2, 3), suspect: str = "") -> Source:
    return Source(name, torch.zeros(shape), shape, torch.float32, evidence, suspect=suspect)


def said(kind: EvidenceKind, domain: Domain) -> Evidence:
    return Evidence(kind, kind.name.lower(), domain)


def only(table: ParameterTable) -> Entry:
    (entry,) = table
    return entry


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_strongest_evidence_wins_in_any_order(order: tuple[int, ...]) -> None:
    kinds = (EvidenceKind.ASSUMED, EvidenceKind.STRUCTURE, EvidenceKind.ATTRIBUTE, EvidenceKind.PLACEMENT)
    everything = [said(kind, Domain(kind.name.lower(), {}, REPLICATE)) for kind in kinds]
    entry = only(classify([source("w", *(everything[i] for i in order))], GRID, 0))
    assert (entry.domain.name, entry.evidence.kind) == ("placement", EvidenceKind.PLACEMENT)


def test_evidence_of_one_kind_that_contradicts_itself() -> None:
    first = said(EvidenceKind.ATTRIBUTE, Domain.replicated())
    twin, other = replace(first, source="twin"), Evidence(EvidenceKind.ATTRIBUTE, "other", Domain.expert())
    assert only(classify([source("w", first, twin)], GRID, 0)).evidence == first
    message = "w: two attribute evidences contradict each other: attribute says 'dense', other says 'expert'"
    with pytest.raises(DomainError, match=message):
        classify([source("w", first, other)], GRID, 0)
    placed = said(EvidenceKind.PLACEMENT, Domain.expert())
    for rules, evidence in (([], (first, other, placed)), ([Rule("w", Domain.expert())], (first, other))):
        assert only(classify([source("w", *evidence)], GRID, 0, rules)).domain.replicas == (0, 2)


def test_a_declaration_wins_over_a_placement() -> None:
    placed = said(EvidenceKind.PLACEMENT, Domain.replicated())
    by_rule = only(classify([source("w", placed)], GRID, 0, [Rule("w", Domain.expert())]))
    assert (by_rule.domain.replicas, by_rule.evidence.source) == ((0, 2), "rule 'w'")
    by_call = only(classify([source("w", placed)], GRID, 0, declared=lambda parameter: Domain.expert()))
    assert (by_call.domain.replicas, by_call.evidence.source) == ((0, 2), "ep_hooks.declare()")


def test_the_default_is_shown_as_assumed() -> None:
    entry = only(classify([source("w")], GRID, 0, default=DENSE))
    assert (entry.evidence.kind, entry.domain.replicas) == (EvidenceKind.ASSUMED, (0, 1, 2, 3))


@pytest.mark.parametrize("kind", [EvidenceKind.ASSUMED, EvidenceKind.STRUCTURE, EvidenceKind.ATTRIBUTE])
def test_what_an_expert_container_holds_needs_more_than_a_framework_default(kind: EvidenceKind) -> None:
    suspicious = source("experts.0.w", said(kind, Domain.replicated()), suspect="held by MoE")
    with pytest.raises(UndeclaredParameterError, match=r"experts\.0\.w: held by MoE"):
        classify([suspicious], GRID, 0, default=DENSE)
    assert len(classify([suspicious], GRID, 0, [Rule("experts.*", Domain.expert())])) == 1
    placed = replace(suspicious, evidence=[said(EvidenceKind.PLACEMENT, Domain.expert())])
    assert len(classify([placed], GRID, 0)) == 1


def test_undeclared_parameters_are_named_with_the_lines_that_declare_them() -> None:
    with pytest.raises(UndeclaredParameterError) as caught:
        classify([source(f"layers.{i}.w") for i in range(23)], GRID, 3)
    text = str(caught.value)
    assert text.startswith("rank 3: 23 parameter(s)")
    assert "layers.19.w: no evidence" in text and "layers.20.w" not in text and "... and 3 more" in text
    assert '- {match: "layers.0.w", domain: expert}' in text and "ep_hooks.declare(parameter, 'expert')" in text


def test_a_domain_that_cannot_be_resolved_is_an_error_or_no_evidence() -> None:
    half = Domain("half", {"ep": SHARD})
    with pytest.raises(DomainError, match=r"^w: domain 'half' says nothing about axis 'edp'"):
        classify([source("w")], GRID, 0, [Rule("w", half)])
    with pytest.raises(UndeclaredParameterError, match="w: domain 'half' says nothing about axis 'edp'"):
        classify([source("w", said(EvidenceKind.ATTRIBUTE, half))], GRID, 0)
    with pytest.raises(TopologyError, match="no axis 'moe'"):
        classify([source("w")], GRID, 0, [Rule("w", Domain.expert("moe"))])


def test_a_mesh_completes_a_declaration_or_contradicts_it() -> None:
    completed = replace(source("w"), placed={"edp": SHARD})
    assert only(classify([completed], GRID, 1, [Rule("w", Domain.expert())])).domain.replicas == (1,)
    placed = replace(source("w"), placed={"ep": REPLICATE})
    with pytest.raises(
        DomainError, match="w: domain 'expert' says shard along axis 'ep', but its device mesh says rep"
    ):
        classify([placed], GRID, 0, [Rule("w", Domain.expert())])
    with pytest.raises(UndeclaredParameterError, match="its device mesh says replicate"):
        classify([placed], GRID, 0, default=said(EvidenceKind.ASSUMED, Domain.expert()))


def test_rules_count_what_they_match() -> None:
    rules = [Rule("experts.*", Domain.expert()), Rule("*.bias", Domain.expert()), Rule("nothing", Domain.ep_sum())]
    table = classify([source("experts.0.w"), source("experts.0.bias"), source("norm")], GRID, 0, rules, default=DENSE)
    assert table.hits == (2, 1, 0)
    assert table.domains() == ("dense", "expert")


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [("*", True), ("a.*", True), ("*.c", True), ("b", False), ("A.*", False), ("a.?.c", True), ("a.[xy].c", False)],
)
def test_patterns_cover_the_whole_name(pattern: str, matches: bool) -> None:
    assert Rule(pattern, Domain.expert()).matches("a.b.c") is matches


def test_two_declarations_that_differ() -> None:
    rules = [Rule("experts.*", Domain.expert()), Rule("*.w", Domain.replicated())]
    with pytest.raises(DomainError, match=r"experts\.0\.w is matched by two rules .*'experts\.\*' \(expert\) and"):
        classify([source("experts.0.w")], GRID, 0, rules)
    with pytest.raises(DomainError, match="two rules"):
        classify([source("a")], GRID, 0, [Rule("a", Domain.expert(), "one"), Rule("*", Domain.expert(), "two")])
    with pytest.raises(DomainError, match=r"w: ep_hooks.declare\(\) says 'dense', the rule 'w' says 'expert'"):
        classify([source("w")], GRID, 0, [Rule("w", Domain.expert())], declared=lambda p: Domain.replicated())


def test_a_rule_gives_a_logical_id() -> None:
    rules = [Rule("head.weight", Domain.replicated(), "tied"), Rule("other", Domain.replicated(), "tied")]
    assert only(classify([source("head.weight")], GRID, 0, rules)).id == "tied"
    with pytest.raises(DomainError, match=r"the logical id 'tied' on rank 0: head\.weight and other"):
        classify([source("head.weight"), source("other")], GRID, 0, rules)
    twins = [Rule("a", Domain.expert(), "w"), Rule("b", Domain.replicated(), "w")]
    table = classify([source("a"), source("b")], GRID, 0, twins)
    assert [(entry.id, entry.domain.replicas) for entry in table] == [("w", (0, 2)), ("w", (0, 1, 2, 3))]


def test_parameters_without_names_are_numbered_by_holder_set() -> None:
    rules = [Rule("e*", Domain.expert())]
    sources = [replace(source(name), named=False) for name in ("e0", "d0", "e1", "d1")]
    table = classify(sources, GRID, 0, rules, default=DENSE)
    assert [entry.id for entry in table] == ["expert[0]", "dense[0]", "expert[1]", "dense[1]"]


def test_what_an_entry_tells_the_plan() -> None:
    held = (Holding(0, 0, 4), Holding(2, 4, 6))
    rule = Rule("w", Domain("factor", {"ep": partial("sum"), "edp": partial("avg", 2.0)}))
    entry = only(classify([replace(source("w"), holdings=held, dtype=torch.bfloat16)], GRID, 2, [rule]))
    item = entry.plan_item(5)
    assert (item.id, item.numel, item.slot, item.replicas, item.holdings) == ("w", 6, 5, (0, 1, 2, 3), held)
    assert [(i.stage, i.ranks, i.dtype, i.divisor, i.piece, i.numel, i.axis) for i in entry.bucket_items()] == [
        (0, (2, 3), "bfloat16", 1.0, 0, 6, "ep"),
        (1, (0, 2), "bfloat16", 4.0, 0, 6, "edp"),
    ]


def test_holders_describe_a_piece_alike_and_notice_a_difference() -> None:
    def describe(rank: int, **changes: object) -> str:
        return only(classify([replace(source("w"), **changes)], GRID, rank, [Rule("w", Domain.ep_sum())])).describe()

    assert len({describe(rank) for rank in range(4)}) == 1
    for change in ({"shape": (3, 2)}, {"dtype": torch.float16}, {"holdings": (Holding(0, 0, 6),)}):
        assert describe(0) != describe(0, **change)


def test_declare() -> None:
    weight, twin = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    assert declare(weight, "expert") is weight
    assert (declaration_of(weight), declaration_of(twin)) == (Domain.expert(), None)
    declare(weight, Domain.ep_sum())
    assert declaration_of(weight) == Domain.ep_sum()
    with pytest.raises(DomainError, match="no domain 'experts'"):
        declare(weight, "experts")
    with pytest.raises(DomainError, match="name of a domain or a Domain"):
        declare(weight, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a parameter, got str"):
        declare("w", "expert")  # type: ignore[arg-type]
