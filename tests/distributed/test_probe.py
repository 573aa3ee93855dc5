"""The probe: weights of every rank in every reduced gradient, in correct layouts and in wrong ones.

The truth is what the layout's builder knows of its own reduction; nothing of ep_hooks is used for it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ep_hooks
from ep_hooks.findings import Finding, Kind
from tests.support.layouts import Layout, build_layout
from tests.support.ranks import run_ranks
from tests.support.tinymoe import Options

MORE = Options(tied_head=True, expert_bias=True, shared_expert=True)
QUIET: dict[str, Any] = {"probe": {"at_first_step": False}}


def _state(layout: Layout, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that a probe must leave alone, as bits."""
    tensors = [*layout.model.parameters(), *layout.model.buffers()]
    tensors += [value for s in optimizer.state.values() for value in s.values() if isinstance(value, torch.Tensor)]
    tensors += [p.grad for p in layout.model.parameters() if p.grad is not None]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return [*(t.detach().clone() for t in local), torch.get_rng_state()]


def _right(name: str, ep: int, options: Options | None) -> tuple[dict[str, tuple[str, tuple[float | None, ...]]], int]:
    layout = build_layout(name, ep, options)
    layout.model.register_buffer("counter", torch.arange(3.0) + dist.get_rank())
    optimizer = torch.optim.AdamW(layout.model.parameters(), foreach=False)
    with ep_hooks.attach(layout.model, mesh=layout.meshes, config={**layout.config, **QUIET}) as handle:
        untouched = copy.deepcopy([p.grad for p in layout.model.parameters()])
        first = ep_hooks.probe(layout.model)
        assert untouched == [p.grad for p in layout.model.parameters()] == [None] * len(untouched)
        layout.backward(0)
        handle.clip(1.0)
        optimizer.step()
        gradients = [p.grad for p in layout.model.parameters()]
        before = _state(layout, optimizer)
        second = handle.probe()
        assert all(a is b for a, b in zip(gradients, (p.grad for p in layout.model.parameters()), strict=True))
        assert all(map(torch.equal, before, _state(layout, optimizer)))
        assert first == second
        norm = handle.clip(1.0).norm  # of gradients that were reduced and clipped before: nothing is added up again
        assert float(norm) <= 1.0 + 1e-5
        return {row.id: (row.verdict, row.weights) for row in second.rows}, len(second.findings)


LAYOUTS = [
    ("fsdp_only", 2, 1, MORE),
    ("titan", 2, 2, None),
    ("titan", 4, 2, MORE),
    ("titan", 4, 4, None),
    ("local", 4, 2, None),
    ("ignored", 2, 2, None),
    ("ignored", 4, 4, None),
    ("hsdp_titan", 4, 2, None),
    ("hsdp_local", 4, 2, MORE),
    ("tp_ep", 4, 2, None),
    ("ddp_local", 2, 2, MORE),
    ("ddp_local", 4, 4, None),
    ("shared_lora", 2, 2, Options(shared_lora=True)),
    ("ddp_lora", 4, 4, None),
]


@pytest.mark.parametrize(("name", "world", "ep", "options"), LAYOUTS)
def test_correct_layouts_are_found_right(name: str, world: int, ep: int, options: Options | None) -> None:
    ranks = run_ranks(_right, world, name, ep, options, timeout=90)
    for rank, (rows, findings) in enumerate(ranks):
        assert findings == 0 and rows
        for name_of, (verdict, weights) in rows.items():
            assert verdict == "right", (name_of, verdict)
            counted = {other for other, weight in enumerate(weights) if weight}
            if ".experts." in name_of and "lora" not in name_of:
                assert counted == {other for other in range(world) if other % ep == rank % ep}, name_of
            if "attn" not in name_of and ".experts." not in name_of and name != "tp_ep":
                assert weights == (1 / world,) * world, name_of


def _hand_made() -> tuple[str, str, list[float | None]]:
    """Plain parameters that the training loop reduces itself."""
    model = nn.Linear(5, 3, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    ep_hooks.declare(model.weight, "dense")
    with ep_hooks.attach(model, mesh=mesh, config=QUIET) as handle:

        def loop() -> None:
            assert model.weight.grad is not None
            dist.all_reduce(model.weight.grad)
            model.weight.grad /= dist.get_world_size()

        alone, given = handle.probe().rows[0], handle.probe(loop).rows[0]
        return alone.verdict, given.verdict, list(given.weights)


def test_a_loop_that_reduces_by_hand_can_be_given() -> None:
    assert run_ranks(_hand_made, 3) == [("undetermined", "right", pytest.approx([1 / 3] * 3))] * 3


class Moe(nn.Module):
    """Names and shapes that nothing else here uses; a scalar and a vector shorter than the world."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Linear(7, 3)
        self.ffn_local = nn.Linear(3, 5)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A number."""
        return self.ffn_local(self.backbone(x)).sum() * self.temperature


RULES = [{"match": "ffn_local.*", "domain": "expert"}]
AXES = {"axes": {"ep": -1}, "domains": RULES}


def _ddp(plant: str) -> tuple[list[Finding], int]:
    model = Moe()
    if plant != "not ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ["ffn_local.weight", "ffn_local.bias"]
        )
    world, rank = dist.get_world_size(), dist.get_rank()
    options: dict[str, Any] = {}
    if plant == "wrong group":
        groups = [dist.new_group([0]), dist.new_group(list(range(1, world)))]
        options["process_group"] = groups[min(rank, 1)]
    ddp = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True, **options)
    if plant in ("sum", "twice", "divided twice", "rank 1 ignored"):

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            if plant == "rank 1 ignored" and rank == 1:
                buffer.zero_()
            dist.all_reduce(buffer)
            if plant == "twice":
                dist.all_reduce(buffer)
            if plant != "sum":
                buffer /= world
            if plant == "divided twice":
                buffer /= world
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future

        hook.__annotations__.clear()  # DDP compares them with types, and these are strings
        ddp.register_comm_hook(None, hook)
    config = {**AXES, **QUIET, "ranks": list(range(world))}
    with ep_hooks.attach(ddp, config=config, mode="observe") as handle:
        result = handle.probe()
        return list(result.findings), sum(row.verdict == "right" for row in result.rows)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("plant", "kind", "names"),
    [
        ("nothing", None, ()),
        ("not ignored", Kind.WRONG_RANKS, ("ffn_local.bias", "ffn_local.weight")),
        ("wrong group", None, ("backbone.bias", "backbone.weight", "temperature")),
        ("sum", Kind.WRONG_WEIGHT, ("backbone.bias", "backbone.weight", "temperature")),
        ("twice", Kind.WRONG_WEIGHT, ("backbone.bias", "backbone.weight", "temperature")),
        ("divided twice", Kind.WRONG_WEIGHT, ("backbone.bias", "backbone.weight", "temperature")),
        ("rank 1 ignored", None, ("backbone.bias", "backbone.weight", "temperature")),
    ],
)
def test_faults_of_ddp(world: int, plant: str, kind: Kind | None, names: tuple[str, ...]) -> None:
    ranks = run_ranks(_ddp, world, plant, timeout=60)
    for findings, right in ranks:
        assert findings == ranks[0][0], "the same findings on all ranks"
        assert tuple(sorted({finding.id for finding in findings})) == names
        assert kind is None or {finding.kind for finding in findings} == {kind}
        assert all(finding.remedy and finding.consequence for finding in findings)
        assert right == 5 - len(names) or plant == "wrong group"
    if plant == "rank 1 ignored":
        seen = {(f.kind, f.ranks) for f in ranks[0][0]}
        assert all(1 in concerned for _, concerned in seen)
    if plant == "wrong group" and world == 4:
        assert {f.kind for f in ranks[0][0]} == {Kind.NOT_REDUCED, Kind.RANK_IGNORED}


def _fsdp(plant: str) -> list[Finding]:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("efsdp", "ep"))
    whole = mesh._flatten("fsdp")
    model = Moe()
    model.temperature = nn.Parameter(torch.ones(1))  # FSDP2 takes no scalar
    fully_shard(model.ffn_local, mesh=whole if plant == "over ep" else mesh["efsdp"])
    fully_shard(model, mesh=whole)
    for module in (model, model.ffn_local):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    if plant == "wrong divisor":
        model.set_gradient_divide_factor(3.0)
    if plant == "global mean":
        model.ffn_local.set_gradient_divide_factor(float(world))
    if plant == "one layer's divisor":
        model.ffn_local.set_gradient_divide_factor(7.0)
    with ep_hooks.attach(model, mesh=[mesh, whole], config={"domains": RULES, **QUIET}) as handle:
        return list(handle.probe().findings)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("plant", "kind", "names"),
    [
        ("nothing", None, ()),
        ("global mean", None, ()),
        ("over ep", Kind.WRONG_RANKS, ("ffn_local.bias", "ffn_local.weight")),
        ("wrong divisor", Kind.WRONG_WEIGHT, ("backbone.bias", "backbone.weight", "temperature")),
        ("one layer's divisor", Kind.WRONG_WEIGHT, ("ffn_local.bias", "ffn_local.weight")),
    ],
)
def test_faults_of_fsdp2(world: int, plant: str, kind: Kind | None, names: tuple[str, ...]) -> None:
    if plant == "global mean" and world == 2:
        # torch 2.13, _fsdp_collectives.py 629 and 686: one shard, a divide factor and forced sums divide twice.
        kind, names = Kind.WRONG_WEIGHT, ("ffn_local.bias", "ffn_local.weight")
    for findings in run_ranks(_fsdp, world, plant, timeout=60):
        assert tuple(sorted({finding.id for finding in findings})) == names
        assert {finding.kind for finding in findings} == ({kind} if kind else set())


def _refused(how: str) -> str:
    model = Moe()
    if how == "static graph":
        wrapped: nn.Module = DistributedDataParallel(model, static_graph=True)
    else:
        model.backbone.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        wrapped = model
    with ep_hooks.attach(wrapped, config={**AXES, **QUIET}, mode="observe") as handle:
        handle.probe()
    return "not refused"


@pytest.mark.parametrize(
    ("how", "words"), [("static graph", "static_graph=True"), ("hook", "backbone.weight has a hook")]
)
def test_what_cannot_be_replayed_is_refused_by_name(how: str, words: str) -> None:
    for outcome in run_ranks(_refused, 2, how, catch=True):
        assert outcome.raised("UnsupportedError") and words in outcome.error_text


def _hooks_of_the_user() -> tuple[int, int, bool]:
    """Forward hooks and forward itself are the user's business: they see nothing of the probe."""
    model, calls = Moe(), []
    model.register_forward_hook(lambda *a: calls.append("forward"))
    model.ffn_local.register_forward_pre_hook(lambda *a: calls.append("pre"))
    ddp = DistributedDataParallel(model)
    forward = model.forward
    with ep_hooks.attach(ddp, config=QUIET, mode="observe") as handle:
        handle.probe()
        silent = len(calls)
        ddp(torch.ones(2, 7)).backward()
    return silent, len(calls), model.forward == forward and "forward" not in model.__dict__


def test_hooks_of_the_user_are_not_called() -> None:
    assert run_ranks(_hooks_of_the_user, 2) == [(0, 2, True)] * 2


def _at_first_step(level: str) -> tuple[str, list[float]]:
    model = Moe()
    ddp = DistributedDataParallel(model)
    config = {**AXES, "probe": {"level": level, "at_first_step": True}}
    norms = []
    with ep_hooks.attach(ddp, config=config, mode="observe") as handle:
        for step in range(2):
            ddp.zero_grad()
            ddp(torch.full((2, 7), step + 1.0)).backward()
            try:
                norms.append(float(handle.measure().norm))
            except ep_hooks.EPHooksError as error:
                return str(error), norms
    return "", norms


@pytest.mark.parametrize("level", ["off", "warn", "raise"])
def test_at_the_first_step(level: str) -> None:
    for outcome in run_ranks(_at_first_step, 2, level):
        text, norms = outcome
        assert (len(norms), bool(text)) == ((0, True) if level == "raise" else (2, False))
        if text:
            assert "wrong-ranks: ffn_local" in text and "ep_hooks.attach(model)" in text
