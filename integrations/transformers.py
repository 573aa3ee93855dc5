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

from torch import Tensor, nn

from ep_hooks import api
from ep_hooks.clip import clip_coefficient
from ep_hooks.config import EPHooksConfig, load_config
from ep_hooks.errors import ConfigError, UnsupportedError
from ep_hooks.groups import distributed_rank
from ep_hooks.modes import Mode
from ep_hooks.norm import Verdict
from ep_hooks.optimizer_hooks import unwrap_optimizer
from ep_hooks.patching import PatchSet
from ep_hooks.report import log_difference, say
from ep_hooks.session import Session

from .accelerate import attach_model, loss_scale, plain_norm
from .host_norm import HostNorm, measure_host_norm

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["HOST_MODULES", "TESTED_VERSIONS", "EPHooksCallback", "install", "uninstall"]  # noqa: F822 (__getattr__ makes it)

HOST_MODULES = ("transformers.trainer",)
TESTED_VERSIONS = {"transformers": ("5.22.2", "5.24.0"), "accelerate": ("1.15.0", "1.15.0")}

VERIFY_AT = (1, 2, 10, 100)
"""Steps at which a host that is left alone is measured."""

_patches = PatchSet()
_launched: EPHooksConfig | None = None
_callbacks: list[Any] = []
"""Callbacks that nobody but the launcher has asked for."""
_left: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainers whose own clip was measured and left in place."""
_logged: weakref.WeakKeyDictionary[Any, tuple[int, dict[str, float | Tensor]]] = weakref.WeakKeyDictionary()
"""Step and values for its log."""


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
    """Restore the Trainer class and detach what the launcher has attached; a user's callback has its own ``remove``.

    Idempotent.
    """
    global _launched
    _launched = None
    while _callbacks:
        _callbacks.pop().remove()
    _patches.restore()


@functools.cache
def _callback_class() -> type:
    """The callback class; made on first use, since its base is transformers' and adapters are loaded before hosts."""
    from transformers import TrainerCallback

    class EPHooksCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        """Attaches the Trainer's model.

        Args:
            config: file, mapping or object; see :class:`ep_hooks.EPHooksConfig`. ``None``: the defaults, or whatever
                the model is attached with already.

        Attributes:
            handle: handle of the attached model; ``None`` before the Trainer is built and in mode ``off``.

        Raises:
            UnsupportedError: when a Trainer with DeepSpeed is built: the engine owns gradients and clip.
            ConfigError: the model is attached with another configuration.
        """

        def __init__(self, config: str | Path | Mapping[str, Any] | EPHooksConfig | None = None) -> None:
            self.config = load_config(config)
            self._follows = config is None
            self.handle: api.Handle | None = None
            install()

        def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            """The model is not wrapped yet: what DDP reads when it wraps is set here."""
            if getattr(args, "deepspeed_plugin", None) is not None:
                raise UnsupportedError(
                    "EPHooksCallback serves DDP, FSDP2 and native expert parallelism. DeepSpeed reduces and clips in "
                    "its engine, out of the Trainer's sight: take the callback out of this run"
                )
            self._attach(model)

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
        ) -> None:
            """The optimizer exists now; parameters that wrapping has replaced are classified again with it."""
            if self.handle is not None and optimizer is not None:
                self.handle.add_optimizers([unwrap_optimizer(optimizer)])

        def remove(self) -> None:
            """Detach the model and restore everything that was set on it."""
            if self.handle is not None:
                self.handle.remove()
                self.handle = None

        def _attach(self, model: nn.Module) -> None:
            # A second callback, or a second Trainer over the same model, finds it attached.
            found = api.handle_of(model.parameters())
            if found is not None and not self._follows and found.config != self.config:
                raise ConfigError(
                    "the Trainer's model is attached already, with another configuration than this EPHooksCallback's; "
                    "call remove() on that callback or handle first"
                )
            self.handle = found or attach_model(model, self.config, TESTED_VERSIONS)

    return EPHooksCallback


def __getattr__(name: str) -> Any:
    if name == "EPHooksCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ------------------------------------------------------------------------------------------------- patched methods


def _init(original: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    original(trainer, *args, **kwargs)
    if _launched is None or trainer.is_deepspeed_enabled or api.handle_of(trainer.model.parameters()) is not None:
        return
    callback = _callback_class()(_launched)
    _callbacks.append(callback)
    trainer.add_callback(callback)
    callback.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)


def _clip_grad_norm(original: Any, trainer: Trainer, model: nn.Module) -> Any:
    return _measure(trainer, trainer.args.max_grad_norm, lambda: original(trainer, model))


def _get_grad_norm(original: Any, trainer: Trainer, model: nn.Module, grad_norm: Any = None) -> Any:
    if grad_norm is not None:
        return original(trainer, model, grad_norm)
    return _measure(trainer, math.inf, lambda: original(trainer, model))


def _log(original: Any, trainer: Trainer, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    step, values = _logged.get(trainer, (-1, {}))
    if "grad_norm" in logs and step == trainer.state.global_step:
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
    """The step's norm, clipped to ``max_norm`` by us or by the host.

    Every branch is taken on all ranks together: it follows from the configuration, the step, or numbers that were
    exchanged.
    """
    handle = api.handle_of(trainer.model.parameters())
    if handle is None or handle.session is None or trainer.is_deepspeed_enabled:
        return host()
    session, replaced = handle.session, handle.config.clip.replace
    enforce = session.mode is Mode.ENFORCE
    acts = enforce and replaced != "never"
    look = _logging_is_due(trainer) or trainer.state.global_step + 1 in VERIFY_AT
    if not look and (trainer in _left or (enforce and not acts and not session.agreed.reductions)):
        return host()
    scale = loss_scale(trainer.accelerator)
    stock = _host_norm(trainer, session, scale) if look else None
    may_stay = replaced == "auto" and stock is not None and stock.may_stay and not session.agreed.reductions
    if not acts or may_stay:
        verdict = handle.measure(scale=scale)
        if not acts or (stock is not None and _stays(trainer, stock, float(verdict.norm))):
            norm = host()
            handle.host_clipped()
            _remember(trainer, verdict, stock, max_norm)
            if stock is not None and handle.audit is not None and handle.audit.audited:
                handle.audit.host_norm(stock.smallest, stock.largest, float(verdict.norm))
            if not enforce:
                log_difference(plain_norm(norm), verdict, max_norm)
            return norm
    elif trainer in _left:
        _replace(trainer, "cannot be measured any more: the gradient of a DTensor is missing on some rank")
    trainer.accelerator.unscale_gradients()
    verdict = handle.clip(max_norm)
    _remember(trainer, verdict, stock, max_norm)
    return verdict.norm


def _host_norm(trainer: Trainer, session: Session, scale: float) -> HostNorm | None:
    parameters = list(trainer.model.parameters())
    # transformers 5.18 to 5.24, trainer.py: the path for several meshes clips fp16 gradients without unscaling them.
    if scale != 1.0 and trainer._has_mixed_mesh_grads(trainer.model):
        scale = 1.0
    # The development builds of accelerate 1.15 lack the second function, so its version says nothing.
    spans = hasattr(trainer, "_mixed_mesh_grad_norm") or hasattr(trainer.accelerator, "_clip_grad_norm_dtensor_aware")
    return measure_host_norm(parameters, session, scale=scale, spans_meshes=spans)


def _stays(trainer: Trainer, stock: HostNorm, true: float) -> bool:
    """Leave a host alone whose norm is the true one."""
    if true == 0 or not math.isfinite(true):  # says nothing of the host
        return trainer in _left
    if stock.is_right(true):
        if trainer not in _left and distributed_rank() == 0:
            say(f"host norm verified: {stock.norm:.6g}, true {true:.6g}; left in place (clip.replace: auto)")
        _left.add(trainer)
        return True
    _replace(trainer, f"{stock.norm:.6g} is not the true {true:.6g} (ranks apart by {stock.spread:.6g})")
    return False


def _replace(trainer: Trainer, why: str) -> None:
    if distributed_rank() == 0:
        say(f"host norm {why}; replaced")
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
    """Values for the log of this step; tensors stay on the device until then."""
    values: dict[str, float | Tensor] = {"ep_hooks/grad_norm": verdict.norm}
    values.update({f"ep_hooks/grad_norm/{name}": norm for name, norm in verdict.domains.items()})
    values["ep_hooks/clip_coef"] = clip_coefficient(verdict.norm, max_norm)
    if stock is not None:
        true = float(verdict.norm)
        values["ep_hooks/host_ratio"] = 1.0 if stock.norm == true else stock.norm / true if true else math.inf
        values["ep_hooks/rank_spread"] = stock.spread
    _logged[trainer] = trainer.state.global_step + 1, values
