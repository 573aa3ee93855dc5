"""Sums of powers of local gradients: accurate, without gradient-sized temporaries and without host syncs.

Accuracy (measured on CPU, see docs/performance.md): one ``vector_norm`` over 16 M float32 elements accumulates in
float32 lanes and is off by 7e-4; rows of at most 65,536 elements with float64 partials are right to 2e-7. bfloat16
and float16 are accumulated in float32, a row at a time, so that the converted copy stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["accumulate", "logical_slice", "max_abs"]

_ROW = 65_536
_NARROW_ROW = 16_384
"""Elements reduced at once; fewer for 16-bit gradients, whose converted copy then stays in the cache."""
_STRIDED_ROW = 4_096
"""Strided rows are summed one element after the other in float32: 65,536 of them are off by 2.5e-6."""
_SCRATCH_FROM = 4_096
"""From this size on, squares of 16-bit rows go through one scratch buffer on CPU (2 times faster than converting)."""

_NARROW = (torch.bfloat16, torch.float16)


def logical_slice(tensor: Tensor, lo: int, hi: int) -> list[Tensor]:
    """Views that together hold elements [lo, hi) of ``tensor`` in logical row-major order, whatever its strides.

    Equal replicas may have different strides, so slices are never taken in memory order.
    """
    if lo <= 0 and hi >= tensor.numel():
        return [tensor]
    if tensor.is_contiguous():
        return [tensor.reshape(-1)[lo:hi]]
    views: list[Tensor] = []
    _collect(tensor, lo, hi, views)
    return views


def _collect(tensor: Tensor, lo: int, hi: int, views: list[Tensor]) -> None:
    if lo >= hi:
        return
    if tensor.dim() <= 1:
        views.append(tensor[lo:hi])
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-lo // row), hi // row  # whole rows [first, last)
    if first > last:  # inside one row
        _collect(tensor[last], lo - last * row, hi - last * row, views)
        return
    if lo < first * row:
        _collect(tensor[first - 1], lo - (first - 1) * row, row, views)
    if first < last:
        views.append(tensor[first:last])
    if last * row < hi:
        _collect(tensor[last], 0, hi - last * row, views)


def _rows(tensor: Tensor) -> list[Tensor]:
    """Views of at most one row's elements each."""
    n, limit = tensor.numel(), _NARROW_ROW if tensor.dtype in _NARROW else _ROW
    if not tensor.is_contiguous():
        limit = min(limit, _STRIDED_ROW)
    if n <= limit:
        return [tensor]
    if tensor.is_contiguous():
        return list(tensor.reshape(-1).split(limit))
    if tensor.shape[0] == 1:
        return _rows(tensor[0])
    size = max(1, limit * tensor.shape[0] // n)
    return [row for part in tensor.split(size) for row in _rows(part)]


def accumulate(views: Sequence[Tensor], norm_type: float) -> Tensor | None:
    """Sum of ``|x| ** norm_type`` over all elements of ``views``, or the maximum of ``|x|`` for ``inf``.

    Args:
        views: tensors of one device and dtype.

    Returns:
        A 0-dim float64 tensor on the device (float32 where the device has no float64), or ``None`` for no elements.
        NaN and inf in the input come out as NaN or inf. Runs no collective and does not wait for the device.
    """
    views = [view for view in views if view.numel()]
    if not views:
        return None
    wide = torch.float32 if views[0].device.type == "mps" else torch.float64
    if math.isinf(norm_type):
        return max_abs(views).to(wide)
    if views[0].is_complex() and norm_type == 2.0:
        views = [torch.view_as_real(view) for view in views]
    rows = [row for view in views for row in _rows(view)]
    sums: list[Tensor] = []
    if rows[0].dtype in _NARROW and norm_type == 2.0 and rows[0].device.type == "cpu":
        large = [row for row in rows if row.numel() >= _SCRATCH_FROM]
        rows = [row for row in rows if row.numel() < _SCRATCH_FROM]
        sums += [_squares_through_scratch(large)] if large else []
    if rows:
        if norm_type != 2.0:
            inner: torch.dtype | None = wide  # float32 lanes are off by up to 1e-5 for other powers
        else:
            inner = torch.float32 if rows[0].dtype in _NARROW else None
        norms = torch._foreach_norm(rows, norm_type, dtype=inner)
        sums.append(torch.stack(norms).to(wide).pow_(norm_type).sum())
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _squares_through_scratch(rows: Sequence[Tensor]) -> Tensor:
    scratch = torch.empty(_NARROW_ROW, dtype=torch.float32)
    sums = []
    for row in rows:
        part = scratch[: row.numel()]
        part.view(row.shape).copy_(row)
        sums.append(torch.dot(part, part))
    return torch.stack(sums).to(torch.float64).sum()


def max_abs(views: Sequence[Tensor]) -> Tensor:
    """Maximum of ``|x|`` over non-empty ``views``; NaN if any element is."""
    if views[0].is_complex():
        return torch.stack([view.abs().amax() for view in views]).amax()
    # aminmax is 8 times faster than abs().max() on CPU and needs no copy.
    pairs = [torch.aminmax(view) for view in views]
    low = torch.stack([pair.min for pair in pairs])
    high = torch.stack([pair.max for pair in pairs])
    return torch.maximum(low.neg().amax(), high.amax())
