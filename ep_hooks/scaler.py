"""Gradient scalers: an overflow found by one rank must skip the step on all of them.

``torch.amp.GradScaler`` decides from local gradients. With experts that live on one rank, that rank skips and halves
its scale while the others step, and dense replicas and scales drift apart. While a session is attached, the class's
``unscale_``, ``step`` and ``update`` tell the session what was found and are told what all ranks agreed on.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from ep_hooks.optimizer_hooks import OptimizerHooks, unwrap_optimizer
from ep_hooks.patching import PatchSet

__all__ = ["watch_scalers"]

_WATCHED: weakref.WeakKeyDictionary[Optimizer, OptimizerHooks] = weakref.WeakKeyDictionary()
_patches: PatchSet | None = None


def watch_scalers(hooks: OptimizerHooks) -> None:
    """Make gradient scalers agree over the ranks for the optimizers of ``hooks``."""
    global _patches
    for optimizer in hooks.optimizers:
        _WATCHED[optimizer] = hooks
    if _patches is None:
        _patches = PatchSet()
        _patches.replace(GradScaler, "unscale_", _unscale)
        _patches.replace(GradScaler, "step", _step)
        _patches.replace(GradScaler, "update", _update)


def unwatch_scalers(hooks: OptimizerHooks) -> None:
    """Undo :func:`watch_scalers`; the class is restored with the last one."""
    global _patches
    for optimizer in hooks.optimizers:
        _WATCHED.pop(optimizer, None)
    if not _WATCHED and _patches is not None:
        _patches.restore()
        _patches = None


def _found(scaler: GradScaler, optimizer: Any) -> dict[torch.device, torch.Tensor]:
    found: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return found


def _unscale(original: Any, scaler: GradScaler, optimizer: Any) -> None:
    original(scaler, optimizer)
    hooks = _WATCHED.get(unwrap_optimizer(optimizer))
    if hooks is not None and scaler.is_enabled():
        hooks.found_inf(unwrap_optimizer(optimizer), list(_found(scaler, optimizer).values()))


def _step(original: Any, scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    inner = unwrap_optimizer(optimizer)
    hooks = _WATCHED.get(inner)
    if hooks is None or not scaler.is_enabled():
        return original(scaler, optimizer, *args, **kwargs)
    if scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
        scaler.unscale_(optimizer)
    nonfinite = hooks.prepare(inner)
    if nonfinite is not None:
        found = _found(scaler, optimizer)
        # A rank without gradients of this optimizer has recorded no check, and GradScaler.step would refuse.
        if not found:
            found[nonfinite.device] = torch.zeros((), dtype=torch.float32, device=nonfinite.device)
        for flag in found.values():
            flag.copy_(torch.maximum(flag, nonfinite.to(device=flag.device, dtype=flag.dtype)))
    try:
        return original(scaler, optimizer, *args, **kwargs)
    finally:
        hooks.stepped(inner)


def _update(original: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
    original(scaler, *args, **kwargs)
    for hooks in set(_WATCHED.values()):
        hooks.forget_found_inf()
