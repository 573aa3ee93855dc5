"""The real Trainer with ``EPHooksCallback``: the faults of test_stock_trainer.py are gone, and nothing else changes."""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.test_stock_trainer import Tokens, _arguments, _reset_accelerate
from tests.support.layouts import Layout, build_layout
from tests.support.oracle import logical_gradients, norm_of, replica_spread
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "trainer.yaml"
LORA = {"axes": {"ep": -1}, "domains": [{"match": "*.experts.*", "domain": "expert"}]}


def _train(
    layout: Layout,
    config: Any,
    *,
    steps: int = 10,
    limit: float = 1.0,
    prepare: Any = None,
    evaluate: bool = False,
    callbacks: int = 1,
    more: tuple[Any, ...] = (),
    **arguments: Any,
) -> dict[str, Any]:
    """Train ``layout``; what was reported and true in each step, the log, and the weights at the end."""
    from transformers import Trainer, TrainerCallback

    from ep_hooks.integrations.transformers import EPHooksCallback

    seen: dict[str, Any] = {"ratio": [], "clipped": [], "spread": [], "error": ""}

    class Watch(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            seen["spread"].append(replica_spread(layout))

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_evaluate = evaluate

    class Watched(Trainer):
        def _clip_grad_norm(self, model: nn.Module) -> Any:
            true = norm_of(logical_gradients(layout))
            reported = super()._clip_grad_norm(model)
            seen["ratio"].append(float(reported) / true)
            seen["clipped"].append(norm_of(logical_gradients(layout)) / limit)
            return reported

    _reset_accelerate()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = _arguments(arguments.pop("folder", folder), limit=limit, steps=steps)
        resume = arguments.pop("resume", None)
        for name, value in arguments.items():
            setattr(given, name, value)
        hooks = [EPHooksCallback(config) for _ in range(callbacks)] if config is not None else []
        try:
            trainer = Watched(
                model=layout.model, args=given, train_dataset=Tokens(), eval_dataset=Tokens(),
                callbacks=[*hooks, Watch(), *more],
            )  # fmt: skip
            if prepare is not None:
                prepare(trainer)
            trainer.train(resume_from_checkpoint=resume)
            seen["log"] = trainer.state.log_history
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {error}"
        for hook in hooks:
            hook.remove()
        _reset_accelerate()
    seen["weights"] = {name: p.detach().clone() for name, p in layout.parameters().items()}
    return seen


def _make(name: str = "ddp_local") -> Layout:
    layout = build_layout(name, ep=dist.get_world_size(), wrap=False)
    # The callback sets the ignore list; what the layout's builder has set by hand is taken away.
    if name == "ddp_local":
        layout.model._ddp_params_and_buffers_to_ignore = []
    return layout


# ------------------------------------------------------------------------------------- right and equal


def _right() -> dict[str, Any]:
    return {
        "clipped": _train(_make(), CONFIG),
        "lora": _train(_make("ddp_lora"), LORA, steps=2),
        "accumulated": _train(_make(), CONFIG, steps=3, gradient_accumulation_steps=2),
        "twice": _train(_make(), CONFIG, steps=2, callbacks=2),
        "evaluated": _train(_make(), CONFIG, steps=2, evaluate=True),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_norm_clip_and_replicas_are_right(world: int) -> None:
    for rank in run_ranks(_right, world, timeout=240):
        for name, seen in rank.items():
            assert not seen["error"], (name, seen["error"])
            assert seen["ratio"] == pytest.approx([1.0] * len(seen["ratio"]), abs=1e-6), name
            assert all(clipped <= 1 + 1e-5 for clipped in seen["clipped"]), name
            assert all(spread == 0.0 for spread in seen["spread"]), name
        assert len(rank["clipped"]["spread"]) == 10
        assert len(rank["accumulated"]["ratio"]) == 3


def _metrics(folder: str) -> tuple[list[dict[str, float]], dict[str, int]]:
    logging = {"report_to": ["tensorboard"], "logging_dir": folder}
    os.environ["TENSORBOARD_LOGGING_DIR"] = folder
    try:
        log = _train(_make(), CONFIG, steps=2, **logging)["log"]
        no_limit = _train(_make(), CONFIG, steps=1, max_grad_norm=0)["log"]
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    return log, no_limit


def test_metrics_reach_the_log_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log, no_limit = run_ranks(_metrics, 2, str(tmp_path), timeout=120)[0]
    for entry in [*log[:2], no_limit[0]]:
        assert entry["ep_hooks/grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-6)
        parts = entry["ep_hooks/grad_norm/dense"], entry["ep_hooks/grad_norm/expert"]
        assert (parts[0] ** 2 + parts[1] ** 2) ** 0.5 == pytest.approx(entry["grad_norm"], rel=1e-6)
        assert entry["ep_hooks/host_ratio"] < 0.999, "stock is wrong on this layout"
        assert entry["ep_hooks/rank_spread"] > 1.001
    assert log[0]["ep_hooks/clip_coef"] == pytest.approx(1 / log[0]["grad_norm"], rel=1e-4)
    assert no_limit[0]["ep_hooks/clip_coef"] == 1.0
    files = sorted(tmp_path.rglob("events*"))
    read: dict[str, list[float]] = {}
    for file in files:
        accumulator = EventAccumulator(str(file))
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            read.setdefault(tag.removeprefix("train/"), []).extend(event.value for event in accumulator.Scalars(tag))
    for name in (
        "grad_norm", "ep_hooks/grad_norm", "ep_hooks/grad_norm/dense", "ep_hooks/grad_norm/expert",
        "ep_hooks/clip_coef", "ep_hooks/host_ratio", "ep_hooks/rank_spread",
    ):  # fmt: skip
        assert read[name] == pytest.approx([entry[name] for entry in log[:2]], rel=1e-6), name


# -------------------------------------------------------------------------------- nothing else changes


def _weights_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def _observe() -> tuple[bool, bool, bool]:
    layout = functools.partial(build_layout, "ddp_local", ep=dist.get_world_size(), wrap=False)
    stock = _train(layout(), None)["weights"]
    observed = _train(layout(), {**LORA, "mode": "observe"})["weights"]
    enforced = _train(layout(), LORA)["weights"]
    return _weights_equal(stock, observed), _weights_equal(stock, enforced), bool(stock)


def test_observe_changes_no_bit() -> None:
    assert run_ranks(_observe, 2, timeout=120) == [(True, False, True)] * 2


def _restored() -> tuple[bool, bool]:
    from accelerate.accelerator import Accelerator
    from transformers.trainer import Trainer

    from ep_hooks.integrations import accelerate, transformers

    before = dict(vars(Trainer)), dict(vars(Accelerator))
    for module in (accelerate, transformers):
        module.install()
        module.install({"mode": "observe"})
    changed = (dict(vars(Trainer)), dict(vars(Accelerator))) != before
    for module in (accelerate, transformers):
        module.uninstall()
        module.uninstall()
    return changed, (dict(vars(Trainer)), dict(vars(Accelerator))) == before


def test_uninstall_restores_every_attribute() -> None:
    assert run_ranks(_restored, 1, fresh=True) == [(True, True)]


def _untested() -> str:
    from ep_hooks.integrations import transformers

    before = dict(transformers.TESTED_VERSIONS)
    transformers.TESTED_VERSIONS["transformers"] = ("4.0.0", "4.1.0")
    try:
        layout = build_layout("ddp_local", ep=dist.get_world_size(), wrap=False)
        callback = transformers.EPHooksCallback(LORA)
        callback.on_init_end(None, None, None, model=layout.model)
        mode = str(callback.handle.session.mode)
        callback.remove()
        forced = transformers.EPHooksCallback({**LORA, "allow_untested_host": True})
        forced.on_init_end(None, None, None, model=layout.model)
        mode += " " + str(forced.handle.session.mode)
        forced.remove()
        return mode
    finally:
        transformers.TESTED_VERSIONS.update(before)


def test_an_untested_host_is_only_observed() -> None:
    assert run_ranks(_untested, 2) == ["observe enforce"] * 2


# ------------------------------------------------------------------------------------------ Accelerate


def _accelerate(how: str) -> dict[str, Any]:
    from accelerate import Accelerator

    import ep_hooks
    from ep_hooks.integrations import accelerate

    _reset_accelerate()
    layout = _make()
    optimizer = torch.optim.SGD(layout.model.parameters(), lr=0.05)
    config = ROOT / "configs" / "accelerate.yaml"
    handle = None
    accelerate.install(config if how == "launcher" else None)
    if how == "attach":
        handle = ep_hooks.attach(layout.model, optimizer, config=config)
    accelerator = Accelerator(cpu=True)
    whole = layout.model
    model, prepared = accelerator.prepare(layout.model, optimizer)
    layout.model = model
    seen: dict[str, Any] = {"ratio": [], "spread": []}
    for step in range(10):
        layout.backward(step)
        true = norm_of(logical_gradients(layout))
        seen["ratio"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5 * true)) / true)
        prepared.step()
        seen["spread"].append(replica_spread(layout))
    assert whole is not model, "DDP has wrapped it"
    if handle is not None:
        handle.remove()
    accelerate.uninstall()
    _reset_accelerate()
    return seen


@pytest.mark.parametrize("how", ["stock", "attach", "launcher"])
def test_accelerate_loop(how: str) -> None:
    for seen in run_ranks(_accelerate, 2, how, timeout=120):
        if how == "stock":
            assert any(abs(ratio - 1) > 1e-3 for ratio in seen["ratio"])
        else:
            assert seen["ratio"] == pytest.approx([1.0] * 10, abs=1e-6)
            assert set(seen["spread"]) == {0.0}


def _replaced() -> dict[str, Any]:
    """All parameters are new objects between the Trainer's making and its training, as FSDP2 makes them."""

    def replace(trainer: Any) -> None:
        for module in trainer.model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))

    layout = _make("ddp_lora")
    seen = _train(layout, LORA, steps=2, prepare=replace)
    return {"error": seen["error"], "ratio": seen["ratio"], "spread": seen["spread"]}


def test_parameters_that_wrapping_replaces_are_attached_again() -> None:
    for seen in run_ranks(_replaced, 2, timeout=120):
        assert not seen["error"]
        assert seen["ratio"] == pytest.approx([1.0, 1.0], abs=1e-6)
        assert set(seen["spread"]) == {0.0}
