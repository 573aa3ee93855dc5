"""The audit: what was declared against what gradients, weights and optimizer states really are, in a few steps.

| declared | gradients | weights | reading |
|---|---|---|---|
| replicas | equal | equal | healthy |
| replicas | close | equal | drift: nondeterministic kernels (info) |
| replicas | differ | any | a reduction is missing |
| replicas | any | differ | the replicas have drifted apart |
| distinct | equal, not zero | differ | reduced over ranks that hold other pieces, unless the probe has cleared it |
| distinct | equal, not zero | equal | mixed, or broadcast over, unless the probe has cleared it |
| any | zero | any | undetermined: looked at again in the next audited step |

Only equal pieces are compared. Fingerprints are a screen; what they find different is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_hooks.agreement import gather_objects
from ep_hooks.assumptions import TOLERANCE, holding_the_same, tolerance
from ep_hooks.config import AuditConfig
from ep_hooks.domains import PlacementKind
from ep_hooks.findings import Finding, Kind, Severity
from ep_hooks.fingerprints import Screened, exact, screen
from ep_hooks.norm import Verdict
from ep_hooks.probing import merged
from ep_hooks.recount import recount
from ep_hooks.session import Session
from ep_hooks.table import Entry

__all__ = ["Audit"]

FIRST_STEPS = (1, 2, 10, 100)
_CLIPPED, _CLIPPED_NARROW = 1e-5, 5e-3
"""Relative difference between the norm after the clip and before the step; with 16-bit gradients."""
_MOST_FETCHED = 16
"""Tensors by comparison that are fetched to measure how different they are."""
_MOST_FINDINGS = 32
_NOTHING = 2**63 - 1
_KINDS = ("gradients", "weights", "states")
_Key = tuple[tuple[int, ...], str, tuple[int, ...]]
"""Ranks, axis and kinds of a comparison."""


@dataclass(frozen=True)
class _Comparison:
    """Entries that ranks compare with each other, in the same order on all of them.

    Attributes:
        ranks: who compares.
        axis: the axis along which the entries are declared distinct; empty: they are replicas.
        kinds: what is compared, see :data:`_KINDS`.
        indices: of the session's entries.
    """

    ranks: tuple[int, ...]
    axis: str
    kinds: tuple[int, ...]
    indices: tuple[int, ...]


@dataclass
class _Clipped:
    """A step that was audited and clipped.

    Attributes:
        norm: after the clip, as it should be.
        before_step: the norm of what this rank counts, right before its optimizer stepped; ``None``: it did not.
    """

    step: int
    norm: float
    norm_type: float
    before_step: float | None = None


class Audit:
    """Audits the steps of one session.

    Args:
        session: its :attr:`Session.auditor` is set.
        optimizers: those that hold the parameters, if they are known.
        cleared: whether the probe has run, and names that it has found right: equal pieces are twins then, not mixed.
        report: takes the findings of an audited step, which are the same on all ranks.
    """

    def __init__(
        self,
        session: Session,
        config: AuditConfig,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        cleared: Callable[[], tuple[bool, frozenset[str]]],
        report: Callable[[Sequence[Finding], int], None],
    ) -> None:
        self.session, self.config = session, config
        self._optimizers, self._cleared, self._report = optimizers, cleared, report
        self.step = self._begun = 0
        self.audited = self.loaded = False
        self._comparisons: list[_Comparison] | None = None
        self._entries: Sequence[Entry] = ()
        self._screened: Screened | None = None
        self._left: _Clipped | None = None

    # ---- called by the session -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step is about to be measured. An exchange if the one before it was audited."""
        self._follow_up()
        self.step += 1
        self.audited = self.step - self._begun in FIRST_STEPS or self.step % self.config.every == 0

    def begin_anew(self) -> None:
        """Some rank has loaded an optimizer's state: this step is audited as the first one is."""
        self._begun, self.audited, self.loaded = self.step - 1, True, False

    def screen(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Fingerprint this step's gradients; returns their sums of squares, for the norm."""
        self._screened = screen(gradients)
        return self._screened.squares

    def measured(self, gradients: Sequence[Tensor | None], verdict: Verdict, norm_type: float | None) -> None:
        """Compare. Collectives: one by set of ranks that compare, a broadcast by difference, three exchanges."""
        if bool(verdict.nonfinite):
            return  # NaN equals nothing; the policies deal with it
        session = self.session
        if self._entries is not session.entries:
            self._entries, self._comparisons = session.entries, None
        if self._comparisons is None:
            self._comparisons = self._plan()
        screened = self._screened if self._screened is not None else screen(gradients)
        self._screened = None
        weights = session.adapter.weights(session.entries)
        tensors = {
            "gradients": [[] if gradient is None else [gradient] for gradient in gradients],
            "weights": [[weight] for weight in weights],
            "states": [self._state(entry) for entry in session.entries],
        }
        words = torch.stack([screened.words, screen(weights).words, _words_of(tensors["states"])])
        found: list[Finding] = []
        for comparison in self._comparisons:
            found += self._compare(comparison, tensors, words)
        found += self._held_by_optimizers()
        if norm_type == 2.0:
            differing = any(finding.kind in (Kind.NOT_REDUCED, Kind.DRIFT) for finding in found)
            sure = session.complete and not differing
            found += [replace(f, step=self.step) for f in recount(session, screened.squares, verdict, sure=sure)]
        self._publish(found, self.step)

    def clipped(self, expected: float, norm_type: float) -> None:
        """The session has clipped to ``expected``: to be measured again right before the optimizer steps."""
        self._left = _Clipped(self.step, expected, norm_type)

    def before_step(self) -> None:
        """An optimizer is about to step. No collective: nobody knows whether the other ranks' optimizers step too."""
        if self._left is not None and self._left.before_step is None:
            self._left.before_step = self.session.own_norm(self._left.norm_type)

    def _follow_up(self) -> None:
        """What became of the last audited step: did all ranks take it, with the gradients that the clip had left?"""
        if self._left is None:
            return
        left, self._left = self._left, None
        ranks = self.session.topology.ranks
        mine = left.before_step if self.session.entries else 0.0
        answers = gather_objects((bool(self._optimizers()), mine), self.session.group)
        stepped = [rank for rank, (_, norm) in zip(ranks, answers, strict=True) if norm]
        still = [rank for rank, (steps, norm) in zip(ranks, answers, strict=True) if steps and norm is None]
        if stepped and still:
            self._publish([_left_out(ranks, still, left.step)], left.step)
        norms = [norm for _, norm in answers if norm is not None]
        if len(norms) < len(ranks) or not math.isfinite(left.norm):
            return
        now = _together(norms, left.norm_type)
        narrow = any(entry.source.dtype not in (torch.float32, torch.float64) for entry in self.session.entries)
        tolerance = _CLIPPED_NARROW if narrow else _CLIPPED
        if not abs(now - left.norm) <= tolerance * max(left.norm, 1e-30):  # NaN too
            self._publish([_changed(ranks, left, now)], left.step)

    def host_norm(self, smallest: float, largest: float, true: float) -> None:
        """The framework clips by its own norm, which was measured: between these on all ranks. No collective."""
        if max(abs(smallest - true), abs(largest - true)) <= TOLERANCE * true:
            return
        seen = f"norm {smallest:.6g}" if smallest == largest else f"norms {smallest:.6g} to {largest:.6g}"
        coefficient = "another coefficient on every rank" if smallest != largest else "the wrong coefficient"
        self._report(
            [
                Finding(
                    Kind.HOST_NORM,
                    Severity.ERROR,
                    ranks=self.session.topology.ranks,
                    declared=f"norm {true:.6g}",
                    seen=f"the framework's {seen}",
                    evidence="the framework's function, measured",
                    consequence=f"the framework clips by {coefficient}",
                    remedy="let ep_hooks clip: `mode: enforce` and `clip: {replace: auto}`",
                    step=self.step,
                )
            ],
            self.step,
        )

    # ---- comparisons ---------------------------------------------------------------------------------------------

    def _plan(self) -> list[_Comparison]:
        """Agree on who compares what. One exchange over the rank set."""
        session = self.session
        mine: dict[_Key, dict[str, int]] = {}
        for index, entry in enumerate(session.entries):
            for key in self._partners(entry):
                mine.setdefault(key, {})[entry.id] = index
        offered = {key: {name: self._size(index, key) for name, index in names.items()} for key, names in mine.items()}
        everyone = dict(zip(session.topology.ranks, gather_objects(offered, session.group), strict=True))
        comparisons = []
        for key in sorted(mine):
            ranks, axis, kinds = key
            common = [
                name
                for name in sorted(mine[key])
                if all(everyone[rank].get(key, {}).get(name) == offered[key][name] for rank in ranks)
            ]
            if common:
                session.process_groups.get(ranks)
                comparisons.append(_Comparison(ranks, axis, kinds, tuple(mine[key][name] for name in common)))
        return comparisons

    def _partners(self, entry: Entry) -> Iterable[_Key]:
        alike, replicas = holding_the_same(entry, self.session.rank), entry.domain.replicas
        if alike == replicas and len(replicas) > 1:
            yield replicas, "", (0, 1, 2)
        elif len(replicas) > 1:  # intervals of gradients and states, but all of the weight
            yield replicas, "", (1,)
            if len(alike) > 1:
                yield alike, "", (0, 2)
        for axis, placement in entry.domain.placements:
            if placement.kind is PlacementKind.SHARD and axis.name not in entry.source.placed:
                group = tuple(sorted(axis.group_of(self.session.rank)))
                if len(group) > 1:
                    yield group, axis.name, (0, 1)

    def _size(self, index: int, key: _Key) -> int:
        lo, hi = self.session.interval(self.session.entries[index])
        return hi - lo if 0 in key[2] else self.session.entries[index].source.numel

    def _compare(
        self, comparison: _Comparison, everything: Mapping[str, Sequence[Sequence[Tensor]]], words: Tensor
    ) -> list[Finding]:
        """Screen, hash what the screen finds different, and judge. ``words``: [what is compared, entry]."""
        indices = torch.tensor(comparison.indices)
        mine = words[list(comparison.kinds)][:, indices]
        tensors = {_KINDS[kind]: everything[_KINDS[kind]] for kind in comparison.kinds}
        present = torch.tensor([[bool(held[i]) for i in comparison.indices] for held in tensors.values()])
        low, high = self._extremes(comparison, mine, present)
        if not comparison.axis and (unequal := (low != high).nonzero().tolist()):
            # The screen may err between kinds of hardware, a hash does not.
            kinds = list(tensors.values())
            hashed = mine.clone()
            for row, place in unequal:
                hashed[row, place] = hash(tuple(exact(t) for t in kinds[row][comparison.indices[place]])) >> 2
            low, high = self._extremes(comparison, hashed, present)
        if comparison.axis:
            return self._distinct(comparison, low == high, (low == 0) & (high == 0) | (high < low))
        return self._replicas(comparison, tensors, low < high)

    def _extremes(self, comparison: _Comparison, words: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest word of each entry over the ranks that have it; largest below smallest: nobody has."""
        groups, ranks = self.session.process_groups, comparison.ranks
        both = torch.stack([words, ~words])
        both[:, ~present] = _NOTHING
        both = both.to(groups.device(ranks, self.session.device))
        dist.all_reduce(both, dist.ReduceOp.MIN, groups.get(ranks))
        low, high = both.cpu()
        return low, ~high

    def _distinct(self, comparison: _Comparison, equal: Tensor, silent: Tensor) -> list[Finding]:
        found = []
        probed, cleared = self._cleared()
        suspects = (equal[0] & ~silent[0]).nonzero().flatten().tolist()
        for place in suspects:
            entry = self._entries[comparison.indices[place]]
            if entry.id in cleared:
                continue
            same = bool(equal[1, place])
            also = "and weights " if same else ""
            found.append(
                self._finding(
                    Kind.PIECES_EQUAL if same else Kind.WRONG_RANKS,
                    Severity.ERROR if probed else Severity.WARNING,
                    entry,
                    comparison,
                    f"gradients {also}equal and not zero on all ranks of the axis",
                    "different experts are trained with one and the same gradient"
                    + (", and have become copies of each other" if same else ""),
                    f"keep whoever reduces it from reducing over `{comparison.axis}` (its process group, or "
                    "`allreduce`); ep_hooks.probe(model) tells mixed experts from equal ones",
                )
            )
        return found

    def _replicas(
        self, comparison: _Comparison, tensors: Mapping[str, Sequence[Sequence[Tensor]]], different: Tensor
    ) -> list[Finding]:
        found = []
        local = self.session.config.probe.local_axes
        for row, (what, held) in enumerate(tensors.items()):
            for place in different[row].nonzero().flatten().tolist()[:_MOST_FETCHED]:
                index = comparison.indices[place]
                entry = self._entries[index]
                distance = self._distance(comparison, held[index])
                if distance == 0:
                    continue
                axis = self._axis(entry, comparison.ranks)
                close = distance <= tolerance(entry.source.dtype) and (what == "gradients" or axis in local)
                kind, consequence, remedy = _READINGS[what]
                found.append(
                    self._finding(
                        Kind.DRIFT if close else kind,
                        Severity.INFO if close else Severity.ERROR,
                        entry,
                        comparison,
                        f"{what} differ by {distance:.2g} of the largest element",
                        consequence,
                        remedy.format(id=entry.id, axis=axis or "AXIS"),
                        axis,
                    )
                )
        return found

    def _distance(self, comparison: _Comparison, held: Sequence[Tensor]) -> float:
        """Largest difference to the first rank's numbers over the largest number. Two exchanges and a MAX.

        A rank that has nothing counts as zeros; infinite where ranks have different numbers of elements.
        """
        groups, ranks = self.session.process_groups, comparison.ranks
        group, device = groups.get(ranks), groups.device(ranks, self.session.device)
        flat = [torch.view_as_real(t).reshape(-1) if t.is_complex() else t.reshape(-1) for t in held]
        mine = torch.cat([t.detach().double() for t in flat]) if flat else torch.zeros(0, dtype=torch.float64)
        sizes = {size for size in gather_objects(len(mine), group) if size}
        if len(sizes) != 1:
            return math.inf
        mine = (mine if len(mine) else torch.zeros(sizes.pop(), dtype=torch.float64)).to(device)
        first = mine.clone()
        dist.broadcast(first, ranks[0], group)
        numbers = torch.stack([(mine - first).abs().amax(), mine.abs().amax()])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
        return float(numbers[0] / numbers[1]) if float(numbers[1]) else 0.0

    def _finding(
        self,
        kind: Kind,
        severity: Severity,
        entry: Entry,
        comparison: _Comparison,
        seen: str,
        consequence: str,
        remedy: str,
        axis: str = "",
    ) -> Finding:
        return Finding(
            kind, severity, entry.id, axis or comparison.axis, comparison.ranks,
            f"{entry.domain.name} ({entry.domain.text})", seen,
            f"{entry.evidence.kind.name.lower()}: {entry.evidence.source}; audit", consequence, remedy, self.step,
        )  # fmt: skip

    def _axis(self, entry: Entry, ranks: Sequence[int]) -> str:
        """The smallest axis along which these ranks are replicas."""
        groups = [
            (len(group), axis.name)
            for axis, placement in entry.domain.placements
            if placement.kind is not PlacementKind.SHARD
            and len(group := axis.group_of(self.session.rank)) > 1
            and set(group) <= set(ranks)
        ]
        return min(groups)[1] if groups else ""

    # ---- optimizers ----------------------------------------------------------------------------------------------

    def _state(self, entry: Entry) -> list[Tensor]:
        """Tensors of the optimizer's state for this parameter, of its size."""
        tensors: list[Tensor] = []
        for optimizer in self._optimizers():
            state: dict[str, Any] = optimizer.state.get(entry.parameter, {})
            for name in sorted(state, key=str):
                value = state[name]
                if isinstance(value, Tensor) and value.numel() == entry.parameter.numel():
                    tensors.append(getattr(value, "_local_tensor", value).detach())
        return tensors

    def _held_by_optimizers(self) -> list[Finding]:
        optimizers = self._optimizers()
        if not optimizers:
            return []
        held: dict[int, int] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    held[id(parameter)] = held.get(id(parameter), 0) + 1
        found = []
        for entry in self._entries:
            count = held.get(id(entry.parameter), 0)
            if count == 1:
                continue
            lost = count == 0
            found.append(
                Finding(
                    Kind.NOT_UPDATED,
                    Severity.WARNING if lost else Severity.ERROR,
                    entry.id,
                    ranks=(self.session.rank,),
                    declared="trainable",
                    seen=f"held by {count} optimizer groups",
                    evidence="the optimizers' param_groups",
                    consequence="it is never updated, yet counts in the norm" if lost else "it is updated twice",
                    remedy="put it into one optimizer group, or freeze it with requires_grad_(False)",
                    step=self.step,
                )
            )
        return found

    def _publish(self, found: Sequence[Finding], step: int) -> None:
        mine = sorted(found, key=lambda finding: -finding.severity)[:_MOST_FINDINGS]
        self._report(merged(gather_objects(mine, self.session.group)), step)


def _together(norms: Sequence[float], norm_type: float) -> float:
    """The norm of all elements from the norms of disjoint parts."""
    if math.isinf(norm_type):
        return max(norms)
    largest = max(norms)
    return largest * sum((norm / largest) ** norm_type for norm in norms) ** (1 / norm_type) if largest else 0.0


def _left_out(ranks: Sequence[int], still: Sequence[int], step: int) -> Finding:
    return Finding(
        Kind.STEPPED_ALONE,
        Severity.ERROR,
        ranks=tuple(still),
        declared="all ranks step, or none",
        seen=f"the optimizers of {len(ranks) - len(still)} of {len(ranks)} ranks have stepped",
        evidence="the optimizers' step",
        consequence="the ranks have decided each for itself, as after an overflow in one rank's own expert: replicas "
        "of weights and of optimizer states differ from this step on",
        remedy="decide on all ranks together: hand ep_hooks.attach the optimizers that the gradient scaler steps, or "
        "set `nonfinite: {action: skip}` and take the loop's own test out; then load equal weights and states",
        step=step,
    )


def _changed(ranks: Sequence[int], left: _Clipped, now: float) -> Finding:
    return Finding(
        Kind.CLIP,
        Severity.ERROR,
        ranks=tuple(ranks),
        declared=f"norm {left.norm:.6g} after the clip",
        seen=f"norm {now:.6g} before the optimizer's step, {now / left.norm if left.norm else math.inf:.4g} times that",
        evidence="measured again",
        consequence="somebody has changed the gradients after they were clipped: a second clip, another unscaling, or "
        "a reduction that came too late",
        remedy="take the framework's own clip out (its max_grad_norm), or clip after the last change",
        step=left.step,
    )


_READINGS = {
    "gradients": (
        Kind.NOT_REDUCED,
        "replicas are trained with different gradients and drift apart",
        'reduce it over `{axis}`, or declare that: `{{match: "{id}", domain: {{{axis}: avg}}, rest: replicate}}`',
    ),
    "weights": (
        Kind.REPLICAS_DIFFER,
        "ranks that should hold the same weight do not: the model is not one model any more",
        "load weights again that are equal on these ranks (no reduction mends them), and mend what else was found",
    ),
    "states": (
        Kind.STATE_DIFFERS,
        "replicas will be updated differently, although their gradients are equal",
        "load an optimizer state again that is equal on these ranks",
    ),
}


def _words_of(states: Sequence[Sequence[Tensor]]) -> Tensor:
    """One word for each list of tensors."""
    flat = [tensor for tensors in states for tensor in tensors]
    words = screen(flat).words
    owner = torch.tensor([i for i, tensors in enumerate(states) for _ in tensors], dtype=torch.int64)
    place = torch.tensor([2 * j + 1 for tensors in states for j in range(len(tensors))], dtype=torch.int64)
    return torch.zeros(len(states), dtype=torch.int64).index_add_(0, owner, words * place)
