"""The functions that users call."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_  # bound early: an adapter may replace it
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ep_hooks import registry, report
from ep_hooks.ad_hoc import session_for
from ep_hooks.adapter import Adapter
from ep_hooks.audit import Audit
from ep_hooks.config import EPHooksConfig, load_config, ranks_in
from ep_hooks.domains import Domain, Evidence, EvidenceKind
from ep_hooks.errors import ConfigError, MeasuredFaultError, UnsupportedError
from ep_hooks.findings import Finding, Severity, worst_first
from ep_hooks.groups import distributed_rank, is_distributed
from ep_hooks.hosts import mode_on_host
from ep_hooks.modes import PROBE_ONLY, Mode, resolve_mode
from ep_hooks.norm import Verdict
from ep_hooks.optimizer_hooks import OptimizerHooks, unwrap_optimizer
from ep_hooks.probing import ProbeResult, run_probe
from ep_hooks.recording import Recorder
from ep_hooks.scaler import unwatch_scalers, watch_scalers
from ep_hooks.session import Session

__all__ = ["Handle", "attach", "clip_grad_norm_", "explain", "total_norm"]

logger = logging.getLogger("ep_hooks")

_GLOBAL: Any = object()
"""Default of ``group``: the rank set of the model or its meshes, as opposed to ``None``, this rank alone."""

_ATTACHED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter -> handle of the session it is attached to."""

_HANDLES: weakref.WeakSet[Handle] = weakref.WeakSet()

Parameters = nn.Module | Tensor | Iterable[Tensor]
Meshes = DeviceMesh | Sequence[DeviceMesh] | None


class Handle:
    """What ``attach`` returns: a live session, and the way to take everything back.

    Also a context manager that removes on exit.

    Attributes:
        session: the session; ``None`` if the mode is ``off``.
        config: the configuration in force.
    """

    def __init__(self, session: Session | None, config: EPHooksConfig, hooks: OptimizerHooks | None) -> None:
        self.session, self.config = session, config
        self.hooks = hooks
        self.audit: Audit | None = None
        self.findings: list[Finding] = []
        self.recorder: Recorder | None = None
        self._probed: ProbeResult | None = None
        if session is not None:
            _HANDLES.add(self)
            for entry in session.entries:
                _ATTACHED[entry.parameter] = self

    def clip(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Verdict:
        """Run pending reductions, measure, apply the policies and clip. The verdict is before clipping.

        Collectives: one per bucket of pending reductions, one for the norm, over the session's rank set.
        """
        verdict = self._live().clip(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        if self.hooks is not None:
            self.hooks.clipped()
        return verdict

    def measure(
        self, norm_type: float = 2.0, parameters: Sequence[Tensor] | None = None, *, scale: float = 1.0
    ) -> Verdict:
        """Run pending reductions and measure, for a host that clips by itself afterwards; then :meth:`host_clipped`.

        Args:
            parameters: those that count; all if ``None``.
            scale: factor by which a gradient scaler has multiplied the gradients; the norms are divided by it.

        Collectives: as :meth:`clip`.
        """
        session = self._live()
        verdict = session.measure(norm_type, None if parameters is None else _subset(session, parameters))
        if scale != 1.0:
            domains = {name: norm / scale for name, norm in verdict.domains.items()}
            verdict = session.last = replace(verdict, norm=verdict.norm / scale, domains=domains)
        return verdict

    def probe(self, reduce: Callable[[], object] | None = None) -> ProbeResult:
        """Measure what weight every rank's gradient has in every reduced gradient; see :func:`ep_hooks.probe`."""
        session = self._live()
        self._probed = result = run_probe(session, reduce)
        self.findings += result.findings
        report.announce_probe(session, result)
        if self.recorder is not None:
            self.recorder.probed(result)
            self.recorder.found(result.findings)
        _raise_faults(result.findings, self.config.probe.level)
        return result

    def _cleared(self) -> tuple[bool, frozenset[str]]:
        """Whether the probe has run, and what it has found right on this rank."""
        rows = self._probed.rows if self._probed is not None else ()
        return self._probed is not None, frozenset(row.id for row in rows if row.verdict == "right")

    def _report_audit(self, findings: Sequence[Finding], step: int) -> None:
        known = {(finding.kind, finding.id, finding.axis) for finding in self.findings}
        new = [finding for finding in findings if (finding.kind, finding.id, finding.axis) not in known]
        self.findings += new
        report.announce_findings(self._live(), new, step)
        if self.recorder is not None:
            self.recorder.found(new)
            if (verdict := self._live().last) is not None:
                self.recorder.norm(step, verdict)
        _raise_faults(findings, self.config.audit.level)

    def _probe_once(self) -> None:
        try:
            self.probe()
        except UnsupportedError as error:  # on all ranks
            if distributed_rank() == self._live().topology.ranks[0]:
                report.say(f"not probed: {error}")

    def _probe_and_exit(self) -> None:
        """End the run on all ranks; status 1 if a fault was found, or nothing could be measured."""
        try:
            result = run_probe(self._live())
        except UnsupportedError as error:
            raise SystemExit(f"ep_hooks: not probed: {error}") from None
        report.announce_probe(self._live(), result, rows=True)
        if self.recorder is not None:
            self.recorder.probed(result)
            self.recorder.found(result.findings)
        raise SystemExit(int(any(finding.severity > Severity.INFO for finding in result.findings)))

    def host_clipped(self) -> None:
        """The host has scaled the gradients that :meth:`measure` saw: sums that were made are not made again."""
        session = self._live()
        if session.mode is not Mode.OBSERVE:
            session.mark_reduced()
        # In enforce the policies are still to be applied, before the optimizer steps.
        if self.hooks is not None and session.mode is not Mode.ENFORCE:
            self.hooks.clipped()

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Hook further optimizers over the model. Call it on all ranks."""
        session = self._live()
        known = self.hooks.optimizers if self.hooks is not None else ()
        new = [optimizer for optimizer in optimizers if all(optimizer is not other for other in known)]
        if not new:
            return
        if self.hooks is not None:
            unwatch_scalers(self.hooks)
            self.hooks.remove()
        session.adapter.optimizers = (*known, *new)
        self.refresh()
        self.hooks = _hook(session, session.adapter.optimizers)

    def refresh(self) -> None:
        """Classify again after parameters were added, frozen or replaced. Call it on all ranks."""
        self._live().refresh()
        for entry in self._live().entries:
            _ATTACHED[entry.parameter] = self

    def remove(self) -> None:
        """Take all hooks off and restore every attribute that was set. Safe to call twice."""
        if self.session is None:
            return
        for parameter in [p for p, handle in _ATTACHED.items() if handle is self]:
            del _ATTACHED[parameter]
        if self.hooks is not None:
            self.hooks.remove()
            unwatch_scalers(self.hooks)
        _HANDLES.discard(self)
        self.session.close()
        self.session = None

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def _live(self) -> Session:
        if self.session is None:
            raise ConfigError("this ep_hooks handle is not active (removed, or the mode is off)")
        return self.session


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    mesh: Meshes = None,
    config: str | Path | Mapping[str, Any] | EPHooksConfig | None = None,
    mode: str | None = None,
) -> Handle:
    """Classify the model's parameters, agree over the ranks, and hook the optimizers.

    Call it on every rank of the run. For a model that will be wrapped in DistributedDataParallel call it before the
    wrap, so that declared experts are kept out of the averaging; for FSDP2 call it after ``fully_shard``.

    Args:
        model: the module that holds the parameters.
        optimizer: one or several optimizers over it. With ``clip.max_norm`` in the config they clip before each step;
            pending reductions run before each step in any case.
        mesh: device meshes whose axes domains may name, beside the meshes of the model's own DTensors.
        config: file, mapping or object; see :class:`ep_hooks.EPHooksConfig`.
        mode: ``observe``, ``repair`` or ``enforce`` where neither config nor environment says.

    Returns:
        A handle; ``handle.remove()`` restores everything.

    Raises:
        ConfigError, TopologyError, DomainError: wrong declarations; on all ranks together.
        UndeclaredParameterError: parameters without evidence, with the lines that declare them.
        AgreementError: ranks that should be equal differ; names the first difference.
        TooLateError: DDP already averages a parameter that is declared otherwise.
    """
    problem: Exception | None = None
    loaded, chosen = EPHooksConfig(), Mode.ENFORCE
    optimizers: tuple[Optimizer, ...] = ()
    module: nn.Module | tuple[()] = ()
    try:
        loaded = load_config(config)
        chosen = mode_on_host(loaded.resolved_mode(mode), registry.adapter("fsdp2").tested_versions, loaded)
        if chosen is Mode.OFF:
            report.announce_off()
            return Handle(None, loaded, None)
        if not isinstance(model, nn.Module):
            raise TypeError(f"attach() takes a module, got {type(model).__name__}")
        if _handle_of(list(model.parameters())) is not None:
            raise ConfigError("this model is attached already; call remove() on its handle before attaching it again")
        module, optimizers = model, _optimizers(optimizer)
    except Exception as error:  # raised below on all ranks together: the others are on their way into the set-up
        problem, loaded = error, EPHooksConfig(ranks=ranks_in(config))
    default = Evidence(EvidenceKind.ASSUMED, "plain parameter, no wrapper", Domain.replicated())
    adapter = _pytorch_adapter(
        module,
        loaded,
        meshes=_meshes(mesh),
        optimizers=optimizers,
        default=default if loaded.undeclared == "assume" else None,
    )
    return attach_adapter(adapter, loaded, chosen, optimizers, problem)


def attach_adapter(
    adapter: Any,
    config: EPHooksConfig,
    mode: Mode,
    optimizers: Sequence[Optimizer],
    problem: Exception | None = None,
) -> Handle:
    """Build a session over ``adapter``, announce it, and hook the optimizers. For adapters of frameworks.

    Args:
        problem: why this rank cannot go on; raised on all ranks together.
    """
    session = Session(adapter, config, mode, problem=problem)
    report.announce(session)
    handle = Handle(session, config, _hook(session, optimizers))
    if config.record is not None:
        handle.recorder = Recorder(config.record, session)
    if os.environ.get(PROBE_ONLY) == "1":
        session.on_first_step = handle._probe_and_exit
    elif config.probe.at_first_step and config.probe.level != "off" and len(session.topology.ranks) > 1:
        session.on_first_step = handle._probe_once
    if config.audit.level != "off" and len(session.topology.ranks) > 1:
        session.auditor = handle.audit = Audit(
            session, config.audit, lambda: session.adapter.optimizers, handle._cleared, handle._report_audit
        )
    return handle


def _hook(session: Session, optimizers: Sequence[Optimizer]) -> OptimizerHooks | None:
    if not optimizers:
        return None
    hooks = OptimizerHooks(session, optimizers)
    if session.mode in (Mode.REPAIR, Mode.ENFORCE):
        watch_scalers(hooks)
    return hooks


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: Meshes = None,
    assume: Literal["replicated"] | None = None,
    group: ProcessGroup | None = _GLOBAL,
) -> Tensor:
    """Clip gradients by their global norm, each logical element counted once. In place of torch's function.

    Args:
        parameters: a module, an iterable (or generator) of parameters, or one parameter. DTensors on different meshes
            and plain tensors may be mixed.
        max_norm: gradients are scaled by ``min(1, max_norm / (norm + 1e-6))``; ``inf``: measure only.
        norm_type: p >= 1 or ``inf``.
        error_if_nonfinite: raise if the norm is NaN or inf, on all ranks.
        foreach: accepted for compatibility; has no effect.
        mesh: device meshes whose axes declared domains name.
        assume: ``"replicated"``: take plain parameters without evidence as equal on all ranks. Measured at the first
            step whose gradients are not zero.
        group: the ranks that take part, where no mesh says so. ``None``: this rank alone, torch's meaning for plain
            tensors.

    Returns:
        The norm before clipping: a 0-dim tensor, equal on all ranks; float32, or float64 if some gradient is.

    Collectives: one all-reduce over the rank set (that of the attached model, else the union of the meshes' ranks,
    else all ranks), and one per bucket of pending reductions. The first call with new parameters adds the agreement.

    Raises:
        UndeclaredParameterError: several ranks, and a plain parameter that nobody declared.
        UnfinishedGradientError: FSDP2 or DDP still hold unreduced gradients.
        NonFiniteGradientError: ``error_if_nonfinite``.
        ValueError: ``max_norm`` negative or NaN, ``norm_type`` below 1 or NaN.
    """
    problem: Exception | None = None
    given: list[Tensor] = []
    try:
        if isinstance(parameters, Tensor | nn.Module):
            given = list(parameters.parameters()) if isinstance(parameters, nn.Module) else [parameters]
        else:
            given = list(parameters)
        if assume not in (None, "replicated"):
            raise ConfigError(f"assume must be 'replicated' or None, got {assume!r}")
    except Exception as error:  # raised below, on all ranks together
        problem = error
    handle = _handle_of(given)
    if handle is None and not given and len(_HANDLES) == 1:
        # A rank whose stage trains nothing must not go another way than the others.
        handle = next(iter(_HANDLES))
    mode = handle.session.mode if handle is not None and handle.session is not None else resolve_mode()
    if mode is Mode.OFF:
        if problem is not None:
            raise problem
        return torch_clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    if handle is not None and handle.session is not None:
        session, only = handle.session, _subset(handle.session, given)
    else:
        module = parameters if isinstance(parameters, nn.Module) else None
        session, only = _ad_hoc_session(module, given, _meshes(mesh), assume, group, mode, norm_type, problem), None
    if mode in (Mode.OBSERVE, Mode.REPAIR):
        verdict = session.clip(max_norm, norm_type, only=only, problem=problem)
        host = torch_clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
        host = host.full_tensor() if isinstance(host, DTensor) else host
        if handle is not None and handle.session is not None:
            handle.host_clipped()
        elif mode is Mode.REPAIR:
            session.mark_reduced()
        report.log_difference(host, verdict, max_norm)
        return host
    verdict = session.clip(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, only=only, problem=problem)
    if handle is not None and handle.hooks is not None:
        handle.hooks.clipped()
    return verdict.norm


def total_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    *,
    mesh: Meshes = None,
    assume: Literal["replicated"] | None = None,
    group: ProcessGroup | None = _GLOBAL,
) -> Tensor:
    """The global norm of the gradients, without clipping; arguments, result and errors as :func:`clip_grad_norm_`.

    Pending reductions are run and written, since the norm is that of the reduced gradients.
    """
    return clip_grad_norm_(parameters, math.inf, norm_type, mesh=mesh, assume=assume, group=group)


def probe(target: nn.Module | Handle, reduce: Callable[[], object] | None = None) -> ProbeResult:
    """Measure what weight every rank's gradient has in every reduced gradient. Call it on all ranks, between steps.

    Made-up gradients, of which each rank has ones at its own positions, go through the framework's own reduction
    (DDP's reducer, FSDP2's reduce-scatter, hooks on gradients) and ours. What comes out must be what the parameters'
    domains predict. Gradients, buffers and generators are put back bit for bit; nothing of the model is run.

    Args:
        target: an attached model or its handle.
        reduce: called after each made-up backward: the reduction that the training loop runs by hand, if it does.

    Returns:
        Weights and verdict of each parameter of this rank, and the findings of all ranks.

    Raises:
        ConfigError: the model is not attached.
        UnsupportedError: the reduction cannot be replayed; says why.
        MeasuredFaultError: a fault, with ``probe.level: raise``; on all ranks.
    """
    handle = target if isinstance(target, Handle) else _handle_of(list(target.parameters()))
    if handle is None:
        raise ConfigError("probe() needs an attached model: call ep_hooks.attach(model) first")
    return handle.probe(reduce)


def explain(target: nn.Module | Handle, name: str) -> str:
    """Why a parameter is counted the way it is: domain, evidence, holders, what this rank counts and reduces.

    Args:
        target: an attached model or its handle.
        name: a logical name, or a glob over logical names.

    Raises:
        ConfigError: the model is not attached, or nothing has that name.
    """
    handle = target if isinstance(target, Handle) else _handle_of(list(target.parameters()))
    if handle is None or handle.session is None:
        raise ConfigError("explain() needs an attached model: call ep_hooks.attach(model) first")
    return report.explain(handle.session, name)


def handle_of(parameters: Iterable[Tensor]) -> Handle | None:
    """The handle to which these parameters are attached, if any."""
    return _handle_of(list(parameters))


def _handle_of(parameters: Sequence[Tensor]) -> Handle | None:
    if not _HANDLES:
        return None
    for parameter in parameters:
        # A LoRA model has many frozen parameters, and a look-up costs microseconds.
        handle: Handle | None = _ATTACHED.get(parameter) if parameter.requires_grad else None
        if handle is not None:
            return handle
    return None


def _subset(session: Session, given: Sequence[Tensor]) -> frozenset[int] | None:
    """Indices of the entries among ``given``; ``None`` if they are all of them."""
    ids = {id(parameter) for parameter in given}
    chosen = frozenset(i for i, entry in enumerate(session.entries) if id(entry.parameter) in ids)
    return None if len(chosen) == len(session.entries) else chosen


def _pytorch_adapter(parameters: nn.Module | Sequence[Tensor], config: EPHooksConfig, **options: Any) -> Adapter:
    """The adapter for gradients in ``parameter.grad``, from the registry: the core imports no adapter."""
    make = registry.adapter("fsdp2").make_adapter
    assert make is not None
    return make(parameters, config, **options)


def _ad_hoc_session(
    module: nn.Module | None,
    given: Sequence[Tensor],
    meshes: tuple[DeviceMesh, ...],
    assume: str | None,
    group: ProcessGroup | None,
    mode: Mode,
    norm_type: float,
    problem: Exception | None,
) -> Session:
    ranks = _ranks(group)
    if ranks is not None and len(ranks) == 1:
        default: Evidence | None = Evidence(EvidenceKind.ATTRIBUTE, "this rank alone", Domain.replicated())
    else:
        default = Evidence(EvidenceKind.ASSUMED, "assume='replicated'", Domain.replicated()) if assume else None
    # Weights are the caller's business here: nothing was attached.
    config = load_config({"ranks": ranks, "sync": {"broadcast": False}})

    def make() -> Adapter:
        return _pytorch_adapter(module if module is not None else given, config, meshes=meshes, default=default)

    return session_for((module is not None, ranks, assume, meshes), given, make, config, mode, norm_type, problem)


def _raise_faults(findings: Sequence[Finding], level: str) -> None:
    faults = [finding for finding in worst_first(findings) if finding.severity is Severity.ERROR]
    if faults and level == "raise":
        raise MeasuredFaultError("\n".join(map(str, faults[:8])))


def _ranks(group: ProcessGroup | None) -> tuple[int, ...] | None:
    """The rank set that ``group`` asks for; ``None``: that of the meshes or, without any, all ranks."""
    if group is None or not is_distributed():
        return (distributed_rank(),)
    return None if group is _GLOBAL else tuple(sorted(get_process_group_ranks(group)))


def _optimizers(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    if optimizer is None:
        return ()
    listed = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    return tuple(unwrap_optimizer(each) for each in listed)


def _meshes(mesh: Meshes) -> tuple[DeviceMesh, ...]:
    if mesh is None:
        return ()
    return (mesh,) if isinstance(mesh, DeviceMesh) else tuple(mesh)
