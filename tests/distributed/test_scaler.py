"""``torch.amp.GradScaler`` over ranks that hold different experts: stock first, then with us."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ep_hooks
from tests.support.ranks import run_ranks

RULES = [{"match": "dense", "domain": "dense"}, {"match": "expert", "domain": "expert"}]


def _model() -> nn.Module:
    model = nn.Module()
    model.dense = nn.Parameter(torch.ones(4))
    model.expert = nn.Parameter(torch.ones(4) * (dist.get_rank() + 1))
    return model


def _steps(attached: bool, unscale: bool, clip: bool, several: bool) -> dict[str, list[float]]:
    """Three steps; in the second one the last rank's expert overflows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = _model()
    if several:
        optimizers = [torch.optim.SGD([model.dense], lr=0.1), torch.optim.SGD([model.expert], lr=0.1)]
    else:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    handle = None
    if attached:
        handle = ep_hooks.attach(model, optimizers, config={"axes": {"ep": world}, "domains": RULES})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen: dict[str, list[float]] = {"scale": [], "dense": [], "expert": [], "norm": []}
    for step in range(3):
        model.zero_grad()
        scaler.scale(model.dense.sum() + model.expert.sum()).backward()
        dist.all_reduce(model.dense.grad)
        if step == 1 and rank == world - 1:
            model.expert.grad[0] = float("inf")
        if unscale:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if clip:
            norm = ep_hooks.clip_grad_norm_(model, 1e6)
            seen["norm"].append(float(norm))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        seen["scale"].append(scaler.get_scale())
        seen["dense"].append(float(model.dense[0]))
        seen["expert"].append(float(model.expert[0]))
    if handle is not None:
        handle.remove()
    return seen


def test_stock_scalers_drift_apart() -> None:
    first, last = run_ranks(_steps, 2, False, True, False, False)
    assert first["scale"] == [1024, 1024, 1024]
    assert last["scale"] == [1024, 512, 512]
    assert first["dense"][1] != last["dense"][1], "dense replicas differ: rank 0 has stepped, the last rank has not"


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize(("unscale", "clip"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_skip_together(world: int, unscale: bool, clip: bool, several: bool) -> None:
    ranks = run_ranks(_steps, world, True, unscale, clip, several)
    for rank, seen in enumerate(ranks):
        assert seen["scale"] == [1024, 512, 512]
        assert seen["dense"] == pytest.approx([1 - 0.1 * world, 1 - 0.1 * world, 1 - 0.2 * world])
        assert seen["dense"] == ranks[0]["dense"]
        assert seen["expert"] == pytest.approx([rank + 0.9, rank + 0.9, rank + 0.8])
        if clip:
            expected = (4 * world**2 + 4 * world) ** 0.5
            assert seen["norm"] == pytest.approx([expected, float("inf"), expected])


def _idle_rank() -> tuple[float, float]:
    """The last rank has no gradient at all: stock refuses to step there, so the ranks part."""
    model = _model()
    optimizer = torch.optim.SGD([model.expert], lr=0.1)
    handle = ep_hooks.attach(model, optimizer, config={"axes": {"ep": dist.get_world_size()}, "domains": RULES})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if dist.get_rank() == 0:
        scaler.scale(model.expert.sum()).backward()
        model.expert.grad[0] = float("inf")
    else:
        scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    handle.remove()
    return scaler.get_scale(), float(model.expert[0])


def test_a_rank_without_gradients_skips_with_the_others() -> None:
    assert run_ranks(_idle_rank, 2) == [(512.0, 1.0), (512.0, 2.0)]


def _restored() -> bool:
    before = dict(vars(torch.amp.GradScaler))
    handles = [
        ep_hooks.attach(
            m := _model(), torch.optim.SGD(m.parameters(), lr=0.1), config={"axes": {"ep": 2}, "domains": RULES}
        )
        for _ in range(2)
    ]
    changed = dict(vars(torch.amp.GradScaler)) != before
    for handle in handles:
        handle.remove()
        handle.remove()
    return changed and dict(vars(torch.amp.GradScaler)) == before


def test_the_class_is_restored_with_the_last_handle() -> None:
    assert run_ranks(_restored, 2) == [True, True]
