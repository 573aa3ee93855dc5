"""The global norm: local sums, one packed all-reduce, one verdict that is the same on every rank.

Layout of the packed vector: ``[value per domain, non-finite flag per domain, found_inf, requests, comparison (2)]``.
With SUM it carries sums of powers, with MAX (``norm_type=inf``) maxima. NaN does not survive MAX on gloo, therefore the
flags.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ep_hooks.groups import packed_dtype
from ep_hooks.local_norm import accumulate, logical_slice, max_abs, may_underflow, rows, squares_in_float64
from ep_hooks.plan import Slice

__all__ = ["Packed", "Verdict", "Views", "check_norm_type", "comparison", "local_views", "packed_norm", "rescaled_norm"]

Views = Mapping[tuple[int, torch.device, torch.dtype], list[Tensor]]
"""Tensors to read, by (slot, device, dtype)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The norm of one step, equal on all ranks.

    Attributes:
        norm: 0-dim tensor, the global norm before clipping.
        domains: domain name -> 0-dim tensor, the norm of that domain's gradients.
        nonfinite: 0-dim bool tensor: some rank read NaN or inf (or its scaler had found one).
        overflow: finite gradients whose sum of powers overflowed; the norm was recomputed with scaling.
    """

    norm: Tensor
    domains: Mapping[str, Tensor]
    nonfinite: Tensor
    overflow: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """The packed result after the all-reduce: slices of one small vector on the group's device.

    Attributes:
        requests: 0-dim, above zero if a rank has something to tell, or ranks said different things.
        error: why this rank could not sum; it then counts nothing and has asked to tell the others.
    """

    values: Tensor
    flags: Tensor
    found_inf: Tensor
    requests: Tensor
    error: Exception | None = None

    def verdict(self, domains: Sequence[str], norm_type: float, dtype: torch.dtype, device: torch.device) -> Verdict:
        """Norms from the packed values. Does not wait for the device."""
        values = self.values
        if math.isinf(norm_type):
            values = torch.where(self.flags > 1, torch.nan, values)
            norms = values
            total = values.amax() if len(domains) else values.new_zeros(())
        else:
            norms = values.pow(1.0 / norm_type)
            total = values.sum().pow(1.0 / norm_type)
        nonfinite = (self.flags.sum() + self.found_inf) > 0
        named = {name: norms[i].to(device=device, dtype=dtype) for i, name in enumerate(domains)}
        return Verdict(total.to(device=device, dtype=dtype), named, nonfinite.to(device))


def check_norm_type(norm_type: float) -> float:
    """``norm_type`` as a float.

    Raises:
        ValueError: NaN, or smaller than 1 (the sum of powers is no norm then).
    """
    try:
        value = float(norm_type)
    except (TypeError, ValueError):
        value = math.nan
    if math.isnan(value) or value < 1:
        raise ValueError(f"norm_type must be a number >= 1 or inf, got {norm_type!r}")
    return value


def local_views(slices: Sequence[Slice], gradients: Sequence[Tensor | None]) -> Views:
    """The elements this rank counts, as views; missing gradients are left out."""
    views: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for piece in slices:
        gradient = gradients[piece.index]
        if gradient is None:
            continue
        key = (piece.slot, gradient.device, gradient.dtype)
        if piece.lo == 0 and piece.hi >= gradient.numel():
            views.setdefault(key, []).append(gradient)
        else:
            views.setdefault(key, []).extend(logical_slice(gradient, piece.lo, piece.hi))
    return views


def packed_norm(
    views: Views,
    slots: int,
    norm_type: float,
    group: ProcessGroup | None,
    device: torch.device,
    *,
    found_inf: Tensor | None = None,
    requests: Tensor | int = 0,
    said: str = "",
    host_reads: bool = False,
    counted: Tensor | None = None,
) -> Packed:
    """Local sums and the one collective of the norm.

    Args:
        views: what this rank counts.
        slots: number of domains.
        group: one ``all_reduce`` over it (SUM, or MAX for ``inf``); none for ``None``.
        device: where the packed vector lives; a device of the group's backend.
        found_inf: 0-dim tensor, this rank's gradient scaler has found an overflow.
        requests: number (or 0-dim tensor) of things that this rank must tell the others before going on.
        said: what all ranks must say alike, such as the arguments of the call.
        host_reads: reading a sum does not wait for a device; float32 squares that underflow are then summed again.
        counted: shape [slots], float64, sums of squares of gradients that are not among ``views``.

    Does not wait for the device, unless ``host_reads``.
    """
    dtype = packed_dtype(group, device)
    maximum = math.isinf(norm_type)
    error: Exception | None = None
    with torch.no_grad():
        zero = torch.zeros((), dtype=dtype, device=device)
        try:
            partials = _local_sums(views, slots, norm_type, host_reads)
        except Exception as raised:  # the others are on their way into the all-reduce
            error, partials, requests = raised, [[] for _ in range(slots)], 1
        parts = [[value.to(device=device, dtype=dtype) for value in of_slot] for of_slot in partials]
        values = torch.stack([_combine(p, zero, maximum) for p in parts]) if slots else zero.new_zeros(0)
        if counted is not None:
            values = values + counted.to(device=device, dtype=dtype)
        flags = (~torch.isfinite(values)).to(dtype)
        if maximum:
            flags = flags + torch.isnan(values).to(dtype)
            values = torch.where(torch.isnan(values), 0.0, values)
        inf_flag = zero if found_inf is None else (found_inf > 0).to(device=device, dtype=dtype)
        asked = requests.to(device=device, dtype=dtype) if isinstance(requests, Tensor) else zero + requests
        codes = comparison(said, maximum, dtype, group.rank(), group.size()) if group is not None else ()
        packed = torch.cat([values, flags, torch.stack([inf_flag, asked, *(zero + code for code in codes)])])
        if group is not None:
            dist.all_reduce(packed, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group)
        differ = packed[2 * slots + 2 :].sum().abs()
    return Packed(packed[:slots], packed[slots : 2 * slots], packed[2 * slots], packed[2 * slots + 1] + differ, error)


def _local_sums(views: Views, slots: int, norm_type: float, host_reads: bool) -> list[list[Tensor]]:
    sums: list[list[Tensor]] = [[] for _ in range(slots)]
    for (slot, _, _), tensors in views.items():
        value = accumulate(tensors, norm_type)
        if value is not None:
            if host_reads and may_underflow(value, tensors, norm_type):
                value = squares_in_float64(tensors)
            sums[slot].append(value)
    return sums


def comparison(said: str, maximum: bool, dtype: torch.dtype, rank: int, ranks: int) -> tuple[float, float]:
    """This rank's part of two numbers whose sum is zero, after the reduction, only if all ranks said the same.

    SUM: the first of n ranks gives ``(n - 1) * code``, each other one ``-code``. MAX: each gives ``-code`` and
    ``code``; the maxima are minus the smallest and the largest code. Codes are integers so small that sums are exact.
    """
    codes = 2 ** (52 if dtype == torch.float64 else 23) // ranks
    code = 1 + zlib.crc32(said.encode()) % (codes - 1)
    if maximum:
        code += codes  # so that it cancels with no code of a rank that sums
        return float(-code), float(code)
    return float((ranks - 1) * code if rank == 0 else -code), 0.0


def rescaled_norm(
    views: Views,
    domains: Sequence[str],
    norm_type: float,
    reduce: Callable[[Tensor, dist.ReduceOp.RedOpType], None],
    dtype: torch.dtype,
    device: torch.device,
) -> Verdict:
    """The norm when sums of powers were not finite: tells NaN and inf from squares that overflow.

    Scales by the largest magnitude first: ``m * (sum (|x| / m) ** p) ** (1 / p)`` in float64. Two more collectives;
    only taken when every rank knows that it is needed.
    """
    slots = len(domains)
    peak = torch.zeros(2 * slots, dtype=torch.float64)
    for (slot, _, _), tensors in views.items():
        largest = max_abs([t for t in tensors if t.numel()]).double().cpu() if any(t.numel() for t in tensors) else 0.0
        value = float(largest)
        if not math.isfinite(value):
            peak[slots + slot] = max(float(peak[slots + slot]), 2.0 if math.isnan(value) else 1.0)
        else:
            peak[slot] = max(float(peak[slot]), value)
    reduce(peak, dist.ReduceOp.MAX)
    scale, flags = peak[:slots], peak[slots:]
    sums = torch.zeros(slots, dtype=torch.float64)
    for (slot, _, _), tensors in views.items():
        if not math.isinf(norm_type) and scale[slot] > 0 and flags[slot] == 0:
            for tensor in tensors:
                for row in rows(tensor):
                    scaled = (row.abs() if row.is_complex() else row).double() / float(scale[slot])
                    sums[slot] += scaled.abs().pow(norm_type).sum().cpu()
    if not math.isinf(norm_type):
        reduce(sums, dist.ReduceOp.SUM)
    norms = scale * sums.pow(1.0 / norm_type) if not math.isinf(norm_type) else scale.clone()
    norms[flags == 1] = math.inf
    norms[flags == 2] = math.nan
    if slots == 0:
        total = torch.zeros((), dtype=torch.float64)
    elif math.isinf(norm_type):
        total = torch.where(torch.isnan(norms).any(), torch.nan, norms.amax())
    else:
        largest = norms.amax()
        ratio = norms / largest if 0 < float(largest) < math.inf else norms
        total = largest * ratio.pow(norm_type).sum().pow(1.0 / norm_type) if 0 < float(largest) < math.inf else largest
    named = {name: norms[i].to(device=device, dtype=dtype) for i, name in enumerate(domains)}
    nonfinite = (flags > 0).any().to(device)
    return Verdict(total.to(device=device, dtype=dtype), named, nonfinite, overflow=not bool(nonfinite))


def _combine(parts: Sequence[Tensor], zero: Tensor, maximum: bool) -> Tensor:
    if not parts:
        return zero
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack(list(parts))
    return stacked.amax() if maximum else stacked.sum()
