"""Gradients as they come: missing, empty, of mixed dtypes and strides; norms of every type; NaN, inf and overflow.

Every expected value is computed in float64 from gradients that the test itself makes; nothing of ep_hooks is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ep_hooks
from tests.support.ranks import run_ranks

NORM_TYPES = (1.0, 2.0, 2.5, 3.0, math.inf)


def _parameter(gradient: Tensor | None, domain: str, shape: tuple[int, ...] | None = None) -> nn.Parameter:
    like = gradient if gradient is not None else torch.zeros(shape or (1,))
    parameter = nn.Parameter(torch.zeros_like(like))
    parameter.grad = gradient
    ep_hooks.declare(parameter, domain)
    return parameter


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _truth(pieces: list[Tensor], norm_type: float) -> float:
    flat = torch.cat([piece.double().reshape(-1) for piece in pieces]) if pieces else torch.zeros(0)
    return float(torch.linalg.vector_norm(flat, norm_type)) if flat.numel() else 0.0


# ------------------------------------------------------------------------------------------------- shapes and dtypes


def _mixed(norm_type: float) -> tuple[float, float, float, float]:
    """Dense replicas with other strides on other ranks, experts of four dtypes, empty and 0-dim tensors."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dense = _random(1, 96, 160).float()
    odd = dense.t().contiguous().t() if rank % 2 else dense.clone()  # equal replicas, different strides
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    experts = [_random(100 + r, 33, 7).to(dtypes[r % 4]) for r in range(world)]
    scalar = _random(7, 1)[0].float()
    strided = _random(9, 40, 10).float()
    view = torch.empty(40, 20)[:, ::2].copy_(strided)
    parameters = [
        _parameter(odd, "dense"),
        _parameter(experts[rank].clone(), "expert"),
        _parameter(torch.zeros(0), "dense"),
        _parameter(torch.zeros(3, 0), "expert"),
        _parameter(scalar.clone(), "dense"),
        _parameter(view, "dense"),
    ]
    mesh = _mesh()
    truth = _truth([dense, *experts, scalar, strided], norm_type)
    got = float(ep_hooks.total_norm(parameters, norm_type, mesh=mesh))
    before = [p.grad for p in parameters]
    clipped = float(ep_hooks.clip_grad_norm_(parameters, truth / 2, norm_type, mesh=mesh))
    assert all(p.grad is b for p, b in zip(parameters, before, strict=True)), "clip must not rebind a gradient"
    after = float(ep_hooks.total_norm(parameters, norm_type, mesh=mesh))
    return got / truth, clipped / truth, after / (truth / 2), truth


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_mixed_dtypes_strides_and_sizes(world: int) -> None:
    for norm_type in NORM_TYPES:
        for got, clipped, after, _ in run_ranks(_mixed, world, norm_type):
            assert got == pytest.approx(1, rel=1e-6), norm_type
            assert clipped == pytest.approx(1, rel=1e-6), norm_type
            assert after <= 1 + 5e-3, norm_type  # bfloat16 rounds what the clip writes


# --------------------------------------------------------------------------------------------------- missing gradients


def _missing() -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh, got = _mesh(), []
    dense = _parameter(torch.tensor([3.0]), "dense")
    expert = _parameter(torch.tensor([4.0]) if rank == 0 else None, "expert", (1,))
    got.append(float(ep_hooks.total_norm([dense, expert], mesh=mesh)))  # experts idle on all ranks but one: 5
    only = [dense, expert] if rank == 0 else [dense]
    got.append(float(ep_hooks.total_norm(only, mesh=mesh)))  # a rank with no expert at all: 5
    if rank == 0:
        dense.grad = None
    got.append(float(ep_hooks.total_norm([dense, expert], mesh=mesh)))  # the value of the replicas that have one: 5
    for parameter in (dense, expert):
        parameter.grad = None
    got.append(float(ep_hooks.total_norm([dense, expert], mesh=mesh)))  # no gradient anywhere: 0
    got.append(float(ep_hooks.clip_grad_norm_([], 1.0, mesh=mesh)))  # no parameters at all: 0
    dense.grad = torch.tensor([3.0])
    got.append(float(ep_hooks.total_norm(dense, mesh=mesh)))  # one tensor: 3
    got.append(float(ep_hooks.total_norm((p for p in [dense, expert]), mesh=mesh)))  # a generator: 3
    expert.grad = torch.tensor([4.0 * (rank + 1)])
    got.append(float(ep_hooks.total_norm([dense, expert], mesh=mesh)))
    expected = [5.0, 5.0, 5.0, 0.0, 0.0, 3.0, 3.0, math.sqrt(9 + sum((4.0 * (r + 1)) ** 2 for r in range(world)))]
    return [g - e for g, e in zip(got, expected, strict=True)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_missing_gradients_neither_hang_nor_count(world: int) -> None:
    for differences in run_ranks(_missing, world):
        assert differences == pytest.approx([0] * len(differences), abs=1e-5)


def _pending_with_gaps() -> tuple[list[float], list[bool]]:
    rank, mesh = dist.get_rank(), _mesh()
    gaps = _parameter(torch.tensor([5.0, 0.0]) if rank == 0 else None, "ep_sum", (2,))
    never = _parameter(None, "ep_sum", (2,))
    norm = float(ep_hooks.total_norm([gaps, never], mesh=mesh))
    again = float(ep_hooks.total_norm([gaps, never], mesh=mesh))
    assert gaps.grad is not None
    return [norm, again, *gaps.grad.tolist()], [never.grad is None]


@pytest.mark.parametrize("world", [2, 3])
def test_a_pending_sum_allocates_where_a_replica_has_a_gradient_and_only_there(world: int) -> None:
    for values, absent in run_ranks(_pending_with_gaps, world):
        assert values == pytest.approx([5.0, 5.0, 5.0, 0.0])
        assert absent == [True]


# -------------------------------------------------------------------------------------------------------- bad arguments


BAD_CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "norm_type 0": (lambda p, m: ep_hooks.total_norm([p], 0.0, mesh=m), "norm_type must be"),
    "norm_type -1": (lambda p, m: ep_hooks.total_norm([p], -1.0, mesh=m), "norm_type must be"),
    "norm_type NaN": (lambda p, m: ep_hooks.total_norm([p], math.nan, mesh=m), "norm_type must be"),
    "max_norm -1": (lambda p, m: ep_hooks.clip_grad_norm_([p], -1.0, mesh=m), "max_norm must be"),
    "max_norm NaN": (lambda p, m: ep_hooks.clip_grad_norm_([p], math.nan, mesh=m), "max_norm must be"),
    "norm_type a word": (lambda p, m: ep_hooks.total_norm([p], "two", mesh=m), "norm_type must be .*'two'"),  # type: ignore[arg-type]  # wrong on purpose
    "max_norm a word": (lambda p, m: ep_hooks.clip_grad_norm_([p], "one", mesh=m), "max_norm must be .*'one'"),  # type: ignore[arg-type]  # wrong on purpose
    "max_norm None": (lambda p, m: ep_hooks.clip_grad_norm_([p], None, mesh=m), "max_norm must be .*None"),  # type: ignore[arg-type]  # wrong on purpose
    "no axis": (lambda p, m: ep_hooks.total_norm([p], mesh=None), "no axis 'ep'"),
    "assume": (lambda p, m: ep_hooks.total_norm([p], mesh=m, assume="dense"), "assume must be"),  # type: ignore[arg-type]  # wrong on purpose
    "undeclared": (lambda p, m: ep_hooks.total_norm([_plain()]), r"parameters\[0\]"),
    "undeclared next to an expert": (lambda p, m: ep_hooks.total_norm([p, _plain()], mesh=m), r"parameters\[1\]"),
}


def _plain() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return parameter


def _bad_calls() -> dict[str, str]:
    parameter, mesh, seen = _parameter(torch.ones(1), "expert"), _mesh(), {}
    for label, (call, _) in BAD_CALLS.items():
        try:
            seen[label] = f"returned {call(parameter, mesh)}"
        except Exception as error:
            seen[label] = str(error)
    return seen


def test_wrong_arguments_raise_on_all_ranks_and_say_what_to_do() -> None:
    for seen in run_ranks(_bad_calls, 2):
        for label, (_, expected) in BAD_CALLS.items():
            assert re.search(expected, seen[label]), (label, seen[label])


def _assumed(kind: str) -> str:
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = {
        "equal": torch.ones(3),
        "zero": torch.zeros(3),
        "drift": torch.ones(3) * (1 + 1e-5 * rank),
        "differ": torch.ones(3) * (1 + rank),
    }[kind]
    try:
        first = float(ep_hooks.total_norm([parameter], assume="replicated"))
        if kind == "zero":  # not yet measured: the first step that is not zero is
            parameter.grad = torch.ones(3) * (1 + rank)
            ep_hooks.total_norm([parameter], assume="replicated")
        return f"{first:.4f}"
    except ep_hooks.EPHooksError as error:
        return str(error)


def test_what_is_assumed_is_measured_at_the_first_step_that_is_not_zero() -> None:
    assert run_ranks(_assumed, 2, "equal") == ["1.7321", "1.7321"]
    assert set(run_ranks(_assumed, 2, "drift")) == {"1.7321"}
    for kind in ("differ", "zero"):
        for text in run_ranks(_assumed, 2, kind):
            assert "assumed to be replicated" in text and "dense[0]" in text


def _local_group() -> float:
    parameter = _plain()
    parameter.grad = torch.tensor([float(dist.get_rank() + 1)])
    return float(ep_hooks.total_norm([parameter], group=None))


def test_group_none_is_this_rank_alone() -> None:
    assert run_ranks(_local_group, 2) == [1.0, 2.0]


# ------------------------------------------------------------------------------------------------ NaN, inf and overflow


def _nonfinite(value: float, holder: int, norm_type: float) -> tuple[float, str, bool]:
    rank, mesh = dist.get_rank(), _mesh()
    dense = _parameter(torch.ones(4), "dense")
    expert = _parameter(torch.full((4,), value if rank == holder else 1.0), "expert")
    norm = float(ep_hooks.total_norm([dense, expert], norm_type, mesh=mesh))
    try:
        ep_hooks.clip_grad_norm_([dense, expert], 1.0, norm_type, error_if_nonfinite=True, mesh=mesh)
        raised = ""
    except ep_hooks.EPHooksError as error:
        raised = str(error)
    untouched = bool((dense.grad == 1).all())  # type: ignore[union-attr]  # set above
    return norm, raised, untouched


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_of_one_rank_are_seen_by_all(value: float, norm_type: float) -> None:
    for holder in (0, 1, 2):
        for norm, raised, untouched in run_ranks(_nonfinite, 3, value, holder, norm_type):
            assert math.isnan(norm) if math.isnan(value) else norm == math.inf
            assert "not finite" in raised
            assert untouched


def _overflow(norm_type: float) -> tuple[float, bool, bool]:
    rank = dist.get_rank()
    model = nn.Module()
    model.dense = nn.Parameter(torch.zeros(2))
    model.expert = nn.Parameter(torch.zeros(2))
    rules = [{"match": "expert", "domain": "expert"}, {"match": "dense", "domain": "dense"}]
    with ep_hooks.attach(model, config={"axes": {"ep": dist.get_world_size()}, "domains": rules}) as handle:
        model.dense.grad = torch.full((2,), 2e25)
        model.expert.grad = torch.full((2,), 1e25 * (rank + 1))
        verdict = handle.clip(1.0, norm_type)
        return float(verdict.norm), verdict.overflow, bool(verdict.nonfinite)


@pytest.mark.parametrize("norm_type", [2.0, 20.0])
def test_finite_gradients_whose_powers_overflow_are_reported_as_that(norm_type: float) -> None:
    expected = 1e25 * (2 * 2**norm_type + 2 * 1 + 2 * 2**norm_type) ** (1 / norm_type)
    for norm, overflow, nonfinite in run_ranks(_overflow, 2, norm_type):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert overflow and not nonfinite


def _extreme(value: complex, dtype: torch.dtype, norm_type: float) -> float:
    parameters = [_parameter(torch.full((3,), value * (dist.get_rank() + 1), dtype=dtype), "expert")]
    return float(ep_hooks.total_norm(parameters, norm_type, mesh=_mesh()))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1e-25, torch.float32),
        (1e-25, torch.bfloat16),
        (3e-25 - 4e-25j, torch.complex64),
        (3e25 - 4e25j, torch.complex64),
    ],
)
def test_very_small_and_complex_gradients(value: complex, dtype: torch.dtype) -> None:
    """Their squares are no float32: too small, too large, and of a real and an imaginary part."""
    for norm_type in (1.0, 2.0, 2.5):
        pieces = [torch.full((3,), value * n, dtype=dtype) for n in (1, 2)]
        expected = float(torch.linalg.vector_norm(torch.cat(pieces).to(torch.complex128), norm_type))
        for norm in run_ranks(_extreme, 2, value, dtype, norm_type):
            assert norm == pytest.approx(expected, rel=1e-6, abs=0.0)


# ------------------------------------------------------------------------------------------------------------- policies


def _policy(action: str) -> tuple[list[float], list[float], str]:
    """One step with a NaN in the last rank's expert, then one healthy step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Module()
    model.dense = nn.Parameter(torch.ones(2))
    model.expert = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    config = {
        "axes": {"ep": world},
        "domains": [{"match": "expert", "domain": "expert"}, {"match": "dense", "domain": "dense"}],
        "clip": {"max_norm": 1e6},
        "nonfinite": {"action": action},
    }
    handle, weights, raised = ep_hooks.attach(model, optimizer, config=config), [], ""
    for step in range(2):
        model.dense.grad = torch.ones(2)
        model.expert.grad = torch.full((2,), math.nan if step == 0 and rank == world - 1 else 1.0)
        try:
            optimizer.step()
        except ep_hooks.EPHooksError as error:
            raised = str(error)
        scheduler.step()
        weights += [float(model.dense[0]), float(model.expert[0])]
    handle.remove()
    return weights[:2], weights[2:], raised


def test_policies_for_nonfinite_gradients_act_alike_on_all_ranks() -> None:
    for first, second, raised in run_ranks(_policy, 2, "skip"):
        assert first == [1.0, 1.0] and second == [0.5, 0.5] and not raised
    for first, second, raised in run_ranks(_policy, 2, "zero"):
        assert first == [1.0, 1.0] and second == [0.5, 0.5] and not raised
    for first, second, raised in run_ranks(_policy, 2, "raise"):
        assert first == [1.0, 1.0] and second == [0.5, 0.5] and "not finite" in raised
    for first, _, raised in run_ranks(_policy, 2, "framework"):
        assert math.isnan(first[0]) and not raised  # as torch: the norm is NaN and so is the coefficient


def _threshold(action: str) -> tuple[float, str]:
    model = nn.Module()
    model.dense = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = {
        "domains": [{"match": "dense", "domain": "dense"}],
        "threshold": {"norm": 2.0, "action": action},
    }
    raised = ""
    with ep_hooks.attach(model, optimizer, config=config):
        model.dense.grad = torch.full((1,), 3.0)
        try:
            optimizer.step()
        except ep_hooks.EPHooksError as error:
            raised = str(error)
    return float(model.dense[0]), raised


def test_policies_for_a_norm_threshold() -> None:
    assert run_ranks(_threshold, 2, "warn") == [(-0.5, "")] * 2
    assert run_ranks(_threshold, 2, "skip") == [(1.0, "")] * 2
    assert run_ranks(_threshold, 2, "zero") == [(1.0, "")] * 2
    for weight, raised in run_ranks(_threshold, 2, "raise"):
        assert weight == 1.0 and "exceeds the threshold 2" in raised
