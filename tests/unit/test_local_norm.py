"""Local sums of powers: slices in logical order whatever the strides, and the accuracy of every dtype and power."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ep_hooks import local_norm
from ep_hooks.local_norm import accumulate, logical_slice, max_abs, may_underflow, squares_in_float64

FIXED = settings(max_examples=300, derandomize=True, deadline=None, database=None)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
POWERS = (1.0, 2.0, 2.5, math.inf)
RANDOM, CONSTANT = 2e-7, 1.5e-6
"""Relative error of a sum of squares in blocks of float32 lanes: rounding cancels in random values and adds up in equal
ones. Half of it is the error of the norm, which may be 1e-6."""


def _truth(views: list[Tensor], p: float) -> float:
    flat = torch.cat([view.detach().reshape(-1).double() for view in views]).abs()
    return flat.amax().item() if math.isinf(p) else flat.pow(p).sum().item()


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """A tensor with any order of dimensions in memory, gaps, steps and broadcast dimensions."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    stored = [shape[d] * steps[d] for d in order]
    tensor = torch.arange(math.prod(stored), dtype=torch.float32).reshape(stored)
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    for dim, step in enumerate(steps):
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.narrow(0, 0, 1).expand(draw(st.integers(1, 4)), *tensor.shape[1:])
    return tensor


@FIXED
@given(strided(), st.data())
def test_slices_are_taken_in_logical_order(tensor: Tensor, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, tensor.numel()))
    hi = data.draw(st.integers(lo, tensor.numel()))
    views = logical_slice(tensor, lo, hi)
    flat = torch.cat([view.reshape(-1) for view in views]) if views else torch.zeros(0)
    assert torch.equal(flat, tensor.reshape(-1)[lo:hi])
    assert all(view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for view in views)


@FIXED
@given(strided(), st.lists(st.integers(0, 2000), max_size=4))
def test_slices_tile_the_tensor(tensor: Tensor, cuts: list[int]) -> None:
    n = tensor.numel()
    bounds = sorted([0, n, *(cut % (n + 1) for cut in cuts)])
    views = [v for lo, hi in pairwise(bounds) for v in logical_slice(tensor, lo, hi)]
    assert sum(view.numel() for view in views) == n
    found = accumulate(views, 1.0)
    assert found is not None
    assert float(found) == pytest.approx(float(tensor.double().sum()), rel=1e-6)


def test_slices_of_a_scalar_and_of_nothing() -> None:
    scalar = torch.tensor(3.0)
    assert logical_slice(scalar, 0, 1)[0] is scalar
    assert sum(view.numel() for view in logical_slice(scalar, 1, 1)) == 0
    empty = torch.zeros(0, 4)
    assert sum(view.numel() for view in logical_slice(empty, 0, 0)) == 0


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1,), (5, 4095), (4096,), (16_384, 16_385), (65_537, 3), (200_003,)])
def test_sums_equal_float64(dtype: torch.dtype, p: float, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(len(sizes) + sizes[0])
    views = [torch.randn(size, dtype=torch.float64).to(dtype) for size in sizes]
    found = accumulate(views, p)
    assert found is not None and found.dtype == torch.float64 and found.dim() == 0
    assert float(found) == pytest.approx(_truth(views, p), rel=1e-13 if dtype == torch.float64 else RANDOM)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype: torch.dtype, p: float) -> None:
    base = torch.randn(300, 257, generator=torch.Generator().manual_seed(0)).to(dtype)
    for view in (base.t(), base[:, ::2], base[::3], base[:1].expand(9, 257), base.unsqueeze(0).transpose(1, 2)):
        found = accumulate([view], p)
        assert found is not None
        assert float(found) == pytest.approx(_truth([view], p), rel=CONSTANT)


@pytest.mark.parametrize("p", POWERS)
def test_zero_dimensional_and_empty(p: float) -> None:
    assert accumulate([], p) is None
    assert accumulate([torch.zeros(0), torch.zeros(3, 0)], p) is None
    found = accumulate([torch.tensor(-2.0), torch.zeros(0)], p)
    assert found is not None
    assert float(found) == pytest.approx(2.0 if math.isinf(p) else 2.0**p)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 5000, 70_000])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_comes_out(dtype: torch.dtype, p: float, size: int, value: float) -> None:
    tensor = torch.ones(size, dtype=dtype)
    tensor[size - 2] = value
    found = accumulate([torch.ones(7, dtype=dtype), tensor], p)
    assert found is not None
    assert math.isnan(float(found)) if math.isnan(value) else float(found) == math.inf


@pytest.mark.parametrize("p", POWERS)
def test_nan_is_not_hidden_by_inf(p: float) -> None:
    found = accumulate([torch.tensor([math.inf]), torch.tensor([math.nan])], p)
    assert found is not None and math.isnan(float(found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_squares_do_not_overflow_or_saturate(dtype: torch.dtype) -> None:
    for size in (100, 5000, 100_000):  # 60,000 squared is no float16; 256 + 1 is no bfloat16
        found = accumulate([torch.full((size,), 60_000.0, dtype=dtype)], 2.0)
        assert found is not None
        assert float(found) == pytest.approx(size * float(torch.tensor(60_000.0, dtype=dtype)) ** 2, rel=CONSTANT)


def test_float32_squares_that_overflow_are_inf_and_not_a_number_out_of_nowhere() -> None:
    found = accumulate([torch.full((4,), 3e19)], 2.0)
    assert found is not None and float(found) == math.inf


@pytest.mark.parametrize("shape", [(4_000_000,), (1000, 4000), (300, 1024), (40_001,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_are_summed_as_well_as_random_ones(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """One vector_norm over 4 M float32 elements of 0.1 would be off by 7e-4."""
    for value in (0.1, 0.3, 0.7, 1.1, 3.3, 1e-3, 17.3):
        tensor = torch.full(shape, value, dtype=dtype)
        for view in (tensor, tensor.t() if len(shape) > 1 else tensor[::3]):
            found = accumulate([view], 2.0)
            assert found is not None
            assert float(found) == pytest.approx(view.numel() * float(tensor.view(-1)[0]) ** 2, rel=CONSTANT)


def test_many_small_ones_share_the_scratch_buffer() -> None:
    """Flat, contiguous and strided ones of all sizes around the limits, next to each other."""
    torch.manual_seed(3)
    sizes = [1, 511, 512, 513, 32_767, 32_768, 32_769, 65_537, 131_071, 131_072, 131_073, 262_145]
    for dtype in DTYPES:
        views = []
        for size in (*sizes, *reversed(sizes)):
            views += [
                torch.randn(size).to(dtype),
                torch.randn(size, 1, 2).to(dtype)[..., 1],
                torch.randn(1, size).to(dtype),
            ]
        found = accumulate(views, 2.0)
        assert found is not None
        assert float(found) == pytest.approx(_truth(views, 2.0), rel=RANDOM)


@pytest.mark.parametrize("value", [1e-25, 1e-40, 3e-21])
def test_float32_squares_that_underflow_are_noticed(value: float) -> None:
    views = [torch.full((1000,), value), torch.zeros(5)]
    found = accumulate(views, 2.0)
    assert found is not None and may_underflow(found, views, 2.0)
    true = 1000 * float(views[0][0]) ** 2
    assert float(squares_in_float64(views)) == pytest.approx(true, rel=1e-12)
    found = accumulate([torch.full((1000,), 1e-12)], 2.0)
    assert found is not None and not may_underflow(found, views, 2.0)


def test_complex_gradients() -> None:
    tensor = torch.complex(torch.full((4,), 3.0), torch.full((4,), -4.0))
    assert float(accumulate([tensor], 2.0)) == pytest.approx(100.0)  # type: ignore[arg-type]
    assert float(accumulate([tensor], math.inf)) == pytest.approx(5.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [1.0, 2.0, 2.5])
def test_other_powers_of_complex_gradients(p: float) -> None:
    tensor = torch.complex(torch.full((4,), 3.0), torch.full((4,), -4.0))
    for view in (tensor, tensor.conj()):
        assert float(accumulate([view], p)) == pytest.approx(4 * 5.0**p)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_magnitude(dtype: torch.dtype) -> None:
    views = [torch.tensor([1.0, -7.0], dtype=dtype), torch.tensor(5.0, dtype=dtype), -torch.zeros(2, 2, dtype=dtype)]
    assert float(max_abs(views)) == 7.0
    assert math.isnan(float(max_abs([*views, torch.tensor([math.nan], dtype=dtype)])))


class _Watch(TorchDispatchMode):
    """Largest tensor that an operator allocates, and whether something reads a number on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.read = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.read |= func is torch.ops.aten._local_scalar_dense.default
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel())
        return out


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_no_gradient_sized_temporary_and_no_host_read(dtype: torch.dtype, p: float, transposed: bool) -> None:
    tensor = torch.ones(1000, 1000, dtype=dtype)
    tensor = tensor.t() if transposed else tensor
    with _Watch() as watch:
        accumulate(logical_slice(tensor, 3, 999_000), p)
    assert watch.largest <= local_norm._SCRATCH
    assert not watch.read
