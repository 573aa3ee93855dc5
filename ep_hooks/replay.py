"""Made-up gradients for the probe, and what an adapter says of the reduction that it sends them through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_hooks.table import Entry

__all__ = ["Gradients", "Pattern", "Region", "Replayed"]

Gradients = Callable[[Sequence[Entry]], list[Tensor | None]]
"""Reads this rank's reduced gradient of each entry."""


@dataclass(frozen=True, slots=True)
class Region:
    """A block of a tensor: the part of it that a rank fills, or reads.

    Attributes:
        shape: of the block.
        offset: of its first element in the whole tensor, by dimension.
        whole: shape of the whole tensor.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Region:
        """The whole of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def flat_offset(self) -> int | None:
        """Position of the first element where the block is one run of the whole tensor's elements; else ``None``."""
        if not self.shape or self.shape[1:] == self.whole[1:]:
            return self.offset[0] * torch.Size(self.whole[1:]).numel() if self.shape else 0
        return None

    def positions(self) -> Tensor:
        """Position of every element of the block in the whole tensor, flat and in row-major order."""
        n = torch.Size(self.shape).numel()
        if (first := self.flat_offset) is not None:
            return torch.arange(first, first + n)
        positions = torch.zeros((), dtype=torch.int64)
        for size, offset, whole in zip(self.shape, self.offset, self.whole, strict=True):
            positions = positions.unsqueeze(-1) * whole + torch.arange(offset, offset + size)
        return positions.reshape(-1)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Ones, positive and negative in turn, at one rank's positions.

    The position belongs to the rank whose place among ``period`` ranks is ``(position - shift) % period``. Were all
    ones positive, MAX would look like SUM: no two ranks have something at the same position.
    """

    place: int
    period: int
    shift: int
    negated: bool

    def fill(self, region: Region, like: Tensor) -> Tensor:
        """The made-up gradient of ``region``, in the dtype and on the device of ``like``."""
        one, twice = self._sign, 2 * self.period
        residue = self.place + self.shift
        if (first := region.flat_offset) is not None:
            filled = torch.zeros(region.shape, dtype=like.dtype, device=like.device)
            filled.view(-1)[(residue - first) % twice :: twice] = one
            filled.view(-1)[(residue + self.period - first) % twice :: twice] = -one
            return filled
        residues = (region.positions() - residue) % twice
        filled = (one * (residues == 0).to(torch.int8) - one * (residues == self.period).to(torch.int8)).view(
            region.shape
        )
        return filled.to(like.device, like.dtype)

    def owners(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Whose the positions are (places among the ranks), and the sign of the ones there; shapes as given, int64."""
        moved = positions - self.shift
        return moved % self.period, self._sign * (1 - 2 * (moved // self.period % 2))

    @property
    def _sign(self) -> int:
        return -1 if self.negated else 1


@dataclass(frozen=True, slots=True)
class Replayed:
    """What an adapter knows of one parameter whose reduction it has replayed.

    Attributes:
        region: what this rank's reduced gradient holds.
        by: who reduces it, in words; empty: nobody whom the adapter can replay.
        storage: axes along which only the storage is cut (FSDP): their ranks add to one gradient, each keeps a part.
    """

    region: Region
    by: str
    storage: tuple[str, ...] = ()
