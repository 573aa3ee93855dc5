"""The parameter table: every trainable parameter with its logical id, its reduction domain and the evidence for it.

Evidence, strongest first: declared by the user, the placement of a DTensor, an attribute that the framework itself
reads, ownership by a known expert container, and last the framework's default for a dense parameter, which is shown
as *assumed*. Shape, name and a fallback placement are never evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ep_hooks.domains import Domain, Evidence, EvidenceKind, Placement, ResolvedDomain
from ep_hooks.errors import DomainError, UndeclaredParameterError
from ep_hooks.plan import BucketItem, Holding, PlanItem
from ep_hooks.rules import Rule
from ep_hooks.topology import Topology

__all__ = ["Entry", "ParameterTable", "Source", "classify"]


@dataclass(frozen=True, eq=False)
class Source:
    """What an adapter knows of one trainable parameter.

    Attributes:
        id: logical id.
        parameter: the tensor the user sees; its ``.grad`` is the gradient unless the adapter says otherwise.
        shape: shape of the piece that this rank's holder set holds (for a DTensor its local shape).
        dtype: dtype of the gradient.
        evidence: statements about its domain, in any order.
        placed: axes that a device mesh names for it, with their placements.
        suspect: why it may be an expert (an expert container holds it) although nothing says so; empty if not.
        holdings: every holder's interval of the piece where holders do not hold all of it.
        named: whether ``id`` is a name that ranks share; otherwise the table numbers the parameters of each holder set.
    """

    id: str
    parameter: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    evidence: Sequence[Evidence] = ()
    placed: Mapping[str, Placement] = field(default_factory=dict)
    suspect: str = ""
    holdings: tuple[Holding, ...] | None = None
    named: bool = True

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, eq=False)
class Entry:
    """One row of the table: a source with its resolved domain."""

    id: str
    source: Source
    domain: ResolvedDomain
    evidence: Evidence

    @property
    def parameter(self) -> Tensor:
        """The parameter."""
        return self.source.parameter

    def plan_item(self, slot: int) -> PlanItem:
        """What the norm plan needs of it."""
        return PlanItem(self.id, self.source.numel, slot, self.domain.replicas, self.source.holdings)

    def bucket_items(self) -> list[BucketItem]:
        """Its pending reductions."""
        return BucketItem.of(
            self.domain.reductions,
            name=self.id,
            piece=self.domain.replicas[0],
            numel=self.source.numel,
            dtype=str(self.source.dtype).removeprefix("torch."),
        )

    def describe(self) -> str:
        """What every holder of the piece must agree on, as text."""
        # Not its pending reductions: holders may sit in groups of different size, and one alone on an axis has none.
        return (
            f"shape {list(self.source.shape)}, dtype {str(self.source.dtype).removeprefix('torch.')}, "
            f"domain {self.domain.name} ({self.domain.text})"
            + (f", holdings {self.source.holdings}" if self.source.holdings else "")
        )


@dataclass(frozen=True)
class ParameterTable:
    """All trainable parameters of one rank, in the adapter's order.

    Attributes:
        entries: the rows.
        hits: how many parameters each rule matched on this rank, in the rules' order.
    """

    entries: tuple[Entry, ...]
    hits: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def domains(self) -> tuple[str, ...]:
        """Domain names on this rank, sorted."""
        return tuple(sorted({entry.domain.name for entry in self.entries}))


def classify(
    sources: Iterable[Source],
    topology: Topology,
    rank: int,
    rules: Sequence[Rule] = (),
    *,
    declared: Callable[[Tensor], Domain | None] = lambda parameter: None,
    default: Evidence | None = None,
) -> ParameterTable:
    """Resolve every source's domain from the strongest evidence.

    Args:
        rules: declarations by name pattern; they win over every other evidence but must not contradict a mesh.
        declared: looks up what :func:`ep_hooks.declare` said of a tensor.
        default: evidence for a parameter about which nothing is known; ``None``: it is undeclared.

    Raises:
        UndeclaredParameterError: parameters without evidence; names all of them and the lines that declare them.
        DomainError: two declarations, or a declaration and a mesh, contradict each other.
        TopologyError: a domain names an axis that does not exist.
    """
    entries: list[Entry] = []
    hits = [0] * len(rules)
    undeclared: list[tuple[str, str]] = []
    seen: dict[tuple[str, tuple[int, ...]], str] = {}
    numbers: dict[tuple[int, ...], int] = {}
    for source in sources:
        matching = [i for i, rule in enumerate(rules) if rule.matches(source.id)]
        for i in matching:
            hits[i] += 1
        rule = _one_rule(source.id, [rules[i] for i in matching])
        said = declared(source.parameter)
        if rule is not None and said is not None and said != rule.domain:
            raise DomainError(
                f"{source.id}: ep_hooks.declare() says {said.name!r}, the rule {rule.match!r} says "
                f"{rule.domain.name!r}; remove one of them"
            )
        evidence = _strongest(source, rule, said, default)
        if evidence is None:
            undeclared.append((source.id, source.suspect or "no evidence"))
            continue
        try:
            resolved = evidence.domain.merged(source.placed, "its device mesh").resolve(topology, rank)
        except DomainError as error:
            if evidence.kind is EvidenceKind.DECLARED:
                raise type(error)(f"{source.id}: {error}") from None
            undeclared.append((source.id, str(error)))
            continue
        name = (rule.id if rule else None) or source.id
        if not source.named:
            # Uneven lists shift positions; the order within one holder set is the same on all of its ranks.
            number = numbers[resolved.replicas] = numbers.get(resolved.replicas, -1) + 1
            name = f"{resolved.name}[{number}]"
        key = (name, resolved.replicas)
        if key in seen:
            raise DomainError(
                f"two parameters have the logical id {name!r} on rank {rank}: {seen[key]} and {source.id}"
            )
        seen[key] = source.id
        entries.append(Entry(name, source, resolved, evidence))
    if undeclared:
        raise UndeclaredParameterError(_undeclared_message(undeclared, rank))
    return ParameterTable(tuple(entries), tuple(hits))


def _one_rule(name: str, rules: Sequence[Rule]) -> Rule | None:
    for other in rules[1:]:
        if (other.domain, other.id) != (rules[0].domain, rules[0].id):
            raise DomainError(
                f"{name} is matched by two rules with different domains: {rules[0].match!r} ({rules[0].domain.name}) "
                f"and {other.match!r} ({other.domain.name}); make the patterns disjoint"
            )
    return rules[0] if rules else None


def _strongest(source: Source, rule: Rule | None, said: Domain | None, default: Evidence | None) -> Evidence | None:
    if rule is not None:
        return Evidence(EvidenceKind.DECLARED, f"rule {rule.match!r}", rule.domain)
    if said is not None:
        return Evidence(EvidenceKind.DECLARED, "ep_hooks.declare()", said)
    best = max(source.evidence, key=lambda evidence: evidence.kind, default=default)
    if source.suspect and (best is None or best.kind < EvidenceKind.PLACEMENT):
        # What a framework does with a parameter by default does not tell that it is right for an expert: a wrong
        # answer is worse than an error that names it.
        return None
    for other in source.evidence:
        if best is not None and other.kind is best.kind and other.domain != best.domain:
            raise DomainError(
                f"{source.id}: two {best.kind.name.lower()} evidences contradict each other: {best.source} says "
                f"{best.domain.name!r}, {other.source} says {other.domain.name!r}; declare it, in the config or with "
                "ep_hooks.declare()"
            )
    return best


def _undeclared_message(undeclared: Sequence[tuple[str, str]], rank: int) -> str:
    shown = "\n".join(f"  {name}: {why}" for name, why in undeclared[:20])
    more = f"\n  ... and {len(undeclared) - 20} more" if len(undeclared) > 20 else ""
    example = undeclared[0][0]
    return (
        f"rank {rank}: {len(undeclared)} parameter(s) have no evidence that says which ranks hold the same gradient:\n"
        f"{shown}{more}\n"
        "Declare them, either in the config:\n"
        "  domains:\n"
        f'    - {{match: "{example}", domain: expert}}   # distinct on every rank of the axis `ep`\n'
        f'    - {{match: "{example}", domain: dense}}    # the same on all ranks\n'
        f'    - {{match: "{example}", domain: ep_sum}}   # shared by all experts, to be summed over `ep`\n'
        "or in code: ep_hooks.declare(parameter, 'expert')."
    )
