"""``attach`` over a run: several optimizers, added parameters, unfinished gradients, observe, cost."""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ep_hooks
from ep_hooks.session import Session
from tests.support.ranks import run_ranks

RULES = [{"match": "expert*", "domain": "expert"}, {"match": "shared*", "domain": "ep_sum"}]


class Tiny(nn.Module):
    """Two dense weights, an expert of this rank, and a factor shared by all experts."""

    def __init__(self, size: int = 4, shared: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.dense = nn.Parameter(torch.randn(size, size, generator=generator))
        self.bias = nn.Parameter(torch.randn(size, generator=generator))
        generator.manual_seed(1 + dist.get_rank())
        self.expert = nn.Parameter(torch.randn(size, size, generator=generator))
        if shared:
            self.shared = nn.Parameter(torch.randn(size, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.dense + self.bias
        if hasattr(self, "shared"):
            hidden = hidden * self.shared
        return (hidden @ self.expert).square().mean()


def _batch(step: int, size: int = 4) -> Tensor:
    return torch.randn(8, size, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _backward(model: nn.Module, step: int) -> None:
    """As DDP would: dense gradients are averaged, those of the expert and of the shared factor stay local."""
    model.zero_grad()
    model(_batch(step)).backward()
    for name, parameter in model.named_parameters():
        if name in ("dense", "bias"):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _truth(model: nn.Module) -> float:
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.double()
        if name == "shared":
            dist.all_reduce(gradient := gradient.clone())
        square = gradient.square().sum()
        if name == "expert":
            dist.all_reduce(square)
        total += square
    return float(total.sqrt())


def _config(**more: Any) -> dict[str, Any]:
    rules = RULES if more.pop("shared", False) else RULES[:1]
    return {"axes": {"ep": dist.get_world_size()}, "domains": rules, **more}


# --------------------------------------------------------------------------------------------------- optimizers


def _two_optimizers() -> list[tuple[float, float]]:
    """Muon-and-AdamW style: two optimizers over one model share one norm."""
    model = Tiny()
    first = torch.optim.SGD([model.dense], lr=1.0)
    second = torch.optim.SGD([model.bias, model.expert], lr=1.0)
    seen = []
    with ep_hooks.attach(model, [first, second], config=_config(clip={"max_norm": 0.1})):
        for step in range(3):
            _backward(model, step)
            true = _truth(model)
            before = [p.detach().clone() for p in model.parameters()]
            for optimizer in (first, second) if step != 1 else (second, first):
                optimizer.step()
            moved = torch.stack(
                [(p - b).double().square().sum() for p, b in zip(model.parameters(), before, strict=True)]
            )
            dist.all_reduce(moved[2])
            seen.append((float(moved.sum().sqrt()), true))
    return seen


@pytest.mark.parametrize("world", [2, 3])
def test_several_optimizers_share_one_norm_and_clip_once(world: int) -> None:
    for seen in run_ranks(_two_optimizers, world):
        for moved, true in seen:
            assert true > 0.2
            assert moved == pytest.approx(0.1, rel=1e-4)


def _accumulated_pending() -> tuple[list[float], list[float], bool]:
    """Pending sums run once a step however often the norm is asked for, and before the step if nobody asks."""
    model = Tiny(shared=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ep_hooks.attach(model, optimizer, config=_config(shared=True))
    norms, truths = [], []
    for step in range(4):
        _backward(model, step)
        truths.append(_truth(model))
        if step % 2:
            norms.append(float(ep_hooks.total_norm(model)))
            norms.append(float(ep_hooks.clip_grad_norm_(model, 1e6)))
            truths.append(truths[-1])
        else:
            norms.append(truths[-1])
        optimizer.step()
    gathered = [torch.empty_like(model.shared) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, model.shared.detach())
    handle.remove()
    return norms, truths, all(torch.equal(gathered[0], other) for other in gathered)


@pytest.mark.parametrize("world", [2, 3])
def test_pending_sums_run_exactly_once_a_step(world: int) -> None:
    for norms, truths, equal in run_ranks(_accumulated_pending, world):
        assert norms == pytest.approx(truths, rel=1e-6)
        assert equal, "the initial broadcast and the sums keep the replicas of the shared factor bit-identical"


# ------------------------------------------------------------------------------------------- a changing parameter set


def _added(where: str) -> list[float]:
    rank, model = dist.get_rank(), Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ratios = []
    with ep_hooks.attach(model, optimizer, config=_config()):
        for step in range(3):
            if step == 1 and (where == "everywhere" or rank == 0):
                model.expert_adapter = nn.Parameter(torch.ones(3) * (rank + 1))
                optimizer.add_param_group({"params": [model.expert_adapter]})
            _backward(model, step)
            total = torch.zeros((), dtype=torch.float64)
            if hasattr(model, "expert_adapter"):
                model.expert_adapter.grad = torch.ones(3) * (rank + 5)
                total = model.expert_adapter.grad.double().square().sum()
            dist.all_reduce(total)
            dense = [model.dense.grad.double().square().sum(), model.bias.grad.double().square().sum()]
            expert = model.expert.grad.double().square().sum()
            dist.all_reduce(expert)
            true = float((sum(dense) + expert + total).sqrt())
            ratios.append(float(ep_hooks.clip_grad_norm_(model, 1e6)) / true)
            optimizer.step()
    return ratios


@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
def test_adapters_added_after_attach_are_counted(where: str) -> None:
    for ratios in run_ranks(_added, 2, where):
        assert ratios == pytest.approx([1, 1, 1], rel=1e-6)


# ------------------------------------------------------------------------------------------------ unfinished gradients


def _unfinished(kind: str) -> list[str]:
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = None
    if kind == "ddp":
        handle = ep_hooks.attach(model)
        wrapped: Any = DistributedDataParallel(model)
    elif kind == "hsdp":
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("rep", "fsdp")))
    else:
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)))
    handle = handle or ep_hooks.attach(wrapped)
    seen = []
    for sync in (False, True):
        if kind == "ddp":
            wrapped.require_backward_grad_sync = sync
        elif kind == "hsdp":
            wrapped.set_requires_all_reduce(sync)
        else:
            wrapped.set_requires_gradient_sync(sync)
        wrapped(torch.ones(2, 4) * (1 + dist.get_rank())).sum().backward()
        try:
            seen.append(f"{float(ep_hooks.clip_grad_norm_(wrapped.parameters(), 1e6)):.3f}")
        except ep_hooks.EPHooksError as error:
            seen.append(f"{type(error).__name__}: {error}")
    handle.remove()
    return seen


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_unfinished_gradients_are_refused(kind: str, world: int) -> None:
    for refused, norm in run_ranks(_unfinished, world, kind):
        assert refused.startswith("UnfinishedGradientError")
        assert float(norm) > 0


# ------------------------------------------------------------------------------------------------------------- observe


def _train(mode: str) -> tuple[list[Tensor], list[str], bool]:
    """Ten steps of a stock loop with torch's clip, observed or not."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("ep_hooks")
    logger.setLevel(logging.INFO)
    logger.addHandler(keep := Keep())
    before = (dict(vars(torch.amp.GradScaler)), dict(vars(DistributedDataParallel)), torch.nn.utils.clip_grad_norm_)
    model = Tiny(shared=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = ep_hooks.attach(model, optimizer, config=_config(shared=True, mode=mode)) if mode else None
    for step in range(10):
        _backward(model, step)
        clip = ep_hooks.clip_grad_norm_ if mode else torch.nn.utils.clip_grad_norm_
        clip(model.parameters(), 0.5)
        optimizer.step()
    if handle is not None:
        handle.remove()
    logger.removeHandler(keep)
    after = (dict(vars(torch.amp.GradScaler)), dict(vars(DistributedDataParallel)), torch.nn.utils.clip_grad_norm_)
    return [p.detach() for p in model.parameters()], messages, before == after


def test_observe_changes_no_bit_and_says_what_would_change() -> None:
    stock = run_ranks(_train, 2, "")
    observed = run_ranks(_train, 2, "observe")
    for (expected, _, _), (seen, messages, restored) in zip(stock, observed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
        assert restored
        assert sum("coefficient would change" in message for message in messages) == 10
    enforced = run_ranks(_train, 2, "enforce")
    assert not torch.equal(enforced[0][0][0], stock[0][0][0]), "the run is one in which enforce matters"


def _switched_off() -> tuple[bool, float]:
    os.environ["EP_HOOKS"] = "0"
    try:
        model = Tiny()
        handle = ep_hooks.attach(model, config=_config())
        _backward(model, 0)
        local = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        return handle.session is None, float(ep_hooks.clip_grad_norm_(model.parameters(), 1e6)) - local
    finally:
        del os.environ["EP_HOOKS"]


def test_the_environment_switches_everything_off() -> None:
    assert run_ranks(_switched_off, 2) == [(True, 0.0)] * 2


# ---------------------------------------------------------------------------------------------------------------- cost


class Ops(TorchDispatchMode):
    """Counts operators and remembers the largest tensor any of them allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.name()] += 1
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel())
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def _cost(shared: bool, accelerator: bool, bucket_mb: float) -> tuple[Counter[str], int]:
    model = Tiny(size=256, shared=shared)
    model.forward = lambda x: (
        (x @ model.dense @ model.expert + model.bias).sum()
        + sum(  # type: ignore[method-assign]  # a cheap loss
            (p * x[0, 0]).sum() for n, p in model.named_parameters() if n.startswith("shared")
        )
    )
    if shared:
        model.shared2 = nn.Parameter(torch.ones(256))
    handle = ep_hooks.attach(model, config=_config(shared=shared, sync={"bucket_mb": bucket_mb}))
    if accelerator:
        # What an accelerator would do: never look at a result on the host. Only the decision is forced.
        type(handle.session).host_decides = property(lambda self: False)  # type: ignore[method-assign, misc]  # undone below
    original = type(handle.session).__dict__["host_decides"]
    try:
        for step in range(2):
            model.zero_grad()
            model.forward(_batch(step, 256)).backward()
            for name in ("dense", "bias"):
                dist.all_reduce(getattr(model, name).grad)
            with Ops() as ops:
                handle.session.measure()
    finally:
        if accelerator:
            type(handle.session).host_decides = HOST_DECIDES  # type: ignore[method-assign]  # as it was
        assert original is not None
        handle.remove()
    return ops.count, ops.largest


HOST_DECIDES = Session.__dict__["host_decides"]


def test_one_collective_for_the_norm_and_one_per_bucket() -> None:
    for count, largest in run_ranks(_cost, 2, False, False, 25.0):
        assert sum(n for op, n in count.items() if op.startswith("c10d::")) == 1, count
        assert largest < 256 * 256, "no temporary of a gradient's size"
    for count, _ in run_ranks(_cost, 2, True, False, 25.0):
        assert sum(n for op, n in count.items() if op.startswith("c10d::")) == 2, count
    for count, _ in run_ranks(_cost, 2, True, False, 0.001):
        assert sum(n for op, n in count.items() if op.startswith("c10d::")) == 3, count


def _told_later() -> list[str]:
    """With an accelerator: a problem of one rank in the second step is raised by all in the third."""
    model = Tiny()
    handle = ep_hooks.attach(model, config=_config())
    session = handle.session
    type(session).host_decides = property(lambda self: False)  # type: ignore[method-assign, misc]  # undone below
    seen = []
    try:
        for step in range(5):
            _backward(model, step)
            if step == 1 and dist.get_rank() == 1:
                session.adapter.unfinished = lambda: "made up by the test"  # type: ignore[method-assign]  # one rank only
            try:
                seen.append(f"{float(session.measure().norm) / _truth(model):.6f}")
            except ep_hooks.EPHooksError as error:
                seen.append(type(error).__name__)
            vars(session.adapter).pop("unfinished", None)
    finally:
        type(session).host_decides = HOST_DECIDES  # type: ignore[method-assign]  # as it was
        handle.remove()
    return seen


def test_with_an_accelerator_an_error_of_one_rank_is_raised_by_all_one_step_later() -> None:
    for seen in run_ranks(_told_later, 2):
        assert seen[0] == seen[3] == seen[4] == "1.000000"
        assert seen[2] == "UnfinishedGradientError"


def test_the_accelerator_path_never_waits_for_the_host() -> None:
    for shared in (False, True):
        for count, _ in run_ranks(_cost, 2, shared, True, 25.0):
            waits = {op for op in count if "_local_scalar_dense" in op or "is_nonzero" in op or "item" in op}
            assert not waits, waits
