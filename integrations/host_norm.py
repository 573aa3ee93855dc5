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

_RIGHT = 1e-5


@dataclass(frozen=True, slots=True)
class HostNorm:
    """The host's norm.

    Attributes:
        norm: on this rank.
        smallest: among the ranks.
        largest: among the ranks.
        may_stay: every rank's trainable parameters are DTensors, whose meshes tell the host over which ranks to sum.
    """

    norm: float
    smallest: float
    largest: float
    may_stay: bool

    @property
    def spread(self) -> float:
        """Largest over smallest; 1.0 where the ranks agree."""
        if self.smallest == self.largest:
            return 1.0
        return self.largest / self.smallest if self.smallest > 0 else math.inf

    def is_right(self, true: float) -> bool:
        """Whether all ranks report the true norm; the same answer on all of them, so it is not asked of ``norm``."""
        return max(abs(self.smallest - true), abs(self.largest - true)) <= _RIGHT * true


def measure_host_norm(
    parameters: Iterable[Tensor], session: Session, *, scale: float = 1.0, spans_meshes: bool = True
) -> HostNorm | None:
    """The stock norm: one per device mesh, plain gradients taken as equal on all ranks.

    That is ``Accelerator._clip_grad_norm_dtensor_aware`` (some builds of accelerate 1.15) and
    ``Trainer._mixed_mesh_grad_norm`` (transformers 5.18 to 5.24) with ``max_norm=inf``.

    Args:
        scale: the norm is divided by it: what the host takes off the gradients before it looks at them.
        spans_meshes: the host has one of the two functions; torch's own raises on several meshes.

    Returns:
        ``None``, on all ranks, where stock would hang or raise: a DTensor gradient is missing on some rank.

    Two exchanges over the rank set, and the collectives of stock; waits for the device.
    """
    meshes: dict[object, list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    sharded = [entry.parameter for entry in session.entries if isinstance(entry.parameter, DTensor)]
    works = all(p.grad is not None for p in sharded) and (spans_meshes or len(meshes) <= 1)
    answers = gather_objects((works, len(sharded) == len(session.entries)), session.group)
    if not all(works for works, _ in answers):
        return None
    squares = 0.0
    for gradients in meshes.values():
        norm = torch.nn.utils.get_total_norm(gradients)
        squares += float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    norms = gather_objects(math.sqrt(squares) / scale, session.group)
    # min() and max() would pass over a NaN that does not come first.
    numbers = [math.nan] if any(map(math.isnan, norms)) else norms
    return HostNorm(math.sqrt(squares) / scale, min(numbers), max(numbers), all(sharded for _, sharded in answers))
