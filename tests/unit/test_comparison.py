"""The comparison that rides in the norm's all-reduce: it cancels for ranks that said the same, and for no others."""

from __future__ import annotations

import random

import pytest
import torch

from ep_hooks.norm import comparison

DTYPES = [torch.float32, torch.float64]


def _reduced(said: list[str], maximum: list[bool], dtype: torch.dtype, op: str) -> torch.Tensor:
    parts = [comparison(s, m, dtype, rank, len(said)) for rank, (s, m) in enumerate(zip(said, maximum, strict=True))]
    stacked = torch.tensor(parts, dtype=dtype)
    return stacked.amax(0) if op == "max" else stacked.sum(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maximum", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 7, 64, 1000])
def test_it_cancels_for_equal_ranks_only(ranks: int, maximum: bool, dtype: torch.dtype) -> None:
    generator = random.Random(ranks)
    for _ in range(50):
        said = [repr(generator.random())] * ranks
        op = "max" if maximum else "sum"
        assert _reduced(said, [maximum] * ranks, dtype, op).sum() == 0
        for other in (0, ranks - 1, generator.randrange(ranks)):
            changed = list(said)
            changed[other] += "1"
            assert _reduced(changed, [maximum] * ranks, dtype, op).sum() != 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", [("max", "max"), ("max", "sum"), ("sum", "max"), ("sum", "sum")])
@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("odd_takes_maxima", [False, True])
def test_it_does_not_cancel_if_ranks_reduce_in_two_ways(
    odd: int, odd_takes_maxima: bool, ops: tuple[str, str], dtype: torch.dtype
) -> None:
    """One rank has another ``norm_type``; which way each number is then reduced is the backend's accident."""
    for seed in range(50):
        maximum = [(rank == odd) == odd_takes_maxima for rank in range(4)]
        said = [f"{seed} {takes}" for takes in maximum]
        first, second = (_reduced(said, maximum, dtype, op)[i] for i, op in enumerate(ops))
        assert first + second != 0
