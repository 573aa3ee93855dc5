"""Sends made-up gradients through the reductions of DDP, FSDP2 and hooks on parameters, and takes them back.

A surrogate of ``forward`` multiplies every parameter by what its gradient shall be; forward and backward then go
through the wrappers' own hooks. Nothing of the model itself runs. What is private in torch was read in torch 2.13:
``_fsdp_param_group.py``, ``_fsdp_param.py``, ``nn/parallel/distributed.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ep_hooks.errors import UnsupportedError
from ep_hooks.replay import Gradients, Pattern, Region, Replayed
from ep_hooks.table import Entry
from ep_hooks.topology import axis_names

__all__ = ["replay_plan", "replayed"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


def replay_plan(
    module: nn.Module | None,
    ddps: Sequence[DistributedDataParallel],
    fsdp_groups: Sequence[Any],
    entries: Sequence[Entry],
) -> list[Replayed]:
    """Who reduces each parameter.

    Raises:
        UnsupportedError: no module; DDP with a static graph; a hook that may step an optimizer.
    """
    if module is None:
        raise UnsupportedError("parameters without a module cannot be probed: attach the model that holds them")
    for ddp in ddps:
        if ddp.static_graph:
            raise UnsupportedError(
                "DistributedDataParallel(static_graph=True) has recorded the graph of the model and cannot be probed"
            )
    for entry in entries:
        if getattr(entry.parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(
                f"{entry.id} has a hook that runs after its gradient was accumulated and may step an optimizer, so "
                "it cannot be probed"
            )
    by_ddp = {
        id(parameter): "DistributedDataParallel"
        for ddp in ddps
        for name, parameter in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore
    }
    by_fsdp = {id(p.sharded_param): p for group in fsdp_groups for p in group.fsdp_params}
    plan = []
    for entry in entries:
        key = id(entry.parameter)
        if key in by_fsdp:
            plan.append(_by_fsdp(by_fsdp[key]))
            continue
        hooked = "a hook on the gradient" if getattr(entry.parameter, "_backward_hooks", None) else ""
        plan.append(Replayed(Region.all_of(entry.source.shape), by_ddp.get(key, hooked)))
    return plan


def _by_fsdp(parameter: Any) -> Replayed:
    """FSDP2 cuts the local tensor along one dimension into chunks of equal size, the last ones smaller or empty."""
    info, whole = parameter.mesh_info, tuple(parameter._orig_size)
    names = axis_names(info.mesh)
    offset = [0] * len(whole)
    shape = tuple(parameter.sharded_size)
    storage: tuple[str, ...] = ()
    if info.shard_mesh_dim is not None:
        dim = parameter.fsdp_placement.dim
        offset[dim] = min(-(-whole[dim] // info.shard_mesh_size) * info.shard_mesh_rank, whole[dim])
        storage = (names[info.shard_mesh_dim],)
    return Replayed(Region(shape, tuple(offset), whole), f"FSDP2 over ({', '.join(names)})", storage)


@contextmanager
def replayed(
    module: nn.Module,
    ddps: Sequence[DistributedDataParallel],
    fsdp_groups: Sequence[Any],
    pattern: Pattern,
    gradients: Gradients,
) -> Iterator[Gradients]:
    """One forward and backward of the surrogate; gradients are put back at the end."""
    outer = next((ddp for ddp in ddps if ddp.module is module), None)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        devices = [p.device for p in parameters[:1]]
        kind = devices[0].type if devices else "cpu"
        with ExitStack() as stack:
            stack.enter_context(_same_generators(kind))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(kind, enabled=False))
            for ddp in ddps:
                _set(stack, ddp, require_backward_grad_sync=True, broadcast_buffers=False)
                _set(stack, ddp, require_forward_param_sync=ddp.require_forward_param_sync)
            for group in fsdp_groups:
                _set(stack, group, reduce_grads=True, all_reduce_grads=True)
            entrance = outer or module
            _substitute(stack, module, pattern)
            start = torch.zeros((), device=devices[0] if devices else None, requires_grad=True)
            entrance(start).backward()
        yield gradients
    finally:
        for parameter, gradient, values in before:
            parameter.grad = gradient
            # It may be a view of a buffer that the reduction has written (DDP's gradient_as_bucket_view).
            if gradient is not None and values is not None and not _equal(gradient.detach(), values):
                gradient.detach().copy_(values)


def _equal(one: Tensor, other: Tensor) -> bool:
    local, before = ((t.to_local() if isinstance(t, DTensor) else t) for t in (one, other))
    return torch.equal(local, before)


def _same_generators(kind: str) -> Any:
    """Generators of the CPU and of this rank's device are as before at the end."""
    if kind == "cpu":
        return torch.random.fork_rng(devices=[])
    device = torch.get_device_module(kind).current_device()
    return torch.random.fork_rng(devices=[device], device_type=kind)


def _set(stack: ExitStack, target: Any, **values: Any) -> None:
    """Set attributes until the stack ends."""
    for name, value in values.items():
        stack.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)


def _substitute(stack: ExitStack, module: nn.Module, pattern: Pattern) -> None:
    """Give the module, and every wrapped module below it, a forward that touches its own parameters only."""
    todo, taken = [module], set[int]()
    while todo:
        current = todo.pop()
        inner = current.module if isinstance(current, DistributedDataParallel) else current
        own, wrapped = _own(inner)
        todo += wrapped
        once = {id(owner._parameters[name]): (owner, name) for owner, name in reversed(own)}  # tied ones have two names
        own = [place for key, place in reversed(once.items()) if key not in taken]
        taken |= once.keys()
        stack.callback(_restore_forward, inner, inner.__dict__.get("forward"))
        inner.forward = _forward(own, wrapped, pattern)
        for each in {current, inner}:
            for hooks in _HOOKS:
                kept = OrderedDict((key, hook) for key, hook in getattr(each, hooks).items() if _of_torch(hook))
                _set(stack, each, **{hooks: kept})
            _set(stack, each, _compiled_call_impl=None)


def _own(module: nn.Module) -> tuple[list[tuple[nn.Module, str]], list[nn.Module]]:
    """(submodule, name) of the trainable parameters outside nested wrapped modules, and those modules."""
    own = [(module, name) for name, p in module._parameters.items() if p is not None and p.requires_grad]
    wrapped: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, DistributedDataParallel) or hasattr(child, "_get_fsdp_state"):
            wrapped.append(child)
        else:
            deeper, below = _own(child)
            own += deeper
            wrapped += below
    return own, wrapped


def _forward(own: Sequence[tuple[nn.Module, str]], wrapped: Sequence[nn.Module], pattern: Pattern) -> Any:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for child in wrapped:
            x = child(x)
        for module, name in own:
            parameter = getattr(module, name)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            product = (local * pattern.fill(Region.all_of(local.shape), local.detach())).sum()
            x = x + (product.real if product.is_complex() else product).to(x.dtype)
        return x + 0.0  # no view of the input, which FSDP2 warns of

    return forward


def _restore_forward(module: nn.Module, before: Any) -> None:
    if before is None:
        del module.forward
    else:
        module.forward = before


def _of_torch(hook: Any) -> bool:
    """Whether a hook belongs to a wrapper of torch, and not to the user."""
    owner = getattr(hook, "__self__", None)
    named = type(owner).__module__ if owner is not None else getattr(hook, "__module__", "")
    return str(named or "").startswith("torch.distributed")
