"""Accelerate: ``Accelerator.clip_grad_norm_`` becomes the true norm for attached models.

Attach before ``accelerator.prepare`` (DDP reads its ignore list when it wraps) with ``ep_hooks.attach``, or let
``install(config)`` do it in ``prepare``, as the launcher does. DeepSpeed, Megatron-LM and XLA are left alone: they
reduce and clip themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ep_hooks import api
from ep_hooks.agreement import gather_objects
from ep_hooks.config import EPHooksConfig, load_config
from ep_hooks.groups import is_distributed
from ep_hooks.hosts import mode_on_host, version_facts
from ep_hooks.modes import Mode
from ep_hooks.optimizer_hooks import unwrap_optimizer
from ep_hooks.patching import PatchSet
from ep_hooks.report import announce_off, log_difference

from .pytorch import PyTorchAdapter, assumed_replicated

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

__all__ = ["HOST_MODULES", "TESTED_VERSIONS", "install", "uninstall"]

HOST_MODULES = ("accelerate.accelerator",)
TESTED_VERSIONS = {"accelerate": ("1.15.0", "1.15.0")}

EXPERT_CONTAINERS = ("transformers.models.*Experts",)
"""Classes of transformers that hold experts, such as ``Qwen3MoeExperts``."""

_patches = PatchSet()
_handles: list[api.Handle] = []
_config: EPHooksConfig | None = None


def install(config: str | Path | Mapping[str, Any] | EPHooksConfig | None = None) -> None:
    """Patch the class. Idempotent.

    Args:
        config: with it, ``Accelerator.prepare`` attaches the models that it is given to train; without, only models
            that were attached before are served.
    """
    from accelerate.accelerator import Accelerator

    global _config
    _config = load_config(config) if config is not None else _config
    _patches.replace(Accelerator, "clip_grad_norm_", _clip_grad_norm_)
    _patches.replace(Accelerator, "prepare", _prepare)
    _patches.replace(Accelerator, "prepare_model", _prepare_model)
    _patches.replace(Accelerator, "prepare_optimizer", _prepare_optimizer)


def uninstall() -> None:
    """Restore the class and detach what ``prepare`` has attached. Idempotent."""
    global _config
    _config = None
    while _handles:
        _handles.pop().remove()
    _patches.restore()


def _prepare(original: Any, accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
    prepared = original(accelerator, *args, **kwargs)
    if _config is not None and not _reduces_itself(accelerator):
        if _shards(accelerator):
            # accelerate 1.15, accelerator.py: a list on the FSDP2 path, a tuple on the others, or one object.
            for model in prepared if isinstance(prepared, list | tuple) else (prepared,):
                _attach(model)
        _hook_optimizers(accelerator)  # those that were prepared before their model, too
    return prepared


def _prepare_model(
    original: Any,
    accelerator: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    # FSDP2 replaces the parameters in a method of its own, which ends in `prepare`.
    if not (_config is None or evaluation_mode or _shards(accelerator) or _reduces_itself(accelerator)):
        _attach(model)
    return original(accelerator, model, device_placement=device_placement, evaluation_mode=evaluation_mode)


def _prepare_optimizer(original: Any, accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
    prepared = original(accelerator, *args, **kwargs)
    if _config is not None and not _reduces_itself(accelerator):
        _hook_optimizers(accelerator)
    return prepared


def _attach(model: Any) -> None:
    if _config is None or not isinstance(model, nn.Module) or api.handle_of(model.parameters()) is not None:
        return
    # A frozen reference model has no gradients, and no rule would match; one rank may rightly train nothing.
    group = dist.group.WORLD if is_distributed() and _config.ranks is None else None
    if any(gather_objects(any(p.requires_grad for p in model.parameters()), group)):
        handle = attach_model(model, _config, TESTED_VERSIONS)
        if handle is not None:
            _handles.append(handle)


def _hook_optimizers(accelerator: Accelerator) -> None:
    for optimizer in map(unwrap_optimizer, accelerator._optimizers):
        handle = api.handle_of(p for group in optimizer.param_groups for p in group["params"])
        if handle is not None and handle.session is not None:
            handle.add_optimizers([optimizer])


def _shards(accelerator: Accelerator) -> bool:
    from accelerate.utils import DistributedType

    return bool(accelerator.distributed_type == DistributedType.FSDP)


def _reduces_itself(accelerator: Accelerator) -> bool:
    """Whether Accelerate hands gradients and clip over to an engine."""
    from accelerate.utils import DistributedType

    own = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
    return accelerator.distributed_type in own


def attach_model(model: nn.Module, config: EPHooksConfig, tested: Mapping[str, tuple[str, str]]) -> api.Handle | None:
    """Attach ``model`` with a host's versions in banner and agreement; ``None`` in mode ``off``."""
    mode = mode_on_host(config.resolved_mode(), tested, config)
    if mode is Mode.OFF:
        announce_off()
        return None
    default = assumed_replicated("plain parameter, no wrapper") if config.undeclared == "assume" else None
    adapter = PyTorchAdapter(model, config, default=default, containers=EXPERT_CONTAINERS)
    adapter.name, adapter.facts = next(iter(tested)), version_facts(tested)
    return api.attach_adapter(adapter, config, mode, ())


def loss_scale(accelerator: Accelerator) -> float:
    """The factor that ``Accelerator.unscale_gradients`` takes off the gradients; 1.0 without an fp16 scaler.

    ``GradScaler.unscale_`` refuses a second call in a step, and Accelerate's clip makes one. So where the host clips,
    scaled gradients are measured and the norm is divided.
    """
    if accelerator.native_amp and accelerator.mixed_precision == "fp16":
        return float(accelerator.scaler.get_scale())
    return 1.0


def plain_norm(norm: Any) -> Tensor:
    """A host's norm as an ordinary 0-dim tensor; on one device mesh it is a DTensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)


def _clip_grad_norm_(
    original: Any, accelerator: Accelerator, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> Any:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    handle = api.handle_of(given)
    if handle is None or handle.session is None or _reduces_itself(accelerator):
        return original(accelerator, given, max_norm, norm_type)
    enforce = handle.session.mode is Mode.ENFORCE
    if enforce and handle.config.clip.replace != "never":
        accelerator.unscale_gradients()
        return api.clip_grad_norm_(given, max_norm, norm_type)
    verdict = handle.measure(norm_type, given, scale=loss_scale(accelerator))
    host = original(accelerator, given, max_norm, norm_type)
    handle.host_clipped()
    if not enforce:
        log_difference(plain_norm(host), verdict, max_norm)
    return host
