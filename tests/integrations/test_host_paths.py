"""Paths of Accelerate and the Trainer that are easily got wrong: scalers, modes that leave the clip to the host,
set-up by the launcher, several trainers in one process."""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.test_stock_trainer import Tokens, _arguments, _reset_accelerate
from tests.integrations.test_trainer import CONFIG, LORA, _make, _train, _weights_equal
from tests.integrations.test_trainer_modes import SCALE, scaler_on_cpu
from tests.support.layouts import Layout, build_layout
from tests.support.oracle import logical_gradients, norm_of, replica_spread
from tests.support.ranks import run_ranks
from tests.support.tinymoe import Options

# ------------------------------------------------------------------------------------------------ gradient scalers


def _scaled(config: Any) -> dict[str, Any]:
    layout = build_layout("ddp_local", ep=dist.get_world_size(), wrap=False)
    return _train(layout, config, steps=3, prepare=lambda trainer: scaler_on_cpu(trainer.accelerator))


def _fp16() -> dict[str, Any]:
    return {
        "stock": _scaled(None),
        "observe": _scaled({**LORA, "mode": "observe"}),
        "never": _scaled({**LORA, "clip": {"replace": "never"}}),
        "enforce": _scaled(LORA),
    }


def test_fp16_is_unscaled_once() -> None:
    """Stock unscales in its clip, and ``GradScaler.unscale_`` refuses to do it twice in a step."""
    for runs in run_ranks(_fp16, 2, timeout=120):
        for name, seen in runs.items():
            assert not seen["error"], (name, seen["error"])
        for name in ("observe", "never", "enforce"):
            first = runs[name]["log"][0]
            # `ratio` is over the norm of the scaled gradients.
            true = first["grad_norm"] / runs[name]["ratio"][0] / SCALE
            assert first["ep_hooks/grad_norm"] == pytest.approx(true, rel=1e-6), name
            assert 0.9 < first["ep_hooks/host_ratio"] < 0.999, name
        assert _weights_equal(runs["stock"]["weights"], runs["observe"]["weights"])
        assert _weights_equal(runs["stock"]["weights"], runs["never"]["weights"])
        assert all(clipped <= 1 + 1e-5 for clipped in runs["enforce"]["clipped"])
        assert set(runs["enforce"]["spread"]) == {0.0}


def _accelerate_fp16(mode: str) -> tuple[float, float]:
    from accelerate import Accelerator

    import ep_hooks
    from ep_hooks.integrations import accelerate

    _reset_accelerate()
    layout = build_layout("ddp_local", ep=dist.get_world_size(), wrap=False)
    optimizer = torch.optim.SGD(layout.model.parameters(), lr=0.05)
    accelerate.install()
    accelerator = Accelerator(cpu=True)
    scaler_on_cpu(accelerator)
    try:
        with ep_hooks.attach(layout.model, optimizer, config={**LORA, "mode": mode}) as handle:
            layout.model, prepared = accelerator.prepare(layout.model, optimizer)
            accelerator.backward(_loss(layout))
            true = norm_of(logical_gradients(layout)) / SCALE
            accelerator.clip_grad_norm_(layout.model.parameters(), 0.5 * true)
            prepared.step()
            assert handle.session is not None and handle.session.last is not None
            return float(handle.session.last.norm) / true, norm_of(logical_gradients(layout)) / true
    finally:
        accelerate.uninstall()
        _reset_accelerate()


def _loss(layout: Layout) -> torch.Tensor:
    from tests.support.tinymoe import batch

    x, y = batch(0, layout.parts, layout.part)
    loss: torch.Tensor = layout.model(input_ids=x, labels=y)["loss"]
    return loss


def test_fp16_in_an_accelerate_loop() -> None:
    for measured, after in run_ranks(_accelerate_fp16, 2, "observe"):
        assert measured == pytest.approx(1.0, abs=1e-6)
        assert after > 0.5 * 1.001, "stock's clip is off"
    for measured, after in run_ranks(_accelerate_fp16, 2, "enforce"):
        assert measured == pytest.approx(1.0, abs=1e-6)
        assert after == pytest.approx(0.5, rel=1e-5)


# ----------------------------------------------------------------------------------------- sums are made only once


def _applied(mode: str, replace: str, trainer: bool) -> tuple[str, float]:
    """How much of a shared factor's clipped gradient the optimizer applies."""
    import ep_hooks

    options = Options(shared_lora=True)
    layout = build_layout("shared_lora", ep=dist.get_world_size(), options=options, wrap=not trainer)
    config = {"axes": {"edp": 1, "ep": -1}, **layout.config, "mode": mode, "clip": {"replace": replace}}
    shared = [p for name, p in layout.parameters().items() if name.endswith("lora_a")]
    before = [p.detach().clone() for p in shared]
    clipped: list[torch.Tensor] = []
    if trainer:
        from transformers import TrainerCallback

        class AfterTheClip(TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                clipped.extend(p.grad.clone() for p in shared if p.grad is not None)

        rate = 1e-2
        error = str(_train(layout, config, steps=1, more=(AfterTheClip(),))["error"])
    else:
        rate, error = 1.0, ""
        optimizer = torch.optim.SGD(layout.model.parameters(), lr=rate)
        config.pop("axes")
        with ep_hooks.attach(layout.model, optimizer, mesh=layout.meshes, config=config):
            layout.backward(0)
            ep_hooks.clip_grad_norm_(layout.model, 0.1)
            clipped.extend(p.grad.clone() for p in shared if p.grad is not None)
            optimizer.step()
    step = torch.cat([(old - p.detach()).flatten() for old, p in zip(before, shared, strict=True)])
    return error, float(step.norm() / torch.cat([g.flatten() for g in clipped]).norm() / rate)


@pytest.mark.parametrize(
    ("mode", "replace", "trainer"),
    [
        ("repair", "auto", True),
        ("repair", "auto", False),
        ("enforce", "auto", True),
        ("enforce", "never", True),
        ("observe", "auto", True),
    ],
)
def test_a_pending_sum_is_made_once_whoever_clips(mode: str, replace: str, trainer: bool) -> None:
    """The host's clip changes gradients that are summed already; the optimizer hook must not sum them again."""
    for error, applied in run_ranks(_applied, 2, mode, replace, trainer):
        assert not error
        assert applied == pytest.approx(1.0, rel=1e-3)


# ----------------------------------------------------------------------- plain experts beside a sharded-at-load model


def _synchronised(mode: str) -> tuple[float, bool, bool]:
    """What the Trainer's synchronisation of plain parameters does to a different expert on every rank."""
    from transformers import Trainer

    from ep_hooks.integrations.transformers import EPHooksCallback

    rank = dist.get_rank()
    model = nn.Module()
    model.dense = nn.Parameter(torch.full((2,), float(rank)))
    model.experts = nn.ParameterList([nn.Parameter(torch.full((2,), float(rank)))])
    rules = [{"match": "experts.*", "domain": "expert"}]
    callback = EPHooksCallback({"axes": {"ep": -1}, "domains": rules, "mode": mode or None})
    if mode:
        callback.on_init_end(None, None, None, model=model)
    stand_in = SimpleNamespace(accelerator=SimpleNamespace(sync_gradients=True))
    Trainer._sync_replicated_trainable_parameters(stand_in, model)  # type: ignore[arg-type]  # reads nothing else
    expert = model.experts[0]
    (expert.sum() * (rank + 1) + model.dense.sum() * (rank + 1)).backward()
    callback.remove()
    assert model.dense.grad is not None
    return (
        float(expert.grad[0]),
        bool((expert == rank).all()),
        bool((model.dense == 0).all() and model.dense.grad[0] == 1.5),
    )


def test_experts_are_neither_broadcast_nor_averaged() -> None:
    """``Trainer._sync_replicated_trainable_parameters`` (transformers 5.18 to 5.24)."""
    stock = run_ranks(_synchronised, 2, "")
    assert [expert for expert, _, _ in stock] == [1.5, 1.5], "averaged over different experts"
    assert [kept for _, kept, _ in stock] == [True, False], "rank 1's expert was overwritten with rank 0's"
    assert run_ranks(_synchronised, 2, "observe") == stock, "observe changes nothing"
    ours = run_ranks(_synchronised, 2, "enforce")
    assert [expert for expert, _, _ in ours] == [1.0, 2.0]
    assert all(kept for _, kept, _ in ours)
    assert all(dense for _, _, dense in stock + ours)


# ------------------------------------------------------------------------------------ which clip is left in place


def _missing_on_one_rank() -> tuple[bool, bool]:
    import ep_hooks
    from ep_hooks.integrations.host_norm import measure_host_norm

    layout = build_layout("fsdp_only")
    with ep_hooks.attach(layout.model, mesh=layout.meshes) as handle:
        layout.backward()
        assert handle.session is not None
        whole = measure_host_norm(layout.model.parameters(), handle.session)
        if dist.get_rank() == 1:
            next(iter(layout.parameters().values())).grad = None
        return whole is not None and whole.may_stay, measure_host_norm(
            layout.model.parameters(), handle.session
        ) is None


def test_stock_is_not_asked_where_it_would_hang() -> None:
    """One rank without a DTensor's gradient leaves stock's collective, and the others wait."""
    assert run_ranks(_missing_on_one_rank, 2) == [(True, True)] * 2


def _sharded_here_only() -> tuple[bool, int]:
    import ep_hooks
    from ep_hooks.integrations.host_norm import measure_host_norm

    layout = build_layout("fsdp_only")
    if dist.get_rank() == 1:
        layout.model.experts = nn.ParameterList([nn.Parameter(torch.ones(3))])
    config = {"axes": {"ep": -1}, "domains": [{"match": "experts.*", "domain": "expert"}]}
    with ep_hooks.attach(layout.model, mesh=layout.meshes, config=config) as handle:
        layout.backward()
        assert handle.session is not None
        stock = measure_host_norm(layout.model.parameters(), handle.session)
        assert stock is not None
        return stock.may_stay, sum(not isinstance(entry.parameter, DTensor) for entry in handle.session.entries)


def test_a_plain_expert_on_one_rank_is_known_to_all() -> None:
    assert run_ranks(_sharded_here_only, 2) == [(False, 0), (False, 1)]


def test_ranks_decide_alike_about_the_host() -> None:
    """Two ranks within the tolerance of each other may lie on both sides of the one around the true norm."""
    from ep_hooks.integrations.host_norm import HostNorm

    def answers(*norms: float) -> set[bool]:
        return {HostNorm(norm, min(norms), max(norms), True).is_right(1.0) for norm in norms}

    assert answers(1 + 0.8e-5, 1 + 1.2e-5) == {False}
    assert answers(1 - 0.8e-5, 1 + 0.8e-5) == {True}
    assert answers(math.nan, math.nan) == {False}
    assert HostNorm(0.0, 0.0, 0.0, True).spread == 1.0
    assert HostNorm(0.0, 0.0, 1.0, True).spread == math.inf


def _decisions() -> list[tuple[bool, bool]]:
    from ep_hooks.integrations import transformers
    from ep_hooks.integrations.host_norm import HostNorm

    class Trainer:
        pass

    trainer: Any = Trainer()
    seen = []
    for norm, true in [(0.0, 0.0), (1.0, 1.0), (math.nan, math.nan), (0.0, 0.0), (1.1, 1.0), (math.inf, math.inf)]:
        seen.append(
            (transformers._stays(trainer, HostNorm(norm, norm, norm, True), true), trainer in transformers._left)
        )
    return seen


def test_zero_and_nan_say_nothing_of_the_host() -> None:
    decisions = run_ranks(_decisions, 1)[0]
    assert decisions == [(stays, stays) for stays in (False, True, True, True, False, False)]


# ------------------------------------------------------------------------------------- what is logged, and when


def _said() -> tuple[list[str], list[dict[str, float]]]:
    """Lines of ``observe``, and logs of a run whose callbacks write entries of their own."""
    from transformers import TrainerCallback

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ep_hooks")
    level = logger.level
    logger.addHandler(handler), logger.setLevel(logging.INFO)

    class Chatty(TrainerCallback):
        trainer: Any = None

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.trainer.log({"between": 1.0})

    chatty = Chatty()
    try:
        layout = build_layout("ddp_local", ep=dist.get_world_size(), wrap=False)
        config = {**LORA, "mode": "observe"}
        seen = _train(layout, config, steps=2, more=(chatty,), prepare=lambda t: setattr(chatty, "trainer", t))
    finally:
        logger.removeHandler(handler), logger.setLevel(level)
    return lines, seen["log"]


def test_observe_says_what_would_change() -> None:
    for lines, log in run_ranks(_said, 2):
        steps = [line for line in lines if "coefficient would change" in line]
        assert len(steps) == 2
        entries = [entry for entry in log if "grad_norm" in entry]
        for line, entry in zip(steps, entries, strict=True):
            assert f"norm {entry['ep_hooks/grad_norm']:.6g}, host says {entry['grad_norm']:.6g}" in line
            assert entry["ep_hooks/host_ratio"] == pytest.approx(
                entry["grad_norm"] / entry["ep_hooks/grad_norm"], rel=1e-6
            )
            assert "between" not in entry
        assert all("ep_hooks/grad_norm" not in entry for entry in log if "grad_norm" not in entry)


# ---------------------------------------------------------------------------------------- several trainers, set-up


def _two_trainers() -> dict[str, list[Any]]:
    """Two trainers that are both alive, trained by turns, and a third one that nobody asked us to serve."""
    from transformers import Trainer

    from ep_hooks.integrations.transformers import EPHooksCallback

    seen: dict[str, list[Any]] = {"first": [], "second": [], "stock": []}

    def make(name: str, folder: str) -> Any:
        layout = _make() if name != "stock" else build_layout("ddp_local", ep=dist.get_world_size(), wrap=False)

        class Watched(Trainer):
            def _clip_grad_norm(self, model: nn.Module) -> Any:
                true = norm_of(logical_gradients(layout))
                reported = super()._clip_grad_norm(model)
                seen[name].append(float(reported) / true)
                return reported

        hooks = [] if name == "stock" else [EPHooksCallback(CONFIG)]
        arguments = _arguments(folder, limit=1.0, steps=1)
        return Watched(model=layout.model, args=arguments, train_dataset=Tokens(), callbacks=hooks), hooks

    _reset_accelerate()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [make(name, folder) for name in seen]
        for trainer, _ in made + made[:2]:
            trainer.train()
    for _, hooks in made:
        for hook in hooks:
            hook.remove()
    _reset_accelerate()
    return seen


def test_two_trainers_in_one_process() -> None:
    for seen in run_ranks(_two_trainers, 2, timeout=120):
        assert seen["first"] == pytest.approx([1.0, 1.0], abs=1e-6)
        assert seen["second"] == pytest.approx([1.0, 1.0], abs=1e-6)
        assert abs(seen["stock"][0] - 1) > 1e-3


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _set_up() -> dict[str, Any]:
    from ep_hooks.integrations.transformers import EPHooksCallback

    seen: dict[str, Any] = {}
    deepspeed = SimpleNamespace(deepspeed_plugin=object())
    first, follower, other = EPHooksCallback(CONFIG), EPHooksCallback(), EPHooksCallback(LORA)
    model = _make().model
    seen["deepspeed"] = _error_of(lambda: first.on_init_end(deepspeed, None, None, model=model))
    first.on_init_end(None, None, None, model=model)
    follower.on_init_end(None, None, None, model=model)
    seen["follows"] = follower.handle is first.handle
    seen["other"] = _error_of(lambda: other.on_init_end(None, None, None, model=model))
    first.remove()
    other.on_init_end(None, None, None, model=model)
    seen["later"] = other.handle is not None and other.handle.config == other.config
    other.remove()
    return seen


def test_what_the_callback_refuses() -> None:
    for seen in run_ranks(_set_up, 2):
        assert seen["deepspeed"].startswith("UnsupportedError") and "DeepSpeed" in seen["deepspeed"]
        assert seen["follows"] and seen["later"]
        assert seen["other"].startswith("ConfigError") and "another configuration" in seen["other"]


def _launched() -> dict[str, Any]:
    """``install(config)`` of both adapters, as the launcher does it, around a script that knows nothing of us."""
    from ep_hooks import api
    from ep_hooks.integrations import accelerate, transformers

    config = {"axes": {"ep": -1}, "domains": [{"match": "*.experts.*", "domain": "expert"}]}
    accelerate.install(config)
    transformers.install(config)
    layout = _make()
    try:
        seen = _train(layout, None, steps=2)
        attached = api.handle_of(layout.model.parameters())
        hooked = attached is not None and attached.hooks is not None and len(attached.hooks.optimizers) == 1
    finally:
        transformers.uninstall()
        accelerate.uninstall()
    left = api.handle_of(layout.model.parameters())
    return {**seen, "hooked": hooked, "left": left is not None}


def test_a_launched_trainer_is_served_and_released() -> None:
    for seen in run_ranks(_launched, 2, fresh=True):
        assert not seen["error"]
        assert seen["ratio"] == pytest.approx([1.0, 1.0], abs=1e-6)
        assert seen["hooked"] and not seen["left"]


def _prepared(how: str) -> dict[str, Any]:
    from accelerate import Accelerator

    from ep_hooks import api
    from ep_hooks.integrations import accelerate

    _reset_accelerate()
    layout = _make()
    model, optimizer = layout.model, torch.optim.SGD(layout.model.parameters(), lr=0.05)
    accelerate.install(CONFIG)
    accelerator = Accelerator(cpu=True)
    try:
        if how == "optimizer first":
            prepared, layout.model = accelerator.prepare(optimizer, model)
        elif how == "one by one":
            layout.model = accelerator.prepare_model(model)
            prepared = accelerator.prepare_optimizer(optimizer)
        else:
            reference = nn.Linear(2, 2).requires_grad_(False)
            layout.model, prepared = accelerator.prepare(model, optimizer)
            # Accelerate leaves it unwrapped on GPUs (1.15, accelerator.py, prepare_model) but not on CPU.
            assert "DistributedDataParallel is not needed" in _error_of(lambda: accelerator.prepare(reference))
            accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
        handle = api.handle_of(model.parameters())
        assert handle is not None and handle.hooks is not None
        layout.backward()
        true = norm_of(logical_gradients(layout))
        ratio = float(accelerator.clip_grad_norm_(layout.model.parameters(), 0.5 * true)) / true
        prepared.step()
        return {"ratio": ratio, "spread": replica_spread(layout), "hooked": handle.hooks.optimizers == (optimizer,)}
    finally:
        accelerate.uninstall()
        _reset_accelerate()


@pytest.mark.parametrize("how", ["optimizer first", "one by one", "with a reference model"])
def test_prepare_attaches_what_trains(how: str) -> None:
    for seen in run_ranks(_prepared, 2, how):
        assert seen == {"ratio": pytest.approx(1.0, abs=1e-6), "spread": 0.0, "hooked": True}


def _clipped_by_accelerate(mode: str, replace: str) -> dict[str, float]:
    """An Accelerate loop with a factor that all experts share, in the modes in which the host clips."""
    from accelerate import Accelerator

    import ep_hooks
    from ep_hooks.integrations import accelerate

    _reset_accelerate()
    layout = build_layout("shared_lora", ep=dist.get_world_size(), options=Options(shared_lora=True), wrap=False)
    optimizer = torch.optim.SGD(layout.model.parameters(), lr=1.0)
    accelerate.install()
    accelerator = Accelerator(cpu=True)
    config = {"axes": {"edp": 1, "ep": -1}, **layout.config, "mode": mode, "clip": {"replace": replace}}
    shared = [p for name, p in layout.parameters().items() if name.endswith("lora_a")]
    before = [p.detach().clone() for p in shared]
    try:
        with ep_hooks.attach(layout.model, optimizer, config=config) as handle:
            layout.model, prepared = accelerator.prepare(layout.model, optimizer)
            layout.backward(0)
            norm = float(accelerator.clip_grad_norm_(layout.model.parameters(), 0.1))
            clipped = torch.cat([p.grad.flatten() for p in shared])
            prepared.step()
            moved = torch.cat([(old - p.detach()).flatten() for old, p in zip(before, shared, strict=True)])
            assert handle.session is not None and handle.session.last is not None
            true = float(handle.session.last.norm)
            return {"norm": norm, "true": true, "applied": float(moved.norm() / clipped.norm())}
    finally:
        accelerate.uninstall()
        _reset_accelerate()


@pytest.mark.parametrize(("mode", "replace"), [("repair", "auto"), ("enforce", "never"), ("enforce", "auto")])
def test_sums_are_made_once_whoever_clips_in_an_accelerate_loop(mode: str, replace: str) -> None:
    ranks = run_ranks(_clipped_by_accelerate, 2, mode, replace)
    for seen in ranks:
        assert seen["applied"] == pytest.approx(1.0, rel=1e-5), (
            "what the host has clipped is what the optimizer applies"
        )
    apart = max(seen["norm"] for seen in ranks) / min(seen["norm"] for seen in ranks) - 1
    if replace == "auto" and mode == "enforce":
        assert apart == 0.0 and ranks[0]["norm"] == pytest.approx(ranks[0]["true"], rel=1e-6)
    else:
        assert apart > 1e-5, "the host's own norm was asked for"


def _fsdp2(mode: str) -> tuple[float, float, bool, int]:
    """Accelerate's own FSDP2 path, which replaces the parameters; experts are ignored by it and EP-local."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from ep_hooks import api
    from ep_hooks.integrations import accelerate

    _reset_accelerate()
    layout = _make()
    experts = [block.experts for block in layout.model.blocks]
    optimizer = torch.optim.SGD(layout.model.parameters(), lr=0.05)
    accelerate.install({**LORA, "mode": mode})
    accelerator = Accelerator(cpu=True)
    # Accelerate 1.15 (state.py, AcceleratorState.__init__) takes no FSDP plugin on CPU; the path itself runs there.
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, ignored_modules=experts, auto_wrap_policy="no_wrap", cpu_offload=False
    )
    try:
        layout.model, prepared = accelerator.prepare(layout.model, optimizer)
        sharded = sum(isinstance(p, DTensor) for p in layout.model.parameters())
        layout.truth = {name: {"ep": along["ep"]} for name, along in layout.truth.items() if "ep" in along}
        layout.backward()
        true = norm_of(logical_gradients(layout))
        norm = accelerator.clip_grad_norm_(layout.model.parameters(), 0.5 * true)
        number = norm.full_tensor() if isinstance(norm, DTensor) else norm
        after = norm_of(logical_gradients(layout))
        prepared.step()
        handle = api.handle_of(layout.model.parameters())
        hooked = handle is not None and handle.hooks is not None and handle.hooks.optimizers == (optimizer,)
        return float(number) / true, after / true, hooked, sharded
    finally:
        accelerate.uninstall()
        _reset_accelerate()


def test_fsdp2_of_accelerate() -> None:
    for ratio, _, hooked, sharded in run_ranks(_fsdp2, 2, "observe"):
        assert sharded and hooked and abs(ratio - 1) > 1e-3, (
            ratio,
            hooked,
            sharded,
            "stock takes the experts as equal on all ranks",
        )
    for ratio, after, hooked, sharded in run_ranks(_fsdp2, 2, "enforce"):
        assert sharded and hooked
        assert ratio == pytest.approx(1.0, abs=1e-6)
        assert after == pytest.approx(0.5, rel=1e-5)
