"""Fingerprints: equal tensors have equal words whatever their layout, different ones do not collide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ep_hooks.fingerprints import exact, screen

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PAIRS = 10_000


def _swapped(x: Tensor, g: torch.Generator) -> Tensor:
    out = x.clone()
    i, j = torch.randperm(len(x), generator=g)[:2].tolist()
    out[i], out[j] = x[j], x[i]
    return out


def _rows(x: Tensor, g: torch.Generator) -> Tensor:
    rows = x.view(-1, 16)
    order = torch.randperm(len(rows), generator=g)
    return rows[torch.roll(order, 1) if torch.equal(order, torch.arange(len(rows))) else order].reshape(-1)


def _flipped(x: Tensor, g: torch.Generator) -> Tensor:
    out = x.clone()
    out[int(torch.randint(len(x), (), generator=g))] *= -1
    return out


def _constant(x: Tensor, g: torch.Generator) -> Tensor:
    return torch.full_like(x, float(torch.randn((), generator=g)))


CHANGES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "permuted rows": _rows,
    "swapped elements": _swapped,
    "one sign": _flipped,
    "all signs": lambda x, g: -x,
    "scaled": lambda x, g: x * (1 + float(torch.rand((), generator=g))),
    "constants": _constant,
}


@pytest.mark.parametrize("name", CHANGES)
def test_ten_thousand_pairs_do_not_collide(name: str) -> None:
    g = torch.Generator().manual_seed(7)
    first = [torch.randn(256 + 16 * (i % 40), generator=g) for i in range(PAIRS)]
    if name == "constants":
        first = [_constant(x, g) for x in first]
    second = [CHANGES[name](x, g) for x in first]
    assert not any(map(torch.equal, first, second))
    assert not (screen(first).words == screen(second).words).any()


def test_constants_of_every_length_and_value_differ() -> None:
    tensors = [torch.full((n,), v) for n in range(1, 2000) for v in (1.0, -1.0, 0.5)]
    assert len(set(screen(tensors).words.tolist())) == len(tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (127,), (128, 33), (513, 257), (300_001,), (70, 40, 50)])
def test_layout_and_neighbours_do_not_matter(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=g).to(dtype)
    same = [x.clone(), torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(shape)]  # another alignment
    if x.dim() == 2:
        same += [x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0]]
    if x.dim() == 3:
        same.append(x.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    assert len({exact(other) for other in (x, *same)}) == 1
    word = screen([x]).words[0]
    assert all(screen([other]).words[0] == word for other in same)
    between = screen([torch.ones(77), x, torch.randn(40_000), None, *same]).words
    assert (between[[1, *range(4, len(between))]] == word).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_squares(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    tensors = [torch.randn(n, generator=g).to(dtype) for n in (1, 100, 5000, 65_536, 200_003)]
    truth = torch.tensor([float(t.to(torch.complex128).abs().square().sum()) for t in tensors], dtype=torch.float64)
    assert torch.allclose(screen(tensors).squares, truth, rtol=1e-6, atol=0)


def test_zeros_of_either_sign_nothing_and_missing_are_zero() -> None:
    tensors = [torch.zeros(100), -torch.zeros(40_000), torch.zeros(0), None, torch.zeros(5, dtype=torch.bfloat16)]
    assert screen(tensors).words.tolist() == [0] * 5
    assert screen([torch.tensor([1.0, -0.0])]).words[0] == screen([torch.tensor([1.0, 0.0])]).words[0]
    assert [exact(tensor) for tensor in tensors] == [0] * 5
    assert screen([]).words.numel() == 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_the_hash_sees_one_bit(dtype: torch.dtype) -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(4)).to(dtype)
    y = x.clone()
    (torch.view_as_real(y) if dtype.is_complex else y).view(torch.uint8).view(-1)[-8] ^= 1
    assert exact(x) != exact(y) and 0 < exact(x) < 2**63


def test_odd_sizes_of_sixteen_bits() -> None:
    x = torch.randn(33, generator=torch.Generator().manual_seed(3)).bfloat16()
    y = x.clone()
    y[-1] += 1
    assert screen([x]).words[0] != screen([y]).words[0]
