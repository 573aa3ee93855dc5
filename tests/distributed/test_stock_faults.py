"""What torch's and Accelerate's clip functions do to expert-parallel layouts today, then the same layouts with us.

Figures are ratios of a reported norm to the true one (tests/support/oracle.py, checked against a single process).
Stock figures were measured with torch 2.13 and accelerate 1.15 and are asserted as measured: a test that fails on a
newer version says that the host has changed, and that its adapter needs another look.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.layouts import Layout, build_layout
from tests.support.oracle import logical_gradients, norm_of, relative_error, replica_spread, true_norm
from tests.support.ranks import run_ranks
from tests.support.tinymoe import Options

STEPS = 10
NO_LIMIT = 1e9


@dataclass(frozen=True)
class Case:
    """One layout and what Accelerate's clip function makes of it.

    Attributes:
        layout: Name of the builder.
        world: Number of ranks.
        ep: Expert-parallel size.
        torch: What torch's clip function does: ``None`` if it gives the same figures as Accelerate's, else a part of
            the message it crashes with.
        ratios: Accelerate's norm over the true one, per rank; ``()`` where all ranks have 1.0.
        clipped: True norm after Accelerate's clip, over the limit asked for.
        drift: Replicas of a weight differ after ten steps with Accelerate's clip.
        mixed: The gradients themselves are not those of one process.
        refused: We cannot put it right after the fact and must say so: a part of our message.
    """

    layout: str
    world: int
    ep: int
    torch: str | None = None
    ratios: tuple[float, ...] = ()
    clipped: float = 1.0
    drift: bool = False
    mixed: bool = False
    refused: str = ""
    options: Options = field(default_factory=Options)
    frozen: tuple[str, ...] = ()

    def __str__(self) -> str:
        extras = ["tied+bias+shared"] if self.options.tied_head else []
        extras += [f"no_{word}" for word in self.frozen]
        return "-".join([self.layout, f"W{self.world}", f"ep{self.ep}", *extras])

    def build(self) -> Layout:
        return build_layout(self.layout, self.ep, self.options, frozen=self.frozen)

    @property
    def steps(self) -> int:
        """Replicas of a weight exist, and can drift, in some layouts only."""
        return STEPS if self.layout.startswith(("ddp", "shared", "hsdp", "tp", "partial")) else 1


MORE = {"options": Options(tied_head=True, expert_bias=True, shared_expert=True)}
NO_ATTN = {**MORE, "frozen": ("attn",)}
NO_W2 = {**MORE, "frozen": ("gate", "w2")}
SHARED = {"options": Options(shared_lora=True)}

MESHES = "must have the same mesh"
MIXED = "got mixed torch.Tensor and DTensor"

# fmt: off
CASES = [
    Case("fsdp_only", 2, 1),
    Case("fsdp_only", 4, 1),
    Case("fsdp_only", 4, 1, **MORE),
    Case("titan", 2, 2, torch=MESHES),
    Case("titan", 4, 2, torch=MESHES),
    Case("titan", 4, 4, torch=MESHES),
    Case("titan", 4, 2, torch=MESHES, **NO_ATTN),
    Case("local", 2, 2, torch=MESHES, ratios=(.9732, .9795), clipped=1.0251),
    Case("local", 4, 2, torch=MESHES, ratios=(.9811, .9765, .9811, .9765), clipped=1.0221),
    Case("local", 4, 4, torch=MESHES, ratios=(.9639, .9745, .9681, .9657), clipped=1.0331),
    Case("local", 4, 2, torch=MESHES, ratios=(.9693, .9675, .9693, .9675), clipped=1.0327, **NO_ATTN),
    Case("ignored", 2, 2, torch=MIXED, ratios=(.9732, .9795), clipped=1.0251),
    Case("ignored", 4, 4, torch=MIXED, ratios=(.9639, .9745, .9681, .9657), clipped=1.0331),
    Case("hsdp_titan", 4, 2, torch=MESHES),
    Case("hsdp_local", 4, 2, torch=MESHES, ratios=(.9811, .9765, .9811, .9765), clipped=1.0218),
    Case("tp_ep", 2, 2, torch=MESHES),
    Case("tp_ep", 4, 4, torch=MESHES),
    Case("partial", 2, 2, torch=MESHES),
    Case("partial", 4, 4, torch=MESHES),
    Case("ddp_local", 2, 2, ratios=(.9732, .9795), clipped=1.0272, drift=True),
    Case("ddp_local", 4, 4, ratios=(.9639, .9745, .9681, .9657), clipped=1.0370, drift=True),
    Case("ddp_local", 4, 4, ratios=(.9405, .9591, .9512, .9496), clipped=1.0615, drift=True, **NO_W2),
    Case("shared_lora", 2, 2, ratios=(.9668, .9673), clipped=1.0343, drift=True, **SHARED),
    Case("shared_lora", 4, 4, ratios=(.9572, .9569, .9539, .9597), clipped=1.0447, drift=True, **SHARED),
    Case("ddp_lora", 2, 2, ratios=(.9445, .9527), clipped=1.0578, drift=True),
    Case("ddp_lora", 4, 4, ratios=(.9346, .9522, .9423, .9390), clipped=1.0684, drift=True),
    Case("ddp_lora_undeclared", 2, 2, ratios=(1.0060,) * 2, clipped=1.1035, mixed=True, refused="lora"),
    Case("ddp_lora_undeclared", 4, 4, ratios=(1.0341,) * 4, clipped=1.2108, mixed=True, refused="lora"),
]
# fmt: on


@dataclass(frozen=True)
class Measured:
    """What one clip function did on one rank.

    Attributes:
        error: The exception, if it raised.
        kind: Class of the returned value.
        ratio: Reported norm over the norm of one process's gradients, with a limit too high to clip.
        coefficient: What the clip to half the true norm multiplied this rank's last dense gradient by.
        clipped: True norm after that clip, over the limit.
        spread: Largest difference between replicas of a weight after the steps.
    """

    error: str = ""
    kind: str = ""
    ratio: float = math.nan
    coefficient: float = math.nan
    clipped: float = math.nan
    spread: float = math.nan


Clip = Callable[[nn.Module, float], Any]


def torch_clip(model: nn.Module, max_norm: float) -> Any:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def torch_clip_loop(model: nn.Module, max_norm: float) -> Any:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)


def accelerate_clip(model: nn.Module, max_norm: float) -> Any:
    """The body of ``Accelerator.clip_grad_norm_`` in 1.15; it uses nothing of the accelerator."""
    from accelerate import Accelerator

    return Accelerator._clip_grad_norm_dtensor_aware(None, list(model.parameters()), max_norm)


def measure(layout: Layout, clip: Clip, reference: float, *, steps: int, summed: bool = False) -> Measured:
    """Norm, clip and some steps of ``layout`` with ``clip``.

    Args:
        layout: Its weights change with the steps.
        clip: Takes the model and the limit.
        reference: Norm of the gradients of step 0 on one process.
        steps: Clipped steps of SGD.
        summed: ``clip`` runs pending sums in place.
    """
    limit = 0.5 * reference
    try:
        layout.backward()
        reported = clip(layout.model, NO_LIMIT)
        layout.backward()
        before = _last_dense(layout).clone()
        clip(layout.model, limit)
        coefficient = (_last_dense(layout).norm() / before.norm()).item()
        clipped = true_norm(layout, summed=summed) / limit
        optimizer = torch.optim.SGD(layout.model.parameters(), lr=0.05)
        for step in range(steps):
            layout.backward(step)
            clip(layout.model, limit)
            optimizer.step()
    except Exception as error:
        return Measured(error=f"{type(error).__name__}: {error}")
    ratio = _number(reported) / reference
    return Measured("", type(reported).__name__, ratio, coefficient, clipped, replica_spread(layout))


def stock(case: Case) -> dict[str, Any]:
    """The stock functions on one layout, and how far the layout's gradients are from one process's."""
    layout = case.build()
    layout.backward()
    truth = layout.reference()
    norm = norm_of(truth)
    return {
        "oracle": relative_error(logical_gradients(layout), truth),
        "foreach": measure(layout, torch_clip, norm, steps=0),
        "loop": measure(layout, torch_clip_loop, norm, steps=0),
        "accelerate": measure(layout, accelerate_clip, norm, steps=case.steps),
    }


def ours(case: Case) -> Measured:
    """The same layout with ep_hooks attached to it."""
    import ep_hooks

    layout = case.build()
    try:
        handle = ep_hooks.attach(layout.model, mesh=list(layout.meshes), config=layout.config)
    except Exception as error:
        return Measured(error=f"{type(error).__name__}: {error}")
    try:
        reference = norm_of(layout.reference())
        return measure(layout, ep_hooks.clip_grad_norm_, reference, steps=case.steps, summed=True)
    finally:
        handle.remove()


def _number(norm: Any) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _last_dense(layout: Layout) -> Tensor:
    """This rank's part of a dense gradient."""
    parameters = layout.parameters()
    name = next(name for name in reversed(parameters) if ".experts." not in name)
    grad = parameters[name].grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _each(fn: Callable[[Case], Any], cases: list[Case]) -> list[Any]:
    return [fn(case) for case in cases]


@functools.cache
def _table(fn: Callable[[Case], Any], world: int) -> dict[Case, list[Any]]:
    """``fn`` on every case of a world size, in one call of the pool: case -> result per rank."""
    cases = [case for case in CASES if case.world == world]
    by_rank = run_ranks(_each, world, fn, cases, timeout=180)
    return {case: [results[i] for results in by_rank] for i, case in enumerate(cases)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stock(case: Case) -> None:
    ranks = _table(stock, case.world)[case]
    oracle = ranks[0]["oracle"]
    assert oracle > 1.0 if case.mixed else oracle < 2e-6

    expected = pytest.approx(case.ratios or (1.0,) * case.world, abs=1e-4)
    for name in ("foreach", "loop"):
        seen = [rank[name] for rank in ranks]
        if case.torch:
            assert all("RuntimeError" in m.error and case.torch in m.error for m in seen), seen
        else:
            assert [m.ratio for m in seen] == expected

    seen = [rank["accelerate"] for rank in ranks]
    assert [m.ratio for m in seen] == expected, seen
    assert seen[0].clipped == pytest.approx(case.clipped, abs=1e-4)
    assert [m.coefficient for m in seen] == pytest.approx([0.5 / m.ratio for m in seen], abs=1e-4)
    assert all((m.spread > 1e-3) is case.drift for m in seen), seen


@pytest.mark.parametrize("case", CASES, ids=str)
def test_with_us(case: Case) -> None:
    for m in _table(ours, case.world)[case]:
        if case.refused:
            assert case.refused in m.error
            continue
        assert not m.error
        assert m.ratio == pytest.approx(1.0, abs=1e-6)
        assert m.clipped <= 1 + 1e-5
        assert m.clipped == pytest.approx(1.0, abs=1e-4)
        assert m.spread == 0.0


# ------------------------------------------------------------------------------ a rank without an expert's gradient


def _missing_gradient() -> tuple[nn.Module, list[Any]]:
    """Twelve dense ones over two ranks, and six expert ones of which rank 1 has none: the true norm is sqrt(18)."""
    expert_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dense_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), expert_mesh, [Shard(0)]))
    model.dense = nn.Parameter(distribute_tensor(torch.ones(4, 3), dense_mesh, [Shard(0)]))
    model.dense.grad = torch.ones_like(model.dense)
    if dist.get_rank() == 0:
        model.experts.weight.grad = torch.ones_like(model.experts.weight)
    return model, [dense_mesh, expert_mesh]


def stock_missing_gradient() -> float:
    return _number(accelerate_clip(_missing_gradient()[0], NO_LIMIT))


def our_missing_gradient() -> tuple[float, float]:
    import ep_hooks

    model, meshes = _missing_gradient()
    handle = ep_hooks.attach(model, mesh=meshes, config={})
    try:
        return float(ep_hooks.clip_grad_norm_(model, NO_LIMIT)), float(ep_hooks.total_norm(model))
    finally:
        handle.remove()


def test_stock_hangs_without_a_gradient() -> None:
    waiting, gone = run_ranks(stock_missing_gradient, 2, timeout=6, expect_hang=True)
    assert waiting.timed_out
    assert "_clip_grad_norm_dtensor_aware" in waiting.error_text
    assert gone.value == pytest.approx(math.sqrt(12), rel=1e-6)


def test_with_us_without_a_gradient() -> None:
    expected = pytest.approx(math.sqrt(18), rel=1e-6)
    assert run_ranks(our_missing_gradient, 2, timeout=20) == [(expected, expected)] * 2
