"""The norm that Accelerate and the Trainer would report, measured without touching a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ep_hooks.agreement import gather_objects
from ep_hooks.session import Session

__all__ = ["HostNorm", "measure_host_norm"]


@dataclass(frozen=True)
class HostNorm:
    """The host's norm on this rank, and how far the ranks are apart.

    Attributes:
        norm: on this rank.
        spread: largest over smallest among the ranks; 1.0 where they agree.
    """

    norm: float
    spread: float


def measure_host_norm(parameters: Iterable[Tensor], session: Session) -> HostNorm | None:
    """The stock norm: one per device mesh, plain gradients taken as equal on all ranks.

    That is ``Accelerator._clip_grad_norm_dtensor_aware`` (accelerate 1.15) and ``Trainer._mixed_mesh_grad_norm``
    (transformers 5.18 to 5.24) with ``max_norm=inf``. ``None`` where stock would hang or raise: a DTensor gradient is
    missing on some rank. Two exchanges over the rank set, and the collectives of stock; waits for the device.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    meshes: dict[object, list[Tensor]] = {}
    for parameter in with_gradient:
        gradient = parameter.grad
        assert gradient is not None
        meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    sharded = [entry for entry in session.entries if isinstance(entry.parameter, DTensor)]
    complete = all(entry.parameter.grad is not None for entry in sharded)
    if not all(gather_objects(complete, session.group)):
        return None
    squares = 0.0
    for gradients in meshes.values():
        norm = torch.nn.utils.get_total_norm(gradients)
        squares += float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    norms = gather_objects(math.sqrt(squares), session.group)
    smallest = min(norms)
    spread = max(norms) / smallest if smallest > 0 else (1.0 if max(norms) == 0 else math.inf)
    return HostNorm(math.sqrt(squares), spread)
