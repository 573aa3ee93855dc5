"""Pending reductions: the sums that must run before anybody reads the gradient, bucketed, in schedule order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ep_hooks.groups import ProcessGroups
from ep_hooks.plan import Bucket, BucketItem

__all__ = ["Reduced", "broadcast_buckets", "reduce_buckets"]

Key = tuple[str, int]
"""(logical id, smallest holder): one piece of one parameter."""


@dataclass
class Reduced:
    """Outcome of one pass over the schedule.

    Attributes:
        values: piece -> its reduced gradient, for every piece of this rank that some rank had a gradient of.
        suspects: (piece, axis, 0-dim bool tensor on the device): inputs of a SUM that were equal on all ranks and
            not zero, which looks as if somebody had reduced them before.
    """

    values: dict[Key, Tensor] = field(default_factory=dict)
    suspects: list[tuple[Key, str, Tensor]] = field(default_factory=list)


def reduce_buckets(
    buckets: Sequence[Bucket],
    gradients: Mapping[Key, Tensor | None],
    changed: Set[Key],
    groups: ProcessGroups,
    device: torch.device,
    *,
    check: bool = True,
) -> Reduced:
    """Run the pending reductions of one step.

    Args:
        buckets: this rank's schedule; one ``all_reduce(SUM)`` each, in this order on every rank.
        gradients: piece -> local gradient before the reductions; a piece that is missing or ``None`` joins with zeros.
        changed: pieces whose gradient has changed since it was last reduced. A bucket in which no rank's has changed
            keeps its values: the second call within a step must not add up again.
        device: where the flat buffers live.
        check: look for inputs that were reduced before.

    Returns:
        Reduced gradients as views of the flat buffers, in the shape of the input where there was one; 16-bit gradients
        come out in float32, in which they were summed. The inputs are not written. Waits for the device only where this
        rank lacks a gradient that it must allocate.
    """
    result = Reduced()
    current: dict[Key, Tensor | None] = dict(gradients)
    for bucket in buckets:
        dtype = getattr(torch, bucket.items[0].dtype)
        if dtype in (torch.bfloat16, torch.float16):
            dtype = torch.float32
        group = groups.get(bucket.ranks)
        # Behind the gradients: how many ranks have one, by piece (a piece without any stays without), and how many
        # ranks have new ones.
        present, fresh = bucket.numel, bucket.numel + len(bucket.items)
        flat = torch.zeros(fresh + 1, dtype=dtype, device=groups.device(bucket.ranks, device))
        pieces = _unpack(bucket, flat)
        if any(_key(item) in changed for item in bucket.items):
            flat[fresh].fill_(1)
        for index, (item, piece) in enumerate(pieces):
            gradient = current.get(_key(item))
            if gradient is not None:
                piece.view(gradient.shape).copy_(gradient)
                flat[present + index].fill_(1)
        before = flat.clone()
        dist.all_reduce(flat, dist.ReduceOp.SUM, group)
        sent = dict(_unpack(bucket, before))
        anew = flat[fresh] > 0
        for index, (item, piece) in enumerate(pieces):
            key = _key(item)
            if key not in current:
                continue
            gradient = current[key]
            if gradient is None:
                if not anew & (flat[present + index] > 0):
                    continue
            else:
                if check and bucket.divisor == 1:
                    was_reduced = _was_reduced(sent[item], piece, len(bucket.ranks))
                    result.suspects.append((key, item.axis, anew & was_reduced))
            if bucket.divisor != 1:
                piece.div_(bucket.divisor)
            if gradient is not None:
                piece = torch.where(anew, piece, sent[item]).view(gradient.shape)
            current[key] = result.values[key] = piece
    return result


def broadcast_buckets(
    buckets: Sequence[Bucket], weights: Mapping[Key, Tensor], groups: ProcessGroups, device: torch.device
) -> None:
    """Make the replicas of parameters with pending reductions equal: each group takes its first rank's weights.

    One ``broadcast`` a bucket, in schedule order. A rank that holds no such parameter joins.
    """
    for bucket in buckets:
        dtype = getattr(torch, bucket.items[0].dtype)
        flat = torch.zeros(bucket.numel, dtype=dtype, device=groups.device(bucket.ranks, device))
        pieces = _unpack(bucket, flat)
        for item, piece in pieces:
            if _key(item) in weights:
                piece.view(weights[_key(item)].shape).copy_(weights[_key(item)])
        dist.broadcast(flat, bucket.ranks[0], groups.get(bucket.ranks))
        for item, piece in pieces:
            if _key(item) in weights:
                weights[_key(item)].copy_(piece.view(weights[_key(item)].shape))


def _key(item: BucketItem) -> Key:
    return item.id, item.piece


def _unpack(bucket: Bucket, flat: Tensor) -> list[tuple[BucketItem, Tensor]]:
    views, start = [], 0
    for item in bucket.items:
        views.append((item, flat[start : start + item.numel]))
        start += item.numel
    return views


def _was_reduced(before: Tensor, after: Tensor, ranks: int) -> Tensor:
    """Whether every rank sent (up to the rounding of the sum) what this rank sent, and that was not zero."""
    tolerance = ranks * torch.finfo(after.dtype).eps * after.abs()
    return ((after - before * ranks).abs() <= tolerance).all() & (before != 0).any()
