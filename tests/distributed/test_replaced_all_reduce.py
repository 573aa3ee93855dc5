"""An all_reduce that somebody has replaced, and that does not reduce what the norm gives it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ep_hooks
from tests.support.ranks import run_ranks

_all_reduce = dist.all_reduce


def _not_float64(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """As on hardware without float64, where a wrapper returns it as it is."""
    return None if tensor.dtype is torch.float64 else _all_reduce(tensor, *args, **kwargs)


def _norm(before: bool) -> float:
    """Replaced before the hooks are set up, or after."""
    layer = nn.Linear(3, 2)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
        ep_hooks.declare(parameter, "dense")
    replaced = mock.patch.object(dist, "all_reduce", _not_float64)
    if before:
        replaced.start()
    try:
        with ep_hooks.attach(layer) as handle:
            if not before:
                replaced.start()
            return float(handle.measure().norm)
    finally:
        replaced.stop()


@pytest.mark.parametrize("world", [2, 3])
def test_found_at_set_up(world: int) -> None:
    for outcome in run_ranks(_norm, world, True, timeout=60, catch=True):
        assert outcome.raised("UnsupportedError")
        assert "test_replaced_all_reduce._not_float64" in outcome.error_text and "gives 1" in outcome.error_text


@pytest.mark.parametrize("world", [2, 3])
def test_replaced_later_stops_the_run_on_all_ranks(world: int) -> None:
    for outcome in run_ranks(_norm, world, False, timeout=60, catch=True):
        assert outcome.raised("AgreementError"), outcome
