"""Clipping: one coefficient for all gradients on all ranks, written in place."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["check_max_norm", "clip_coefficient", "scale_gradients"]

_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grads_with_norm_``, so that the same norm gives the same gradients."""


def check_max_norm(max_norm: float) -> float:
    """``max_norm`` as a float.

    Raises:
        ValueError: NaN, negative or no number.
    """
    try:
        value = float(max_norm)
    except (TypeError, ValueError):
        value = math.nan
    if math.isnan(value) or value < 0:
        raise ValueError(f"max_norm must be a number >= 0 (inf: measure only), got {max_norm!r}")
    return value


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))`` as a 0-dim tensor; NaN stays NaN."""
    return torch.clamp(max_norm / (norm + _EPSILON), max=1.0)


def scale_gradients(gradients: Iterable[Tensor | None], coefficient: Tensor | None) -> None:
    """Multiply all gradients by ``coefficient`` in place, or zero them for ``None``; never rebinds a gradient.

    On an accelerator the multiplication is unconditional: looking at the coefficient would wait for the device. On CPU
    callers leave it out where it would multiply by 1.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not None and gradient.numel():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), tensors in by_kind.items():
        if coefficient is None:
            torch._foreach_zero_(tensors)
        elif device.type == "cpu":
            torch._foreach_mul_(tensors, float(coefficient))
        else:
            torch._foreach_mul_(tensors, coefficient.to(device))
