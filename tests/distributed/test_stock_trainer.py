"""Expert-parallel models in a real ``transformers.Trainer`` run today, then the same runs with our clip.

Stock figures were measured with transformers 5.24, accelerate 1.15 and peft 0.21 and are asserted as measured.
The norm of one process that holds the whole model and sees all ranks' batches is the truth.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.layouts import Layout, build_layout
from tests.support.oracle import logical_gradients, norm_of, relative_error, replica_spread
from tests.support.ranks import run_ranks
from tests.support.tinymoe import VOCAB, reference_gradients

NO_LIMIT = 1e6
LIMIT = 1.0


@dataclass(frozen=True)
class Step:
    """One optimizer step of a run, seen from one rank.

    Attributes:
        ratio: Norm that the trainer reports, over the norm of the gathered gradients.
        clipped: Norm of the gathered gradients after the clip, over ``max_grad_norm``.
        spread: Largest difference between replicas of a weight after the step.
        reference: First step only: the reported norm over one process's.
        error: First step only: largest relative difference of a gradient to one process's.
    """

    ratio: float
    clipped: float
    spread: float = 0.0
    reference: float | None = None
    error: float | None = None


class Tokens(torch.utils.data.Dataset):
    """Random tokens, a function of the index."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        rows = {}
        for key in ("input_ids", "labels"):
            rows[key] = torch.randint(0, VOCAB, (8,), generator=generator)
        return rows


def _arguments(folder: str, *, limit: float, steps: int, rows: int = 4) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=rows,
        max_steps=steps,
        max_grad_norm=limit,
        learning_rate=1e-2,
        optim="sgd",
        lr_scheduler_type="constant",
        seed=0,
        data_seed=0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        average_tokens_across_devices=False,
    )


def _reset_accelerate() -> None:
    """Forget the singletons of the previous trainer in this process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(layout: Layout, *, limit: float, steps: int, with_us: bool) -> list[Step]:
    """Train ``layout`` (not wrapped yet: the trainer puts it into DDP) and watch its clip."""
    from transformers import Trainer, TrainerCallback

    seen: list[Step] = []
    whole = layout.whole()

    class Watch(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            seen[-1] = Step(**{**vars(seen[-1]), "spread": replica_spread(layout)})

    class Watched(Trainer):
        handle: Any = None

        def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *rest: Any, **more: Any) -> Tensor:
            self.batch = (inputs["input_ids"], inputs["labels"])
            return super().training_step(model, inputs, *rest, **more)

        def _clip_grad_norm(self, model: nn.Module) -> Any:
            gradients = logical_gradients(layout)
            reference = {} if seen else reference_gradients(whole, *_everyones(self.batch))
            reported = float(self._ours() if with_us else super()._clip_grad_norm(model))
            step = Step(reported / norm_of(gradients), norm_of(logical_gradients(layout)) / limit)
            if reference:
                error = relative_error(gradients, reference)
                step = Step(step.ratio, step.clipped, 0.0, reported / norm_of(reference), error)
            seen.append(step)
            return torch.tensor(reported)

        def _ours(self) -> Tensor:
            import ep_hooks

            if self.handle is None:
                self.handle = ep_hooks.attach(self.model_wrapped, mesh=list(layout.meshes), config=layout.config)
            return ep_hooks.clip_grad_norm_(self.model_wrapped, limit)

    _reset_accelerate()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = _arguments(folder, limit=limit, steps=steps)
        trainer = Watched(model=layout.model, args=arguments, train_dataset=Tokens(), callbacks=[Watch()])
        try:
            trainer.train()
        finally:
            if trainer.handle is not None:
                trainer.handle.remove()
            _reset_accelerate()
    return seen


def _everyones(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, batch)
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def stock() -> dict[str, list[Step]]:
    """All stock runs of one world."""
    make = functools.partial(build_layout, ep=dist.get_world_size(), wrap=False)
    return {
        "free": train(make("ddp_local"), limit=NO_LIMIT, steps=3, with_us=False),
        "clipped": train(make("ddp_local"), limit=LIMIT, steps=3, with_us=False),
        "lora": train(make("ddp_lora"), limit=NO_LIMIT, steps=1, with_us=False),
        "lora_undeclared": train(make("ddp_lora_undeclared"), limit=NO_LIMIT, steps=1, with_us=False),
        "lora_forgotten": train(make("ddp_lora_forgotten"), limit=NO_LIMIT, steps=1, with_us=False),
    }


def ours() -> dict[str, Any]:
    """The same runs with our clip in place of the trainer's."""
    make = functools.partial(build_layout, ep=dist.get_world_size(), wrap=False)
    results: dict[str, Any] = {
        "free": train(make("ddp_local"), limit=NO_LIMIT, steps=3, with_us=True),
        "clipped": train(make("ddp_local"), limit=LIMIT, steps=10, with_us=True),
        "lora": train(make("ddp_lora"), limit=NO_LIMIT, steps=1, with_us=True),
    }
    for run in ("lora_undeclared", "lora_forgotten"):
        try:
            results[run] = train(make(f"ddp_{run}"), limit=NO_LIMIT, steps=1, with_us=True)
        except Exception as error:
            results[run] = f"{type(error).__name__}: {error}"
    return results


@functools.cache
def _runs(world: int, with_us: bool) -> list[dict[str, Any]]:
    return run_ranks(ours if with_us else stock, world, timeout=180)


def _first(world: int, run: str, field: str) -> list[float]:
    return [getattr(rank[run][0], field) for rank in _runs(world, False)]


@pytest.mark.parametrize(
    ("world", "ratios"), [(2, (0.9873, 0.9760)), (4, (0.9744, 0.9793, 0.9711, 0.9724))], ids=["W2", "W4"]
)
def test_stock_ranks_disagree(world: int, ratios: tuple[float, ...]) -> None:
    assert max(_first(world, "free", "error")) < 2e-6
    assert _first(world, "free", "ratio") == pytest.approx(ratios, abs=1e-4)
    assert all(0.95 < step.ratio < 0.99 for rank in _runs(world, False) for step in rank["free"])
    assert all(step.spread == 0.0 for rank in _runs(world, False) for step in rank["free"])


@pytest.mark.parametrize(
    ("world", "over", "drift"),
    [(2, (1.013, 1.014), (3.2e-5, 5.2e-5, 7.3e-5)), (4, (1.026, 1.033), (1.5e-5, 3.0e-5, 4.5e-5))],
    ids=["W2", "W4"],
)
def test_stock_clip_makes_replicas_drift(
    world: int, over: tuple[float, float], drift: tuple[float, float, float]
) -> None:
    steps = _runs(world, False)[0]["clipped"]
    assert all(over[0] - 1e-3 < step.clipped < over[1] + 1e-3 for step in steps), steps
    assert [step.spread for step in steps] == pytest.approx(drift, rel=0.05)


@pytest.mark.parametrize(
    ("world", "ratios"), [(2, (0.9768, 0.9426)), (4, (0.9273, 0.9597, 0.9299, 0.9264))], ids=["W2", "W4"]
)
def test_stock_expert_lora(world: int, ratios: tuple[float, ...]) -> None:
    assert max(_first(world, "lora", "error")) < 2e-6
    assert _first(world, "lora", "reference") == pytest.approx(ratios, abs=1e-4)


@pytest.mark.parametrize(
    ("world", "run", "ratio"),
    [
        (2, "lora_forgotten", 1.1629),
        (4, "lora_forgotten", 1.4712),
        (2, "lora_undeclared", 1.0410),
        (4, "lora_undeclared", 0.9754),
    ],
)
def test_stock_expert_lora_mixed(world: int, run: str, ratio: float) -> None:
    """All ranks agree, on the norm of gradients that are wrong by several times their size."""
    assert _first(world, run, "reference") == pytest.approx([ratio] * world, abs=1e-4)
    assert min(_first(world, run, "error")) > 2.0


@pytest.mark.parametrize("world", [2, 4], ids=["W2", "W4"])
@pytest.mark.parametrize("run", ["free", "clipped", "lora"])
def test_with_us(world: int, run: str) -> None:
    for rank in _runs(world, True):
        assert rank[run][0].reference == pytest.approx(1.0, abs=1e-6)
        for step in rank[run]:
            assert step.ratio == pytest.approx(1.0, abs=1e-6)
            assert step.spread == 0.0
            if run == "clipped":
                assert step.clipped <= 1 + 1e-5


@pytest.mark.parametrize("world", [2, 4], ids=["W2", "W4"])
@pytest.mark.parametrize("run", ["lora_undeclared", "lora_forgotten"])
def test_with_us_mixed_lora_is_refused(world: int, run: str) -> None:
    """DDP has broadcast and averaged different experts' factors: no norm makes that right."""
    for rank in _runs(world, True):
        assert isinstance(rank[run], str), rank[run]
        assert "lora" in rank[run]


# ------------------------------------------------------------------------------- PEFT on transformers' own EP layout


def _save_model(folder: str) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def stock_peft_on_native_ep(folder: str) -> None:
    """A forward pass of LoRA over expert weights that transformers has made ``DTensor``."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        _save_model(folder)
    dist.barrier()
    layout = DistributedConfig(fsdp_size=2, ep_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=layout)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=targets))
    tokens = torch.randint(3, 64, (2, 12))
    adapted(input_ids=tokens, labels=tokens)


def test_stock_peft_on_native_ep_crashes(tmp_path: Path) -> None:
    """Nothing for us to repair: the adapters are built for all experts, as plain tensors."""
    outcomes = run_ranks(stock_peft_on_native_ep, 2, str(tmp_path), timeout=90, catch=True, fresh=True)
    for outcome in outcomes:
        assert outcome.error_type == "RuntimeError", outcome
        assert "aten.baddbmm" in outcome.error_text
        assert "mixed torch.Tensor and DTensor" in outcome.error_text
