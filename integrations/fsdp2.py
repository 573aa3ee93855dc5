"""Plain PyTorch, FSDP2 and torchtitan: ``torch.nn.utils.clip_grad_norm_`` becomes aware of expert parallelism.

``install()`` replaces the function on ``torch.nn.utils`` for models that are attached (``ep_hooks.attach``) and for
gradients on several device meshes, where torch's own raises. Everything else goes to torch's function as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ep_hooks import api
from ep_hooks.config import EPHooksConfig, load_config
from ep_hooks.modes import Mode
from ep_hooks.patching import PatchSet

from .pytorch import PyTorchAdapter

__all__ = ["HOST_MODULES", "TESTED_VERSIONS", "install", "make_adapter", "uninstall"]

HOST_MODULES = ("torch.distributed.fsdp",)
TESTED_VERSIONS = {"torch": ("2.13.0", "2.13.0")}

make_adapter = PyTorchAdapter

_patches = PatchSet()


def install(config: str | Path | Mapping[str, Any] | EPHooksConfig | None = None) -> None:
    """Replace ``torch.nn.utils.clip_grad_norm_``. Idempotent; nothing is replaced in modes ``off`` and ``observe``."""
    if _patches or load_config(config).resolved_mode() in (Mode.OFF, Mode.OBSERVE):
        return
    # Scripts call it through either module; those that imported the name before see torch's own.
    _patches.replace(torch.nn.utils, "clip_grad_norm_", _clip_grad_norm_)
    _patches.replace(torch.nn.utils.clip_grad, "clip_grad_norm_", _clip_grad_norm_)


def uninstall() -> None:
    """Restore torch's function. Idempotent."""
    _patches.restore()


def _clip_grad_norm_(
    original: Any,
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if api.handle_of(given) is not None or _several_meshes(given):
        return api.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    result: Tensor = original(given, max_norm, norm_type, error_if_nonfinite, foreach)
    return result


def _several_meshes(parameters: Iterable[Tensor]) -> bool:
    """Whether torch's function would raise; decided by parameters, which are alike on all ranks, not gradients."""
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters if p.requires_grad}
    return len(meshes) > 1 and meshes != {None}
