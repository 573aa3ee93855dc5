"""The truth about a layout's gradients, by brute force and with no code of ep_hooks.

Everything is gathered on every rank in float64. The only thing taken on trust is the layout's own ``truth``, and tests
compare the gathered gradients with those of one process that holds the whole model.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.layouts import Along, Layout

__all__ = ["logical_gradients", "norm_of", "relative_error", "replica_spread", "true_norm"]


def logical_gradients(layout: Layout, *, summed: bool = False) -> dict[str, Tensor]:
    """Every logical parameter's gradient, whole, float64 and the same on all ranks; a missing gradient is zero.

    ``summed`` says that gradients with a pending sum have been reduced in place, so that they are replicas now.
    """
    gathered = {}
    for name, p in layout.parameters().items():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        whole = grad.detach().double()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        for axis, along in layout.truth.get(name, {}).items():
            kind = "replicate" if summed and along.kind == "sum" else along.kind
            whole = _join(whole, kind, along, layout.group(axis))
        gathered[name] = whole
    return gathered


def norm_of(gradients: dict[str, Tensor], norm_type: float = 2.0) -> float:
    """Norm of all elements together."""
    flat = torch.cat([g.double().flatten() for g in gradients.values()]) if gradients else torch.zeros(1)
    return torch.linalg.vector_norm(flat, norm_type).item()


def true_norm(layout: Layout, norm_type: float = 2.0, *, summed: bool = False) -> float:
    """Norm with every logical element counted once; ``summed`` as in :func:`logical_gradients`."""
    return norm_of(logical_gradients(layout, summed=summed), norm_type)


def relative_error(seen: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest ``|seen - expected| / |expected|`` over the parameters; infinite if they are not the same parameters."""
    if seen.keys() != expected.keys():
        return math.inf
    return max(((seen[n] - expected[n]).norm() / (expected[n].norm() + 1e-12)).item() for n in expected)


def replica_spread(layout: Layout, *, gradients: bool = False) -> float:
    """Largest difference between two ranks' copies of the same piece; 0.0 means that all copies are equal bit by bit.

    Compares the weights, or the gradients where ``gradients`` is set.
    """
    mine = {}
    for name, p in layout.parameters().items():
        t = p.grad if gradients else p
        if t is not None:
            local = t.to_local() if isinstance(t, DTensor) else t
            mine[name, _piece(layout, name, t)] = local.detach().clone()
    everyone: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    first: dict = {}
    spread = 0.0
    for ours in everyone:
        for key, t in ours.items():
            other = first.setdefault(key, t)
            if not torch.equal(t, other):
                spread = max(spread, (t.double() - other.double()).abs().max().item())
    return spread


def _piece(layout: Layout, name: str, t: Tensor) -> tuple[tuple[str, int], ...]:
    """Which piece of the logical parameter this rank holds, as coordinates along the axes that cut it."""
    where = []
    if isinstance(t, DTensor):
        for axis, placement in zip(t.device_mesh.mesh_dim_names or (), t.placements, strict=True):
            if not (placement.is_replicate() or placement.is_partial()):
                where.append((axis, t.device_mesh.get_local_rank(axis)))
    for axis, along in layout.truth.get(name, {}).items():
        if along.kind == "shard":
            where.append((axis, dist.get_rank(layout.group(axis))))
    return tuple(where)


def _join(piece: Tensor, kind: str, along: Along, group: dist.ProcessGroup) -> Tensor:
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, piece.contiguous(), group=group)
    if kind == "replicate":
        return pieces[0]
    if kind == "sum":
        return torch.stack(pieces).sum(0)
    if along.view is None:
        return torch.cat(pieces, along.dim)
    return torch.cat([p.reshape(along.view) for p in pieces], along.dim).reshape(*piece.shape[:-1], -1)
