"""The session: one model's table, plan and schedule, and the sequence that runs before each optimizer step.

topology -> classify -> repair -> agree -> plan                  set-up, again only if the parameter set changes
gradients -> sync -> norm -> policy -> clip                      each step, before ``optimizer.step``
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ep_hooks.adapter import Adapter, Phase
from ep_hooks.agreement import Agreed, Report, agree, check_all_reduce, gather_objects, portable, raise_first
from ep_hooks.assumptions import check_assumptions
from ep_hooks.clip import check_max_norm, clip_coefficient, scale_gradients
from ep_hooks.config import EPHooksConfig
from ep_hooks.declarations import declaration_of
from ep_hooks.domains import Placement
from ep_hooks.errors import AgreementError, AlreadyReducedError, DomainError, TopologyError, UnfinishedGradientError
from ep_hooks.groups import ProcessGroups, distributed_rank, is_distributed, packed_dtype
from ep_hooks.host_copy import HostCopy
from ep_hooks.modes import Mode
from ep_hooks.names import shorten
from ep_hooks.norm import Packed, Verdict, Views, check_norm_type, local_views, packed_norm, rescaled_norm
from ep_hooks.plan import Bucket, Holding, PlanItem, Slice, owned_intervals, plan_buckets, plan_norm
from ep_hooks.policy import Action, decide
from ep_hooks.reductions import Key, broadcast_buckets, reduce_buckets
from ep_hooks.rendezvous import meet
from ep_hooks.table import Entry, ParameterTable, classify
from ep_hooks.topology import Topology
from ep_hooks.version import __version__

__all__ = ["AD_HOC_SLOTS", "Answer", "Session"]

logger = logging.getLogger("ep_hooks")

AD_HOC_SLOTS = ("total",)
"""Layout of the packed result of a call without ``attach``: one slot, whatever the domains."""

_BYTES_PER_ELEMENT = 4
_MOST_TALKS = 8
"""In one step; a rank has at most a few things to tell."""
Arguments = tuple[tuple[str, float], ...]
"""What a call was given, by name."""


@dataclass
class Answer:
    """What one rank tells the others when some rank has asked for a round of talk.

    Attributes:
        error: text and class of an error of this rank.
        missing: entries with replicas elsewhere whose gradient this rank lacks, with their holders.
        partials: pending reductions that gradients show and the plan does not know.
        changed: this rank's parameters are not the ones that were agreed on.
        arguments: (name, value) of what the call was given and all ranks must be given alike; empty if not asked.
        loaded: this rank has loaded an optimizer's state, so that the audit is to begin anew.
    """

    error: tuple[str, type[Exception]] | None = None
    missing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    partials: dict[str, dict[str, Placement]] = field(default_factory=dict)
    changed: bool = False
    arguments: Arguments = ()
    loaded: bool = False


class Auditor(Protocol):
    """What a session tells of its steps to somebody who audits them; called on all ranks alike."""

    audited: bool
    """Whether the current step is audited; the same on all ranks."""
    loaded: bool
    """Whether this rank, and perhaps no other, has loaded an optimizer's state since the audit began."""

    def begin_anew(self) -> None:
        """Some rank has loaded an optimizer's state: this step is audited as the first one is."""

    def begin(self) -> None:
        """A step is about to be measured."""

    def screen(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The gradients after the pending reductions; returns the sum of squares of each, float64."""

    def measured(self, gradients: Sequence[Tensor | None], verdict: Verdict, norm_type: float | None) -> None:
        """The step was measured; ``norm_type`` is ``None`` if not all gradients were."""

    def clipped(self, expected: float, norm_type: float) -> None:
        """The gradients were scaled to this norm."""

    def before_step(self) -> None:
        """An optimizer is about to step."""


@dataclass
class _Told:
    """What this rank has to tell of one step, and the number of requests of all ranks in it."""

    requests: HostCopy
    problem: Exception | None
    missing: frozenset[int]
    partials: dict[str, dict[str, Placement]]
    changed: bool
    arguments: Arguments
    loaded: bool
    suspects: list[tuple[Key, str, Tensor]]


class Session:
    """Table, plan and schedule of one model on one rank.

    Attributes:
        mode: what may be changed.
        config: the configuration.
        topology: axes and rank set.
        table: the parameter table.
        repaired: what the adapter set, in words.
        last: verdict of the last measured step.
        coefficient: clip coefficient of the last clipped step, 0-dim tensor.
        skip_step: the policy says to skip the optimizer step.
        auditor: audits steps; ``None``: nobody does.
        on_first_step: called once, on all ranks, after the first step was measured.
        found_inf: 0-dim tensor that a gradient scaler of this rank has set; carried in the packed result.
    """

    def __init__(
        self,
        adapter: Adapter,
        config: EPHooksConfig,
        mode: Mode,
        *,
        ad_hoc: bool = False,
        problem: Exception | None = None,
    ) -> None:
        """Classify, agree and plan. A collective over the rank set.

        Args:
            problem: why this rank cannot go on. It is raised here, and told to the others, on all ranks together.
            ad_hoc: for calls without ``attach``. The packed result then has one slot, so that a rank to which the
                parameters are new can join the collective of the others and tell them.
        """
        self.adapter, self.config, self.mode, self.ad_hoc = adapter, config, mode, ad_hoc
        self.last: Verdict | None = None
        self.repaired: tuple[str, ...] = ()
        self._seen_partials: dict[str, dict[str, Placement]] = {}
        self._warned: set[str] = set()
        self.coefficient: Tensor | None = None
        self.skip_step = False
        self.found_inf: Tensor | None = None
        self._compare = True
        self.on_first_step: Callable[[], None] | None = None
        self.auditor: Auditor | None = None
        self._audited: list[Tensor | None] | None = None
        self._synced: dict[int, Tensor] | None = None
        self.process_groups = ProcessGroups()
        try:
            self._set_up(problem, first=True)
        except BaseException:
            self.close()
            raise

    # ---- set-up -------------------------------------------------------------------------------------------------

    def _set_up(self, error: Exception | None = None, *, first: bool) -> None:
        self.rank = distributed_rank()
        topology, table = Topology((self.rank,)), ParameterTable(())
        repaired: tuple[str, ...] = ()
        try:
            topology = self.adapter.topology()
            if self.rank not in topology.ranks:
                raise TopologyError(f"rank {self.rank} is not in the rank set {list(topology.ranks)}")
            if error is None:
                table = self._classify(topology)
                if first and not self.ad_hoc:
                    repaired = tuple(self.adapter.repair(table, self.mode))
        except Exception as raised:  # re-raised on every rank below, whatever it is
            error = error or raised
            if is_distributed() and (len(topology.ranks) == 1 or self.rank not in topology.ranks):
                topology = Topology(tuple(range(dist.get_world_size())))
        meet(topology.ranks, error)
        self.topology, self.table = topology, table
        self.repaired = repaired if first else self.repaired
        # A call without attach may come from a rank whose list knows none of the meshes: it reuses no group.
        for group in self.adapter.groups() if is_distributed() and not self.ad_hoc else ():
            self.process_groups.add(group)
        many = len(topology.ranks) > 1
        self.group = self.process_groups.get(topology.ranks) if many else None
        rules = self.config.rules()
        report = Report.of(table, topology, self._facts(), [rule.match for rule in rules])
        self.agreed: Agreed = agree(table, report, topology.ranks, self.group)
        self._plan()
        if self.group is not None and first and not self.ad_hoc:  # there, other ranks may have a session already
            check_all_reduce(self.group, packed_dtype(self.group, self.device), self.device)
        if first and self.mode in (Mode.REPAIR, Mode.ENFORCE) and self.config.sync.broadcast and self._buckets:
            weights = dict(zip(map(_key, self._pending), self.adapter.weights(self._pending), strict=True))
            with torch.no_grad():
                broadcast_buckets(self._buckets, weights, self.process_groups, self.device)

    def _classify(self, topology: Topology) -> ParameterTable:
        sources = []
        for source in self.adapter.sources(topology):
            seen = self._seen_partials.get(source.id, {})
            # Another rank's twin of this name may be laid out on another mesh.
            sources.append(replace(source, placed=seen) if seen and seen.keys() == source.placed.keys() else source)
        table = classify(
            sources,
            topology,
            self.rank,
            self.config.rules(),
            declared=declaration_of,
            default=self.adapter.default,
        )
        for entry in table:  # here, where an error is told to the other ranks
            if entry.source.holdings is not None:
                self.interval(entry), owned_intervals(entry.plan_item(0), self.rank)
        return table

    def _facts(self) -> list[tuple[str, str]]:
        return [
            ("the ep_hooks version", __version__),
            ("the torch version", torch.__version__),
            ("the mode", self.mode.value),
            ("the configuration", self.config.digest()),
            ("the rank set", str(self.topology.ranks)),
            *self.adapter.facts,
        ]

    def _plan(self) -> None:
        """Everything that is looked up, not computed, in a step."""
        entries = self.table.entries
        self.entries: tuple[Entry, ...] = entries
        self.slots = AD_HOC_SLOTS if self.ad_hoc else self.agreed.domains
        slot = {name: 0 if self.ad_hoc else i for i, name in enumerate(self.agreed.domains)}
        self._items = [entry.plan_item(slot[entry.domain.name]) for entry in entries]
        self._slices = self._plan_slices(self._items)
        self._absent: frozenset[int] = frozenset()
        elements = max(1, int(self.config.sync.bucket_mb * 2**20 / _BYTES_PER_ELEMENT))
        self._buckets = plan_buckets(self.agreed.reductions, self.rank, bucket_elements=elements)
        self._pending = [entry for entry in entries if entry.domain.reductions]
        self._pending_index = [i for i, entry in enumerate(entries) if entry.domain.reductions]
        self._reduced_before: dict[Key, tuple[weakref.ref[Tensor], int]] = {}
        devices = [entry.parameter.device for entry in entries if entry.parameter.device.type != "meta"]
        preferred = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        self.device = preferred
        if self.group is not None:
            self.device = self.process_groups.device(self.topology.ranks, preferred)
        self.dtype = torch.float64 if self.agreed.wide else torch.float32
        self._assumed = self.agreed.assumed
        self._settled = False
        self._told: _Told | None = None
        self._suspects: list[tuple[Key, str, Tensor]] = []
        self._parameters = self.adapter.parameter_count()

    def _plan_slices(self, items: Sequence[PlanItem]) -> tuple[Slice, ...]:
        """What this rank reads, counted from the start of the tensors that the adapter gives."""
        starts = [self.interval(entry)[0] for entry in self.entries]
        return tuple(
            replace(piece, lo=piece.lo - starts[piece.index], hi=piece.hi - starts[piece.index])
            for piece in plan_norm(items, self.rank)
        )

    def interval(self, entry: Entry) -> tuple[int, int]:
        """The elements of the entry's piece that this rank's ready gradient holds, in logical order."""
        if entry.source.holdings is None:
            return 0, entry.source.numel
        mine = [(held.lo, held.hi) for held in entry.source.holdings if held.rank == self.rank and held.lo < held.hi]
        if len(mine) > 1:
            raise DomainError(f"{entry.id}: rank {self.rank} holds several intervals of one piece: {mine}")
        return mine[0] if mine else (0, 0)

    @property
    def slices(self) -> Sequence[Slice]:
        """What this rank counts, from the start of each ready gradient."""
        return self._slices

    def slot_of(self, index: int) -> int:
        """Index of the entry's domain in :attr:`slots`."""
        return self._items[index].slot

    @property
    def complete(self) -> bool:
        """Whether no replica lacked a gradient in the last step that this rank has one of."""
        return not self._absent

    @property
    def buckets(self) -> Sequence[Bucket]:
        """This rank's schedule of pending reductions."""
        return self._buckets

    @property
    def host_decides(self) -> bool:
        """Whether reading a result on the host is free: no accelerator is involved."""
        return self.device.type == "cpu"

    def refresh(self) -> None:
        """Classify and agree again, after the parameter set has changed. A collective over the rank set."""
        reduced = self._reduced_before
        self._set_up(first=False)
        if self._synced is not None:
            self._synced, self._reduced_before = {}, reduced

    def close(self) -> None:
        """Take back what the adapter set."""
        self.adapter.undo_repair()

    # ---- each step ----------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Run the pending reductions and store them, apart from the norm.

        For frameworks whose optimizer consumes copies that are made of the reduced gradients: call it on all ranks at
        ``Phase.REDUCED``, after the framework's last change of these gradients and before it copies them, and
        :meth:`measure` or :meth:`clip` at ``Phase.READY``. A session that has been told once expects it in every step;
        the adapter's reduced gradients must then be the same tensor objects from here to the norm. In ``observe``
        nothing is stored, and the norm reads the sums in place of the copies.

        Collectives: one per bucket. What was found to be reduced already is told by the norm of the same step.
        """
        with torch.no_grad():
            reduced = self._sync()
        self._synced = reduced if self.mode is Mode.OBSERVE else {}
        if self.mode is not Mode.OBSERVE:
            self._store(reduced)

    def measure(
        self,
        norm_type: float = 2.0,
        only: frozenset[int] | None = None,
        *,
        max_norm: float | None = None,
        problem: Exception | None = None,
    ) -> Verdict:
        """Run the pending reductions and compute the norm.

        Args:
            norm_type: p >= 1 or inf.
            only: indices of the entries that count; all if ``None``.
            max_norm: what the caller will clip to, to be compared with that of the other ranks.
            problem: why this rank cannot go on; raised on all ranks together.

        Collectives: one per bucket of pending reductions and one for the norm; more in the rare step in which some
        rank has something to tell. On CPU that is the same step. With an accelerator, where looking at the result
        would wait for the device, it is the same step right after a plan was made, and the next one later on: until
        then the plan's own parameters count, and a rank with an error counts nothing.

        Raises:
            UnfinishedGradientError, AlreadyReducedError, UndeclaredParameterError: on all ranks together.
            ValueError: a wrong ``norm_type`` or ``max_norm``, on all ranks together.
            AgreementError: ranks were given different arguments.
        """
        arguments, wrong = _checked(norm_type, max_norm)
        problem = problem or wrong
        norm_type = 2.0 if problem is not None else float(norm_type)
        if problem is not None and self.group is None:
            raise problem
        if self._told is not None:
            told, self._told = self._told, None
            if told.requests.read() > 0:
                self._settle(told)
        if self.auditor is not None:
            self.auditor.begin()
        verdict = None
        for _ in range(_MOST_TALKS):
            audits = self.auditor is not None and self.auditor.audited
            verdict = self._measure_once(norm_type, only, arguments, problem, audits)
            if verdict is not None:
                break
        if verdict is None:  # as all_reduce reduces no more, say; without this, for ever
            raise AgreementError("ranks ask each other to stop, and none of them says why: nothing can be measured")
        self.last = verdict
        if self.on_first_step is not None:
            call, self.on_first_step = self.on_first_step, None
            call()
        if self.auditor is not None and self._audited is not None:
            gradients, self._audited = self._audited, None
            self.auditor.measured(gradients, verdict, norm_type if only is None else None)
        return verdict

    def _measure_once(
        self,
        norm_type: float,
        only: frozenset[int] | None,
        arguments: Arguments,
        problem: Exception | None,
        audits: bool,
    ) -> Verdict | None:
        if problem is not None:
            pass
        elif why := self.adapter.unfinished():
            problem = UnfinishedGradientError(f"the gradients have no norm yet: {why}")
        elif stale := self._not_synced():
            problem = UnfinishedGradientError(
                f"sync() has not seen these gradients as they are now: {shorten(stale)}. It must run in every step, "
                "after their last change"
            )
        changed = self.adapter.parameter_count() != self._parameters
        partials = self._new_partials()
        said = repr(arguments) if self._compare else ""
        # A rank that knows that the step cannot go on still takes part in what the others run, then tells them.
        decides = self.host_decides or not self._settled
        idle = problem is not None or bool(partials) or (changed and decides)
        if self.ad_hoc and self.agreed.reductions and self.host_decides:
            # A rank to which the parameters are new cannot join the buckets: ask before they run.
            control = packed_norm({}, len(self.slots), norm_type, self.group, self.device)
            if self._must_talk(control.requests):
                self._talk(Answer(arguments=arguments))
                return None
        with torch.no_grad():
            reduced = self._sync() if self._synced is None else self._synced
            gradients = self.adapter.gradients(self.entries, Phase.READY)
            for index, value in reduced.items():
                lo, hi = self.interval(self.entries[index])
                gradients[index] = value if hi - lo == value.numel() else value.reshape(-1)[lo:hi]
        missing = self._missing(gradients)
        loaded = self.auditor is not None and self.auditor.loaded
        selected = self._selected(gradients, only)
        slices, counted = self._slices, None
        if audits and self.auditor is not None and not idle:
            self._audited = gradients
            squares = self.auditor.screen(gradients)
            if norm_type == 2.0:
                slices, counted = self._counted(selected, squares)
        views: Views = {}
        try:
            views = views if idle else local_views(slices, selected)
        except Exception as raised:  # told below: the others are on their way into the all-reduce
            problem, idle = raised, True
        packed = packed_norm(
            views,
            len(self.slots),
            norm_type,
            self.group,
            self.device,
            found_inf=self.found_inf,
            requests=self._requests(idle or changed or loaded or missing != self._absent),
            said=said,
            host_reads=self.host_decides,
            counted=counted,
        )
        problem = problem or packed.error
        told = _Told(HostCopy(packed.requests), problem, missing, partials, changed, arguments, loaded, self._suspects)
        if not decides:
            self._told = told
        elif self._must_talk(packed.requests):
            self._settle(told)
            return None
        if self._synced is not None:
            self._suspects = []  # told
        elif self.mode is not Mode.OBSERVE:
            self._store(reduced)
        verdict = packed.verdict(self.slots, norm_type, self.dtype, self.device)
        if self.host_decides and bool((packed.flags > 0).any()):
            verdict = self._second_look(views, norm_type, packed)
        if self._assumed and float(verdict.norm) != 0:
            self._assumed = False
            check_assumptions(self.entries, gradients, self.rank, self.topology.ranks, self.group, self.process_groups)
        return verdict

    def _counted(self, gradients: Sequence[Tensor | None], squares: Tensor) -> tuple[tuple[Slice, ...], Tensor]:
        """Slices that the audit has not summed on its way, and by domain the squares of those that it has."""
        counted = torch.zeros(len(self.slots), dtype=torch.float64)
        rest = []
        for piece in self._slices:
            gradient = gradients[piece.index]
            if gradient is not None and piece.lo == 0 and piece.hi == gradient.numel():
                counted[piece.slot] += squares[piece.index]
            else:
                rest.append(piece)
        return tuple(rest), counted

    def own_norm(self, norm_type: float) -> float:
        """The norm of what this rank counts of the gradients as they are now. No collective; waits for the device."""
        views = local_views(self._slices, self.adapter.gradients(self.entries, Phase.READY))
        packed = packed_norm(views, len(self.slots), norm_type, None, self.device, host_reads=True)
        return float(packed.verdict(self.slots, norm_type, torch.float64, torch.device("cpu")).norm)

    def clip(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        only: frozenset[int] | None = None,
        problem: Exception | None = None,
    ) -> Verdict:
        """Measure, apply the policies, and scale the gradients in place where the mode allows it.

        Args:
            max_norm: gradients are scaled to at most this norm; ``inf``: measure only.
            only: indices of the entries that are measured and scaled; all if ``None``.
            problem: as for :meth:`measure`.

        Returns:
            The verdict before clipping. ``skip_step`` is set if the policy says to skip the optimizer step.
        """
        if max_norm is None:  # from callers without types; nothing would be clipped
            problem = problem or TypeError("max_norm must be a number >= 0 (inf: measure only), got None")
        verdict = self.measure(norm_type, only, max_norm=max_norm, problem=problem)
        audited = self.auditor is not None and self.auditor.audited and only is None
        # With an accelerator, a wrong argument is raised a step later; until then nothing is scaled.
        max_norm = dict(_checked(norm_type, max_norm)[0]).get("max_norm", math.inf)
        self.coefficient = clip_coefficient(verdict.norm, max_norm)
        self.skip_step = False
        if self.mode is not Mode.ENFORCE:
            return verdict
        action = decide(verdict, self.config, error_if_nonfinite=error_if_nonfinite)
        unchanged = math.isinf(max_norm) or (self.host_decides and float(self.coefficient) == 1)
        if action is Action.ZERO or (action is Action.CLIP and not unchanged):
            gradients = self._selected(self.adapter.gradients(self.entries, Phase.READY), only)
            with torch.no_grad():
                scale_gradients(gradients, None if action is Action.ZERO else self.coefficient)
            if audited and self.auditor is not None:
                left = 0.0 if action is Action.ZERO else float(verdict.norm) * float(self.coefficient)
                self.auditor.clipped(left, norm_type)
        self.skip_step = action is Action.SKIP
        if self._pending:
            self.mark_reduced()
        return verdict

    def _second_look(self, views: Views, norm_type: float, packed: Packed) -> Verdict:
        """Tell NaN and inf from finite gradients whose powers overflow; every rank has seen the flag."""
        verdict = rescaled_norm(views, self.slots, norm_type, self._reduce, self.dtype, self.device)
        if verdict.overflow:
            logger.warning(
                "ep_hooks: the gradients are finite, but the sum of their powers overflowed; recomputed with scaling: "
                "norm %g",
                float(verdict.norm),
            )
        return replace(verdict, nonfinite=verdict.nonfinite | (packed.found_inf > 0))

    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self.group is not None:
            dist.all_reduce(tensor, op, self.group)

    def _selected(self, gradients: list[Tensor | None], only: frozenset[int] | None) -> list[Tensor | None]:
        if only is None:
            return gradients
        return [gradient if index in only else None for index, gradient in enumerate(gradients)]

    def _sync(self) -> dict[int, Tensor]:
        """Run the pending reductions; index of the entry -> its reduced gradient, not yet written anywhere."""
        self._suspects = []
        if not self._buckets:
            return {}
        before = self.adapter.gradients(self._pending, Phase.REDUCED)
        keys = [_key(entry) for entry in self._pending]
        outcome = reduce_buckets(
            self._buckets,
            dict(zip(keys, before, strict=True)),
            {key for key, gradient in zip(keys, before, strict=True) if not self._is_reduced(key, gradient)},
            self.process_groups,
            self.device,
            check=self.config.sync.already_reduced != "off",
        )
        self._suspects = outcome.suspects
        return {
            index: outcome.values[key].to((entry.source if gradient is None else gradient).dtype)
            for entry, index, key, gradient in zip(self._pending, self._pending_index, keys, before, strict=True)
            if key in outcome.values
        }

    def _store(self, reduced: Mapping[int, Tensor]) -> None:
        if self._pending:
            with torch.no_grad():
                for index, value in reduced.items():
                    self.adapter.store(self.entries[index], value)
            self.mark_reduced()

    def _requests(self, asking: bool) -> Tensor | int:
        """How many things this rank wants to tell; a tensor where only the device knows."""
        if self.config.sync.already_reduced != "raise" or not self._suspects:
            return int(asking)
        return torch.stack([flag for _, _, flag in self._suspects]).any() + int(asking)

    def _must_talk(self, requests: Tensor) -> bool:
        """Whether some rank has asked for a round of talk. The same answer on every rank.

        Reading the number waits for the device, which is free on CPU.
        """
        self._settled = True
        if self.config.sync.already_reduced == "warn" and (found := self._suspicion(self._suspects)):
            logger.warning("ep_hooks: %s", found)
        return bool(requests > 0)

    def _is_reduced(self, key: Key, gradient: Tensor | None) -> bool:
        if gradient is None:
            return True
        known = self._reduced_before.get(key)
        return known is not None and known[0]() is gradient and known[1] == gradient._version

    def _not_synced(self) -> list[str]:
        """Names of pending gradients that :meth:`sync` should have seen as they are now."""
        if not self._pending or self.mode is Mode.OBSERVE:
            return []
        if self._synced is None:  # an interval is a copy: summing now is too late for it
            return [e.id for e in self._pending if self.interval(e) not in ((0, 0), (0, e.source.numel))]
        gradients = self.adapter.gradients(self._pending, Phase.REDUCED)
        return [e.id for e, g in zip(self._pending, gradients, strict=True) if not self._is_reduced(_key(e), g)]

    @contextmanager
    def replaced_gradients(self) -> Iterator[None]:
        """While somebody writes other gradients and puts these back: what was reduced counts as reduced afterwards."""
        before = self.adapter.gradients(self._pending, Phase.REDUCED)
        reduced = {_key(e) for e, g in zip(self._pending, before, strict=True) if self._is_reduced(_key(e), g)}
        known = self._reduced_before
        try:
            yield
        finally:
            if self._pending:
                self.mark_reduced()
                now = self._reduced_before
                self._reduced_before = {
                    k: now[k] if k in reduced else known[k] for k in now if k in reduced or k in known
                }

    def mark_reduced(self) -> None:
        """Remember the pending gradients as they are now: they need no reduction until they change."""
        gradients = self.adapter.gradients(self._pending, Phase.REDUCED)
        self._reduced_before = {
            _key(entry): (weakref.ref(gradient), gradient._version)
            for entry, gradient in zip(self._pending, gradients, strict=True)
            if gradient is not None
        }

    def _missing(self, gradients: Sequence[Tensor | None]) -> frozenset[int]:
        """Entries with replicas elsewhere whose gradient this rank lacks."""
        if not any(gradient is None for gradient in gradients):
            return frozenset()
        return frozenset(
            index
            for index, (entry, gradient) in enumerate(zip(self.entries, gradients, strict=True))
            if gradient is None and len(entry.domain.replicas) > 1 and entry.source.holdings is None
        )

    def _new_partials(self) -> dict[str, dict[str, Placement]]:
        """Pending reductions that gradients show and the plan does not know."""
        seen = self.adapter.partials(self.entries)
        known = self._seen_partials
        return {name: dict(axes) for name, axes in seen.items() if known.get(name) != dict(axes)}

    def _settle(self, told: _Told) -> None:
        """Some rank has something to tell: exchange it, raise together or go on with what all know now."""
        error = told.problem
        if error is None and (found := self._suspicion(told.suspects)):
            error = AlreadyReducedError(found)
        missing = {self.entries[i].id: self.entries[i].domain.replicas for i in told.missing}
        answer = Answer(portable(error), missing, told.partials, told.changed, told.arguments, told.loaded)
        replanned = self._talk(answer, error)
        self._absent = frozenset() if replanned else told.missing

    def _talk(self, mine: Answer, error: Exception | None = None) -> bool:
        """Every rank has seen that some rank has something to say: exchange it, then raise or plan again together.

        Returns:
            Whether everything was classified again.
        """
        answers: list[Answer] = gather_objects(mine, self.group)
        raise_first(error, [answer.error for answer in answers], self.topology.ranks)
        self._compare_arguments([answer.arguments for answer in answers])
        if self.auditor is not None and any(answer.loaded for answer in answers):
            self.auditor.begin_anew()
        if any(answer.changed for answer in answers) or any(answer.partials for answer in answers):
            for answer in answers:
                self._seen_partials.update(answer.partials)
            self.refresh()
            return True
        without = {
            (name, replicas, rank)
            for rank, answer in zip(self.topology.ranks, answers, strict=True)
            for name, replicas in answer.missing.items()
        }
        items, partly = list(self._items), []
        for index, entry in enumerate(self.entries):
            replicas = entry.domain.replicas
            have = [rank for rank in replicas if (entry.id, replicas, rank) not in without]
            if have and len(have) < len(replicas) and entry.source.holdings is None:
                # Where replicas differ, truth is the value of the ranks that have one; the difference is a finding.
                items[index] = replace(
                    items[index], holdings=tuple(Holding(rank, 0, items[index].numel) for rank in have)
                )
                if entry.id not in self._warned:
                    partly.append(f"{entry.id} (only on ranks {have})")
                    self._warned.add(entry.id)
        if partly:
            logger.warning("ep_hooks: some replicas lack a gradient that others have: %s", shorten(partly))
        self._slices = self._plan_slices(items)
        return False

    def _compare_arguments(self, given: Sequence[Arguments]) -> None:
        said = [(rank, arguments) for rank, arguments in zip(self.topology.ranks, given, strict=True) if arguments]
        for rank, arguments in said:
            first, theirs = said[0]
            if self._compare and arguments != theirs:
                name = next((name for name, value in arguments if (name, value) not in theirs), theirs[-1][0])
                mine, other = (f"{dict(these).get(name, 'none')}" for these in (arguments, theirs))
                message = f"ranks {first} and {rank} were given another {name}: {other} and {mine}"
                if self.mode is not Mode.OBSERVE:
                    raise AgreementError(message)
                self._compare = False
                logger.warning("ep_hooks: %s", message)

    def _suspicion(self, suspects: Sequence[tuple[Key, str, Tensor]]) -> str:
        found = [f"{key[0]} over {axis}" for key, axis, flag in suspects if bool(flag)]
        if not found:
            return ""
        return (
            f"the inputs of a pending SUM are equal on all ranks and not zero: {shorten(found)}. It looks as if the "
            "framework (or an earlier call, followed by a change of the gradient) had reduced them already, and "
            "summing again would count them twice. If they are reduced, declare them replicated; if they really are "
            "equal before the reduction, set `sync.already_reduced: off`."
        )


def _checked(norm_type: float, max_norm: float | None) -> tuple[Arguments, Exception | None]:
    """What the ranks compare of a call, and what is wrong with it."""
    try:
        arguments = [("norm_type", check_norm_type(norm_type))]
        if max_norm is not None:
            arguments.append(("max_norm", check_max_norm(max_norm) + 0.0))  # -0.0 and 0.0 are the same
    except (TypeError, ValueError) as error:
        return (), error
    return tuple(arguments), None


def _key(entry: Entry) -> Key:
    return entry.id, entry.domain.replicas[0]
