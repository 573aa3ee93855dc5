"""HF Trainer: ``Trainer(callbacks=[EPHooksCallback(config)])``.

No event of the Trainer fires before it clips, callbacks get no trainer, and keys added in ``on_log`` reach no reporter
(transformers 5.24, trainer.py and trainer_callback.py). So the callback attaches the model and finds the optimizer, and
patches on the class do the rest, for trainers whose model is attached:

* ``_clip_grad_norm``: the clip itself. It also covers the mixed-mesh path, which never calls Accelerate and forgets to
  unscale fp16 gradients;
* ``_get_grad_norm``: the norm that is logged with ``max_grad_norm=0``;
* ``_sync_replicated_trainable_parameters``: must not broadcast and average experts that differ between ranks;
* ``log``: adds our values beside ``grad_norm``.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ep_hooks import api
from ep_hooks.config import EPHooksConfig, load_config
from ep_hooks.groups import distributed_rank
from ep_hooks.modes import Mode
from ep_hooks.norm import Verdict
from ep_hooks.optimizer_hooks import unwrap_optimizer
from ep_hooks.patching import PatchSet
from ep_hooks.report import log_difference, say

from .accelerate import attach_model
from .host_norm import HostNorm, measure_host_norm

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["HOST_MODULES", "TESTED_VERSIONS", "EPHooksCallback", "install", "uninstall"]  # noqa: F822 (__getattr__ makes it)

HOST_MODULES = ("transformers.trainer",)
TESTED_VERSIONS = {"transformers": ("5.22.2", "5.24.0"), "accelerate": ("1.15.0", "1.15.0")}

EXPERT_CONTAINERS = ("transformers.models.*Experts",)
"""Classes of transformers that hold experts, such as ``Qwen3MoeExperts``."""

VERIFY_AT = (1, 2, 10, 100)
"""Steps at which a host that is left alone is measured."""
_RIGHT = 1e-5

_patches = PatchSet()
_launched: EPHooksConfig | None = None
_left: weakref.WeakSet[Any] = weakref.WeakSet()
_logged: weakref.WeakKeyDictionary[Any, dict[str, float | Tensor]] = weakref.WeakKeyDictionary()


def install(config: str | Path | Mapping[str, Any] | EPHooksConfig | None = None) -> None:
    """Patch the Trainer class. Idempotent.

    Args:
        config: with it, every Trainer gets an :class:`EPHooksCallback`; without, only those that were given one are
            served.
    """
    from transformers.trainer import Trainer

    global _launched
    _launched = load_config(config) if config is not None else _launched
    _patches.replace(Trainer, "__init__", _init)
    _patches.replace(Trainer, "_clip_grad_norm", _clip_grad_norm)
    _patches.replace(Trainer, "_get_grad_norm", _get_grad_norm)
    _patches.replace(Trainer, "log", _log)
    if hasattr(Trainer, "_sync_replicated_trainable_parameters"):
        _patches.replace(Trainer, "_sync_replicated_trainable_parameters", _sync_replicated_trainable_parameters)


def uninstall() -> None:
    """Restore the Trainer class. Idempotent; a callback's own ``remove`` detaches its model."""
    global _launched
    _launched = None
    _patches.restore()


@functools.cache
def _callback_class() -> type:
    """The callback class; made on first use, since its base is transformers' and adapters are loaded before hosts."""
    from transformers import TrainerCallback

    class EPHooksCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        """Attaches the Trainer's model.

        Args:
            config: file, mapping or object; see :class:`ep_hooks.EPHooksConfig`.

        Attributes:
            handle: handle of the attached model; ``None`` before the Trainer is built and in mode ``off``.
        """

        def __init__(self, config: str | Path | Mapping[str, Any] | EPHooksConfig | None = None) -> None:
            self.config = load_config(config)
            self.handle: api.Handle | None = None
            install()

        def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            """The model is not wrapped yet: what DDP reads when it wraps is set here."""
            self._attach(model)

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
        ) -> None:
            """Wrapping may have replaced parameters; the optimizer exists now."""
            trainable = {id(p) for p in model.parameters() if p.requires_grad}
            session = self.handle.session if self.handle is not None else None
            if session is not None and {id(entry.parameter) for entry in session.entries} != trainable:
                self.remove()
                self._attach(model)
            if self.handle is not None and optimizer is not None:
                self.handle.add_optimizers([unwrap_optimizer(optimizer)])

        def remove(self) -> None:
            """Detach the model and restore everything that was set on it."""
            if self.handle is not None:
                self.handle.remove()
                self.handle = None

        def _attach(self, model: nn.Module) -> None:
            # A second callback, or a second Trainer over the same model, finds it attached.
            self.handle = api.handle_of(model.parameters())
            if self.handle is None:
                self.handle = attach_model(model, self.config, TESTED_VERSIONS, EXPERT_CONTAINERS)

    return EPHooksCallback


def __getattr__(name: str) -> Any:
    if name == "EPHooksCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ------------------------------------------------------------------------------------------------- patched methods


def _init(original: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    original(trainer, *args, **kwargs)
    if _launched is not None and api.handle_of(trainer.model.parameters()) is None:
        callback = _callback_class()(_launched)
        trainer.add_callback(callback)
        callback.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)


def _clip_grad_norm(original: Any, trainer: Trainer, model: nn.Module) -> Any:
    return _measure(trainer, trainer.args.max_grad_norm, lambda: original(trainer, model))


def _get_grad_norm(original: Any, trainer: Trainer, model: nn.Module, grad_norm: Any = None) -> Any:
    if grad_norm is not None:
        return original(trainer, model, grad_norm)
    return _measure(trainer, math.inf, lambda: original(trainer, model))


def _log(original: Any, trainer: Trainer, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    values = _logged.pop(trainer, None)
    if values and "grad_norm" in logs:
        logs.update({name: float(value) for name, value in values.items()})
    return original(trainer, logs, *args, **kwargs)


class _OnlyReplicated:
    """A model of which only the parameters that are equal on all ranks are seen."""

    def __init__(self, model: nn.Module, handle: api.Handle) -> None:
        self._model = model
        session = handle.session
        ranks = session.topology.ranks if session is not None else ()
        entries = session.entries if session is not None else ()
        self._different = {id(e.parameter) for e in entries if e.domain.reductions or e.domain.replicas != ranks}

    def parameters(self) -> Iterator[Tensor]:
        return (p for p in self._model.parameters() if id(p) not in self._different)


def _sync_replicated_trainable_parameters(original: Any, trainer: Trainer, model: nn.Module) -> Any:
    # transformers 5.18 to 5.24, trainer.py: broadcasts every trainable plain tensor from rank 0 and averages its
    # gradient over the world, experts of this rank included.
    handle = api.handle_of(model.parameters())
    if handle is None or handle.session is None or handle.session.mode is Mode.OBSERVE:
        return original(trainer, model)
    return original(trainer, _OnlyReplicated(model, handle))


# ------------------------------------------------------------------------------------------------------ norm and clip


def _measure(trainer: Trainer, max_norm: float, host: Callable[[], Any]) -> Any:
    """The step's norm, clipped to ``max_norm`` by us or by the host."""
    handle = api.handle_of(trainer.model.parameters())
    if handle is None or handle.session is None or getattr(trainer, "is_deepspeed_enabled", False):
        return host()
    session, step = handle.session, trainer.state.global_step + 1
    trainer.accelerator.unscale_gradients()
    leave = session.config.clip.replace == "never" or (trainer in _left and step not in VERIFY_AT)
    if leave and not _logging_is_due(trainer):
        return host()
    stock: HostNorm | None = None
    if _logging_is_due(trainer) or step in VERIFY_AT:
        stock = measure_host_norm(trainer.model.parameters(), session)
    if session.mode is not Mode.ENFORCE or leave or _host_can_stay(trainer, session, stock):
        verdict = session.measure()
        if session.mode is Mode.ENFORCE and not leave and stock is not None:
            _decide_about_host(trainer, stock, verdict)
        if session.mode is not Mode.ENFORCE or leave or trainer in _left:
            result = host()
            _remember(trainer, verdict, stock, max_norm)
            if session.mode is not Mode.ENFORCE:
                norm = result.full_tensor() if isinstance(result, DTensor) else torch.as_tensor(result)
                log_difference(norm, verdict, max_norm)
            return result
    verdict = handle.clip(max_norm)
    _remember(trainer, verdict, stock, max_norm)
    return verdict.norm


def _host_can_stay(trainer: Trainer, session: Any, stock: HostNorm | None) -> bool:
    """Whether stock may be right: all gradients are DTensors, nothing is pending, and it could be measured."""
    sharded = all(isinstance(entry.parameter, DTensor) for entry in session.entries)
    candidate = sharded and not session.agreed.reductions and session.config.clip.replace == "auto"
    return candidate and (stock is not None or trainer in _left)


def _decide_about_host(trainer: Trainer, stock: HostNorm, verdict: Verdict) -> None:
    """Leave a host alone whose norm is the true one; the decision is the same on all ranks."""
    true = float(verdict.norm)
    right = abs(stock.norm - true) <= _RIGHT * max(true, 1e-30) and stock.spread <= 1 + _RIGHT
    if right and trainer not in _left:
        _left.add(trainer)
        if distributed_rank() == 0:
            say(f"host norm verified: {stock.norm:.6g}, true {true:.6g}; left in place (clip.replace: auto)")
    elif not right:
        if distributed_rank() == 0:
            say(f"host norm {stock.norm:.6g} is not the true {true:.6g} (ranks apart by {stock.spread:.6g}); replaced")
        _left.discard(trainer)


def _logging_is_due(trainer: Trainer) -> bool:
    """Whether the Trainer may log at the end of this step; the same on all ranks."""
    arguments, state = trainer.args, trainer.state
    if str(getattr(arguments.logging_strategy, "value", arguments.logging_strategy)) != "steps":
        return True
    step = state.global_step + 1
    every = int(state.logging_steps or arguments.logging_steps or 0)
    return (step == 1 and arguments.logging_first_step) or (every > 0 and step % every == 0)


def _remember(trainer: Trainer, verdict: Verdict, stock: HostNorm | None, max_norm: float) -> None:
    """Values for the next log; tensors stay on the device until then."""
    values: dict[str, float | Tensor] = {"ep_hooks/grad_norm": verdict.norm}
    values.update({f"ep_hooks/grad_norm/{name}": norm for name, norm in verdict.domains.items()})
    values["ep_hooks/clip_coef"] = torch.clamp(max_norm / (verdict.norm + 1e-6), max=1.0)
    if stock is not None:
        true = float(verdict.norm)
        values["ep_hooks/host_ratio"] = stock.norm / true if true else math.nan
        values["ep_hooks/rank_spread"] = stock.spread
    _logged[trainer] = values
