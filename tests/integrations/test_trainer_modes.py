"""The Trainer's other modes with ``EPHooksCallback``: native expert parallelism, resume, bf16, compile, containers."""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ep_hooks.findings import Kind
from tests.distributed.test_stock_trainer import _arguments, _reset_accelerate
from tests.integrations.test_trainer import CONFIG, _make, _train
from tests.support.ranks import run_ranks


def _tiny_qwen() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


class Rows(torch.utils.data.Dataset):
    """Random tokens, labels are the inputs."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.clone()}


def _gathered(model: Any) -> float:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            total += gradient.double().square().sum()
    return float(total.sqrt())


SCALE = 1024.0


def scaler_on_cpu(accelerator: Any) -> None:
    """What ``Accelerator(mixed_precision="fp16")`` sets on an accelerator; it refuses to on CPU (1.15, line 565)."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"


def _native(folder: str, distributed: dict[str, int], config: Any, scaled: bool = False) -> dict[str, Any]:
    """Native expert parallelism of transformers, whose norm is right, but for scaled gradients on several meshes."""
    from transformers import AutoModelForCausalLM, Trainer
    from transformers.distributed import DistributedConfig

    from ep_hooks.integrations import transformers

    if dist.get_rank() == 0 and not (Path(folder) / "config.json").exists():
        _tiny_qwen().save_pretrained(folder)
    dist.barrier()
    _reset_accelerate()
    seen: dict[str, Any] = {"ratio": [], "clipped": []}
    scale = SCALE if scaled else 1.0

    class Watched(Trainer):
        def _clip_grad_norm(self, model: Any) -> Any:
            true = _gathered(model) / scale
            reported = super()._clip_grad_norm(model)
            number = reported.full_tensor() if isinstance(reported, DTensor) else reported
            seen["ratio"].append(float(number) / true)
            seen["clipped"].append(_gathered(model))
            return reported

    with tempfile.TemporaryDirectory() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = _arguments(out, limit=1.0, steps=3, rows=2)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, distributed_config=DistributedConfig(**distributed)
        )
        callbacks = [transformers.EPHooksCallback(config)] if config is not None else []
        trainer = Watched(model=model, args=arguments, train_dataset=Rows(), callbacks=callbacks)
        if scaled:
            scaler_on_cpu(trainer.accelerator)
        trainer.train()
        seen["left"] = trainer in transformers._left
        seen["ratios"] = [entry.get("ep_hooks/host_ratio") for entry in trainer.state.log_history[:3]]
        for callback in callbacks:
            seen["findings"] = [(finding.kind, finding.step) for finding in callback.handle.findings]
            seen["domains"] = sorted({entry.domain.name for entry in callback.handle.session.entries})
            callback.remove()
    _reset_accelerate()
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_native_expert_parallelism_is_verified_and_left_alone(world: int, tmp_path: Path) -> None:
    distributed = {"fsdp_size": world, "ep_size": 2}
    for replace in ("auto", "always"):
        config = {"clip": {"replace": replace}}
        for seen in run_ranks(_native, world, str(tmp_path / "model"), distributed, config, timeout=200):
            assert seen["ratio"] == pytest.approx([1.0] * 3, abs=1e-6)
            assert seen["left"] is (replace == "auto")
            assert seen["domains"] == ["dense", "expert"]
            assert seen["ratios"] == pytest.approx([1.0] * 3, abs=1e-5)


def test_fp16_on_several_meshes_is_unscaled(tmp_path: Path) -> None:
    """transformers 5.18 to 5.24: ``Trainer._mixed_mesh_grad_norm`` clips the scaled gradients."""
    runs = functools.partial(run_ranks, _native, 2, str(tmp_path / "model"), {"fsdp_size": 2, "ep_size": 2})
    for seen in runs(None, True, timeout=100):
        assert seen["ratio"] == pytest.approx([SCALE] * 3, rel=1e-5), "so that the true norm after the clip is 1 / 1024"
    for seen in runs({"audit": {"level": "warn"}}, True, timeout=100):
        assert seen["findings"] == [], "the host's norm has been replaced"
        assert seen["ratio"] == pytest.approx([1.0] * 3, abs=1e-6)
        assert seen["clipped"] == pytest.approx([1.0] * 3, rel=1e-5)
        assert seen["ratios"] == pytest.approx([SCALE] * 3, rel=1e-5)
        assert not seen["left"]
    for seen in runs({"mode": "observe", "audit": {"level": "warn"}}, True, timeout=100):
        assert seen["findings"] == [(Kind.HOST_NORM, 1)]
        assert seen["ratio"] == pytest.approx([SCALE] * 3, rel=1e-5)
        assert seen["ratios"] == pytest.approx([SCALE] * 3, rel=1e-5)


def test_fp16_on_one_mesh_is_left_alone(tmp_path: Path) -> None:
    for seen in run_ranks(_native, 2, str(tmp_path / "model"), {"fsdp_size": 2}, {}, True, timeout=100):
        assert seen["ratio"] == pytest.approx([1.0] * 3, abs=1e-6)
        assert seen["clipped"] == pytest.approx([1.0] * 3, rel=1e-5)
        assert seen["ratios"] == pytest.approx([1.0] * 3, abs=1e-5)
        assert seen["left"]


def _resumed(folder: str) -> bool:
    keep = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None}
    whole = _train(_make(), CONFIG, steps=4)
    # Every rank saves its own experts, as an expert-parallel code base does; the Trainer saves rank 0's model only.
    first = _make()
    _train(first, CONFIG, steps=2, folder=folder, **keep)
    second = _make()
    _train(second, CONFIG, steps=4, folder=folder, resume=f"{folder}/checkpoint-2",
           prepare=lambda trainer: _own_weights(trainer, first))  # fmt: skip
    resumed = {name: p.detach() for name, p in second.parameters().items()}
    return all(torch.equal(whole["weights"][name], resumed[name]) for name in resumed)


def _own_weights(trainer: Any, source: Any) -> None:
    load = trainer._load_from_checkpoint

    def load_own(checkpoint: str, model: Any = None) -> None:
        load(checkpoint, model)
        mine = dict(source.parameters())
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if name in mine:
                    parameter.copy_(mine[name])

    trainer._load_from_checkpoint = load_own


def test_resuming_continues_bit_for_bit(tmp_path: Path) -> None:
    assert run_ranks(_resumed, 2, str(tmp_path), timeout=120) == [True, True]


def _container() -> str:
    from ep_hooks.integrations.transformers import EPHooksCallback

    model = _tiny_qwen()
    config = {"axes": {"ep": dist.get_world_size()}, "domains": [{"match": "lm_head.weight", "domain": "dense"}]}
    callback = EPHooksCallback(config)
    try:
        callback.on_init_end(None, None, None, model=model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        callback.remove()
    return "attached"


def test_an_undeclared_expert_in_a_known_container_is_refused_by_name() -> None:
    for text in run_ranks(_container, 2):
        assert text.startswith("UndeclaredParameterError")
        assert "model.layers.0.mlp.experts.gate_up_proj" in text
        assert "Qwen3MoeExperts" in text


def _compiled() -> dict[str, Any]:
    return _train(_make(), CONFIG, steps=2, torch_compile=True, torch_compile_backend="eager")


def test_compiled_models_are_served() -> None:
    for seen in run_ranks(_compiled, 2, timeout=200):
        assert not seen["error"]
        assert seen["ratio"] == pytest.approx([1.0, 1.0], abs=1e-6)


def _bf16() -> list[tuple[float, float]]:
    """The demo's model under the Trainer's bf16 autocast."""
    from transformers import Trainer

    from ep_hooks.integrations.demo.expert_parallel import make_expert_local
    from ep_hooks.integrations.demo.text import TextBlocks
    from ep_hooks.integrations.demo.worker import build_model, callback_config, true_norm
    from ep_hooks.integrations.transformers import EPHooksCallback

    _reset_accelerate()
    model = build_model()
    make_expert_local(model)
    seen = []

    class Watched(Trainer):
        def _clip_grad_norm(self, wrapped: Any) -> Any:
            true = true_norm(model)
            reported = super()._clip_grad_norm(wrapped)
            seen.append((float(reported) / true, true_norm(model)))
            return reported

    with tempfile.TemporaryDirectory() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = _arguments(out, limit=1.0, steps=2)
        arguments.bf16 = True
        callback = EPHooksCallback(callback_config(dist.get_world_size()))
        Watched(model=model, args=arguments, train_dataset=TextBlocks(64), callbacks=[callback]).train()
        callback.remove()
    _reset_accelerate()
    return seen


def test_bf16() -> None:
    for seen in run_ranks(_bf16, 2, timeout=120):
        assert [ratio for ratio, _ in seen] == pytest.approx([1.0, 1.0], abs=1e-6)
        assert all(after <= 1 + 5e-3 for _, after in seen)
