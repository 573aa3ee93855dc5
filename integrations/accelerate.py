"""Accelerate: ``Accelerator.clip_grad_norm_`` becomes the true norm for attached models.

Attach before ``accelerator.prepare`` (DDP reads its ignore list when it wraps) with ``ep_hooks.attach``, or let
``install(config)`` do it in ``prepare``, as the launcher does. DeepSpeed engines are left alone: they clip themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ep_hooks import api
from ep_hooks.config import EPHooksConfig, load_config
from ep_hooks.hosts import mode_on_host, version_facts
from ep_hooks.modes import Mode
from ep_hooks.optimizer_hooks import unwrap_optimizer
from ep_hooks.patching import PatchSet
from ep_hooks.report import log_difference

from .pytorch import PyTorchAdapter, assumed_replicated

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

__all__ = ["HOST_MODULES", "TESTED_VERSIONS", "install", "uninstall"]

HOST_MODULES = ("accelerate.accelerator",)
TESTED_VERSIONS = {"accelerate": ("1.15.0", "1.15.0")}

_patches = PatchSet()
_handles: list[api.Handle] = []
_config: EPHooksConfig | None = None


def install(config: str | Path | Mapping[str, Any] | EPHooksConfig | None = None) -> None:
    """Patch the class. Idempotent.

    Args:
        config: with it, ``Accelerator.prepare`` attaches the models it is given; without, only models that were
            attached before are served.
    """
    from accelerate.accelerator import Accelerator

    global _config
    _config = load_config(config) if config is not None else _config
    _patches.replace(Accelerator, "clip_grad_norm_", _clip_grad_norm_)
    _patches.replace(Accelerator, "prepare", _prepare)


def uninstall() -> None:
    """Restore the class and detach what ``prepare`` has attached. Idempotent."""
    global _config
    _config = None
    while _handles:
        _handles.pop().remove()
    _patches.restore()


def _prepare(original: Any, accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
    from accelerate.utils import DistributedType

    if _config is None or accelerator.distributed_type == DistributedType.DEEPSPEED:
        return original(accelerator, *args, **kwargs)
    late = accelerator.distributed_type == DistributedType.FSDP  # FSDP2 replaces the parameters while it wraps
    if not late:
        _attach_all(args)
    prepared = original(accelerator, *args, **kwargs)
    results = prepared if isinstance(prepared, tuple) else (prepared,)
    if late:
        _attach_all(results)
    for result in results:
        if isinstance(result, Optimizer):
            inner = unwrap_optimizer(result)
            handle = api.handle_of(p for group in inner.param_groups for p in group["params"])
            if handle is not None:
                handle.add_optimizers([inner])
    return prepared


def _attach_all(candidates: Iterable[Any]) -> None:
    for model in candidates:
        if isinstance(model, nn.Module) and api.handle_of(model.parameters()) is None:
            handle = attach_model(model, _config or EPHooksConfig(), TESTED_VERSIONS)
            if handle is not None:
                _handles.append(handle)


def attach_model(
    model: nn.Module, config: EPHooksConfig, tested: Mapping[str, tuple[str, str]], containers: tuple[str, ...] = ()
) -> api.Handle | None:
    """Attach ``model`` with a host's versions in banner and agreement; ``None`` in mode ``off``."""
    mode = mode_on_host(config.resolved_mode(), tested, config)
    if mode is Mode.OFF:
        return None
    default = assumed_replicated("plain parameter, no wrapper") if config.undeclared == "assume" else None
    adapter = PyTorchAdapter(model, config, default=default, containers=containers)
    adapter.name, adapter.facts = next(iter(tested)), version_facts(tested)
    return api.attach_adapter(adapter, config, mode, ())


def _clip_grad_norm_(
    original: Any, accelerator: Accelerator, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> Any:
    from accelerate.utils import DistributedType

    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    handle = api.handle_of(given)
    if handle is None or handle.session is None or accelerator.distributed_type == DistributedType.DEEPSPEED:
        return original(accelerator, given, max_norm, norm_type)
    accelerator.unscale_gradients()
    if handle.session.mode is Mode.ENFORCE:
        return api.clip_grad_norm_(given, max_norm, norm_type)
    verdict = handle.session.measure(norm_type)
    host = original(accelerator, given, max_norm, norm_type)
    log_difference(host, verdict, max_norm)
    return host
