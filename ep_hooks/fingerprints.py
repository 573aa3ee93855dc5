"""Fingerprints of gradients and weights, and the sums of squares that fall out of the same pass.

A tensor is cut into blocks of 512 elements (128 if it is small). Of each block two float32 numbers are kept: its norm,
and its product with a fixed vector, which a swap of two elements or of a sign changes. The bits of these, weighed
by the block's position, are added as 64-bit integers. Equal tensors have equal words on equal hardware. Different
tensors have different words, but for differences below the rounding of a block's product, a few parts in a million of
its norm: it is a screen. What it finds different is hashed, and then measured.

A plain sum or exclusive-or of bits would collide on permuted rows, constants and swapped elements, and a weighted sum
of integers costs four times as much (measured on CPU).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ep_hooks.local_norm import logical_slice

__all__ = ["Screened", "exact", "screen"]

_WIDE, _NARROW = 512, 128
"""Elements of a block."""
_SMALL = 4_096
"""Tensors up to this size have narrow blocks where wide ones would need padding."""
_SCRATCH = 131_072
"""Elements gathered at once."""
_DIRECT_FROM = 32_768
_ALIGNED = 64
"""Bytes: matrix products of operands that are aligned otherwise may round otherwise."""
_ROWS = 16
"""A product's rounding depends on the block's place where the number of blocks is no multiple of the kernel's step."""
_EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""What float32 holds as it is."""
_FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64
"""Odd factors; 64-bit integers wrap."""

Part = tuple[int, int, int, Tensor]
"""(index of the tensor, first block, elements, flat elements)."""


@dataclass(frozen=True, slots=True)
class Screened:
    """Outcome of :func:`screen`.

    Attributes:
        words: int64, one for each tensor; 0 for a tensor of zeros, an empty or a missing one.
        squares: float64, the sum of squares of each.
    """

    words: Tensor
    squares: Tensor


@dataclass
class _Class:
    """Blocks of one width on one device."""

    width: int
    device: torch.device
    direct: list[Part] = field(default_factory=list)
    even: dict[int, tuple[list[int], list[Tensor]]] = field(default_factory=dict)
    """Elements -> (tensors, their flat elements), where elements are whole blocks: most of a model is of few sizes."""
    ragged: list[Part] = field(default_factory=list)


def screen(tensors: Sequence[Tensor | None]) -> Screened:
    """Fingerprint all tensors in one pass over their elements.

    Args:
        tensors: of any dtype and strides, on one device or several. They are read in logical order.

    Runs no collective. Waits for the device only to bring the words to the CPU.
    """
    words = torch.zeros(len(tensors), dtype=torch.int64)
    squares = torch.zeros(len(tensors), dtype=torch.float64)
    with torch.no_grad():
        for group in _sorted(tensors):
            numbers = _block_numbers(group)
            if numbers is None:
                continue
            owner, position, norm, product = numbers
            bits = product.view(torch.int32).long() * _mixed(2 * position + 1)
            bits += norm.view(torch.int32).long() * _mixed(2 * position + 2)
            words += torch.zeros(len(tensors), dtype=torch.int64, device=group.device).index_add_(0, owner, bits).cpu()
            sums = torch.zeros(len(tensors), dtype=torch.float64, device=group.device)
            squares += sums.index_add_(0, owner, norm.double().square_()).cpu()
    return Screened(words, squares)


def _mixed(numbers: Tensor) -> Tensor:
    """Odd 64-bit factors without structure: with an arithmetic sequence, opposite changes of four blocks cancel."""
    numbers = numbers * _FIRST
    numbers = (numbers ^ (numbers >> 29)) * _SECOND
    return (numbers ^ (numbers >> 32)) | 1


def exact(tensor: Tensor | None) -> int:
    """63 bits of a cryptographic hash of the elements, in logical order; 0 for zeros, nothing and ``None``."""
    if tensor is None or not tensor.numel() or not tensor.any():
        return 0
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    data = (real.cpu() + 0.0).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _sorted(tensors: Sequence[Tensor | None]) -> list[_Class]:
    classes: dict[tuple[int, torch.device], _Class] = {}
    for index, tensor in enumerate(tensors):
        if tensor is None or not (numel := tensor.numel()):
            continue
        key = _NARROW if numel <= _SMALL and numel % _WIDE else _WIDE, tensor.device
        group = classes.get(key) or classes.setdefault(key, _Class(*key))
        if tensor.dtype not in _EXACT or numel > _SCRATCH or not tensor.is_contiguous():
            for part in _float32(tensor):
                _add(group, index, part)
        elif (
            tensor.dtype is torch.float32
            and numel >= _DIRECT_FROM
            and numel % (_WIDE * _ROWS) == 0
            and tensor.data_ptr() % _ALIGNED == 0
        ):
            group.direct.append((index, 0, numel, tensor.view(-1)))
        elif numel % group.width:
            group.ragged.append((index, 0, numel, tensor.view(-1)))
        else:
            indices, flat = group.even.get(numel) or group.even.setdefault(numel, ([], []))
            indices.append(index)
            flat.append(tensor if tensor.dim() == 1 else tensor.view(-1))
    return list(classes.values())


def _float32(tensor: Tensor) -> list[Tensor]:
    """The tensor in numbers that float32 holds; float64 in two parts."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype is torch.float64:
        high = tensor.float()
        return [high, (tensor - high).float()]
    return [tensor if tensor.dtype in _EXACT else tensor.float()]


def _add(group: _Class, index: int, tensor: Tensor) -> None:
    """A tensor of any size, strides and floating dtype, cut at whole blocks."""
    numel, whole = tensor.numel(), tensor.is_contiguous()
    ready = whole and tensor.dtype is torch.float32 and tensor.data_ptr() % _ALIGNED == 0
    if ready and numel >= _DIRECT_FROM:
        cut = numel // (group.width * _ROWS) * group.width * _ROWS
        group.direct.append((index, 0, cut, tensor.view(-1)[:cut]))
        if cut < numel:
            group.ragged.append((index, cut // group.width, numel - cut, tensor.view(-1)[cut:]))
        return
    for first in range(0, numel, _SCRATCH):
        last = min(first + _SCRATCH, numel)
        views = logical_slice(tensor, first, last)
        flat = views[0].reshape(-1) if len(views) == 1 else torch.cat([view.reshape(-1) for view in views])
        group.ragged.append((index, first // group.width, last - first, flat))


def _block_numbers(group: _Class) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """(tensor, position in it, norm, product) of every block."""
    norms: list[Tensor] = []
    products: list[Tensor] = []
    owners: list[Tensor] = []
    vector = _vector(group.width).to(group.device)
    for blocks, count in _batches(group, owners):
        norms.append(torch.linalg.vector_norm(blocks, dim=1)[:count])
        products.append(torch.mv(blocks, vector)[:count])
    if not norms:
        return None
    norm, product = torch.cat(norms), torch.cat(products).add_(0.0)  # minus zero is zero
    order, first, counts = torch.cat(owners, 1).to(group.device)
    owner = torch.repeat_interleave(order, counts)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts - first, counts)
    return owner, torch.arange(len(norm), device=group.device) - starts, norm, product


def _batches(group: _Class, owners: list[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """(blocks [n, width], how many are no padding); each is valid until the next. n is a multiple of _ROWS.

    To ``owners`` it adds, in the order of the blocks, int64 tensors [3, parts]: tensor, first block, blocks.
    """
    width = group.width
    for index, first, numel, flat in group.direct:
        owners.append(torch.tensor([[index], [first], [numel // width]]))
        yield flat.view(-1, width), numel // width
    if not group.even and not group.ragged:
        return
    scratch = torch.empty(_SCRATCH, device=group.device)
    for numel, (indices, tensors) in group.even.items():
        order = torch.tensor(indices)
        owners.append(torch.stack([order, torch.zeros_like(order), torch.full_like(order, numel // width)]))
        together = _SCRATCH // numel
        for start in range(0, len(tensors), together):
            pieces = tensors[start : start + together]
            filled = len(pieces) * numel
            yield _gathered(pieces, filled, scratch, width), filled // width
    zeros = scratch.new_zeros(width)
    pieces, parts, filled = [], [], 0
    for index, first, numel, flat in group.ragged:
        blocks = -(-numel // width)
        if filled + blocks * width > _SCRATCH:
            yield _gathered(pieces, filled, scratch, width), filled // width
            pieces, filled = [], 0
        pieces.append(flat)
        if padding := blocks * width - numel:
            pieces.append(zeros[:padding])
        parts.append((index, first, blocks))
        filled += blocks * width
    if parts:
        owners.append(torch.tensor(parts).T)
        yield _gathered(pieces, filled, scratch, width), filled // width


def _gathered(pieces: list[Tensor], filled: int, scratch: Tensor, width: int) -> Tensor:
    torch.cat(pieces, out=scratch[:filled])
    padded = -(-filled // (width * _ROWS)) * width * _ROWS
    scratch[filled:padded] = 0
    return scratch[:padded].view(-1, width)


@functools.cache
def _vector(width: int) -> Tensor:
    """The same on every rank and device: no generator of torch. No two elements are alike."""
    angles = torch.arange(1, width + 1, dtype=torch.float64) * 2.399963229728653  # the golden angle
    signs = 1 - 2 * (torch.arange(width) * 0x9E37 // 7 % 2)
    return ((1.5 + angles.cos()) * signs).float()
