"""Sums of powers of local gradients: accurate, without gradient-sized temporaries and without host syncs.

Accuracy (measured on CPU, see docs/performance.md): ``vector_norm`` adds float32 squares in a few float32 lanes, where
the rounding of *equal* values adds up: off by 7e-4 over 16 M elements. Blocks of 512 elements whose norms are added in
float64 are right to 6e-7 for equal values, and to 1e-7 for random ones. Small, strided and 16-bit gradients are first
gathered in one scratch buffer that stays in the cache, which also saves most of the calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["accumulate", "logical_slice", "max_abs", "may_underflow", "rows", "squares_in_float64"]

_ROW = 65_536
"""Elements reduced at once."""
_BLOCK = 512
"""Elements whose squares are added in float32 on CPU."""
_SCRATCH = 131_072
"""Elements of the scratch buffer, half a MiB of float32."""
_DIRECT_FROM = 32_768
"""From this size on, contiguous float32 gradients are read where they are."""
_FOLD_AT = 65_536
"""Norms of blocks that are kept before they are added up."""
_SMALLEST_MEAN_SQUARE = 1e-30
"""Below this, float32 squares may have underflowed (to less than 1.2e-38 each)."""

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


def rows(tensor: Tensor, limit: int = _ROW) -> list[Tensor]:
    """Views of at most ``limit`` elements each."""
    n = tensor.numel()
    if n <= limit:
        return [tensor]
    if tensor.is_contiguous():
        return list(tensor.reshape(-1).split(limit))
    if tensor.shape[0] == 1:
        return rows(tensor[0], limit)
    size = max(1, limit * tensor.shape[0] // n)
    return [row for part in tensor.split(size) for row in rows(part, limit)]


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
    if norm_type == 2.0 and views[0].is_complex():
        views = [torch.view_as_real(view.resolve_conj()) for view in views]
    if norm_type == 2.0 and views[0].device.type == "cpu" and views[0].dtype in (torch.float32, *_NARROW):
        return _squares_on_cpu(views)
    narrow = norm_type == 2.0 and views[0].dtype in _NARROW
    # Float32 lanes are off by up to 1e-5 for other powers.
    inner = torch.float32 if narrow else wide if norm_type != 2.0 else None
    return _sum_of_powers(views, norm_type, inner).to(wide)


def may_underflow(total: Tensor, views: Sequence[Tensor], norm_type: float) -> bool:
    """Whether a sum of float32 squares is so small that some may have been lost. Waits for the device."""
    if norm_type != 2.0:  # summed in float64
        return False
    return views[0].dtype != torch.float64 and float(total) <= _SMALLEST_MEAN_SQUARE * sum(v.numel() for v in views)


def squares_in_float64(views: Sequence[Tensor]) -> Tensor:
    """The sum of squares of at least one element, every square in float64: slower than :func:`accumulate`."""
    return _sum_of_powers([view for view in views if view.numel()], 2.0, torch.float64)


def _sum_of_powers(views: Sequence[Tensor], norm_type: float, inner: torch.dtype | None) -> Tensor:
    real = [row.abs() if row.is_complex() else row for view in views for row in rows(view)]
    norms = torch.stack(torch._foreach_norm(real, norm_type, dtype=inner))
    return norms.to(torch.float32 if norms.device.type == "mps" else torch.float64).pow_(norm_type).sum()


def _squares_on_cpu(views: Sequence[Tensor]) -> Tensor:
    norms: list[Tensor] = []
    sums: list[Tensor] = []
    kept = 0
    for blocks in _blocks(views):
        norms.append(torch.linalg.vector_norm(blocks, dim=1))
        kept += blocks.shape[0]
        if kept >= _FOLD_AT:
            sums.append(torch.cat(norms).double().pow_(2).sum())
            norms, kept = [], 0
    if norms:
        sums.append(torch.cat(norms).double().pow_(2).sum())
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _blocks(views: Sequence[Tensor]) -> Iterator[Tensor]:
    """All elements in float32, as tensors of shape [n, _BLOCK] filled up with zeros, each valid until the next."""
    elsewhere: list[Tensor] = []
    for view in views:
        numel = view.numel()
        if numel >= _DIRECT_FROM and view.dtype == torch.float32 and view.is_contiguous():
            whole = numel // _BLOCK * _BLOCK
            if whole < numel:
                elsewhere.append(view.view(-1)[whole:])
                view = view.view(-1)[:whole]
            blocks = view.view(-1, _BLOCK)
            yield from blocks.split(_FOLD_AT) if len(blocks) > _FOLD_AT else (blocks,)
        elif numel <= _SCRATCH:
            elsewhere.append(view)
        else:
            elsewhere += rows(view, _SCRATCH)
    if elsewhere:
        yield from _gathered(elsewhere)


def _gathered(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Blocks of tensors of at most _SCRATCH elements each, which are copied into one buffer."""
    sizes = [part.numel() for part in parts]
    scratch = torch.empty(min(_SCRATCH, -(-sum(sizes) // _BLOCK) * _BLOCK))
    flat: list[Tensor] = []  # go to [start, end), in one call
    start = end = 0
    for part, size in zip(parts, sizes, strict=True):
        if end + size > len(scratch):
            yield _filled(flat, start, end, scratch)
            flat, start, end = [], 0, 0
        if part.dim() == 1:
            flat.append(part)
        elif part.is_contiguous():
            flat.append(part.view(-1))
        else:
            _filled(flat, start, end, scratch)
            scratch[end : end + size].view(part.shape).copy_(part)
            flat, start = [], end + size
        end += size
    yield _filled(flat, start, end, scratch)


def _filled(flat: list[Tensor], start: int, end: int, scratch: Tensor) -> Tensor:
    if flat:
        torch.cat(flat, out=scratch[start:end])
    padded = -(-end // _BLOCK) * _BLOCK
    if end < padded:
        scratch[end:padded].zero_()
    return scratch[:padded].view(-1, _BLOCK)


def max_abs(views: Sequence[Tensor]) -> Tensor:
    """Maximum of ``|x|`` over non-empty ``views``; NaN if any element is."""
    if views[0].is_complex():
        return torch.stack([row.abs().amax() for view in views for row in rows(view)]).amax()
    # aminmax is 8 times faster than abs().max() on CPU and needs no copy.
    pairs = [torch.aminmax(view) for view in views]
    low = torch.stack([pair.min for pair in pairs])
    high = torch.stack([pair.max for pair in pairs])
    return torch.maximum(low.neg().amax(), high.amax())
