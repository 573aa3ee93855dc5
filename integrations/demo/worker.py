"""One rank of the demonstration: the real Trainer twice from the same seed, stock and with the callback.

The true norm is measured here by gathering, in float64, with nothing of ep_hooks.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .expert_parallel import expert_names, make_expert_local
from .text import VOCABULARY, TextBlocks

__all__ = ["FIRST_ERROR", "RUNS", "run_rank"]

RUNS = ("stock", "ep_hooks")
FIRST_ERROR = "first_error.txt"
"""Written by the rank that raises first; what the others raise after it only says that it is gone."""

_LENGTH, _ROWS = 64, 4


def run_rank(rank: int, world: int, steps: int, max_norm: float, folder: str, progress: Any) -> None:
    """Train both runs on this rank and write ``folder/RANK.json``: run -> list of one record a step."""
    try:
        _run_rank(rank, world, steps, max_norm, folder, progress)
    except BaseException:
        # Before this process ends, so before any other rank can notice.
        with contextlib.suppress(FileExistsError), open(Path(folder) / FIRST_ERROR, "x", encoding="utf-8") as file:
            file.write(f"rank {rank} failed first:\n{traceback.format_exc()}")
        raise


def _run_rank(rank: int, world: int, steps: int, max_norm: float, folder: str, progress: Any) -> None:
    log = open(Path(folder) / f"{rank}.log", "w", encoding="utf-8")  # noqa: SIM115 (stays open as stderr)
    os.dup2(log.fileno(), sys.stderr.fileno())
    os.dup2(log.fileno(), sys.stdout.fileno())
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true",
        # Accelerate asks for these; the process group below is there already, so nobody connects.
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", LOCAL_WORLD_SIZE=str(world),
    )  # fmt: skip
    os.environ.pop("EP_HOOKS", None)  # the environment wins over the config, and the demo shows enforce
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    results = {run: _train(run, steps, max_norm, folder, progress) for run in RUNS}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def build_model() -> nn.Module:
    """A small Qwen3-MoE with random weights, the same on every rank before the experts are cut."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=_LENGTH, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model


def callback_config(world: int) -> dict[str, Any]:
    """What the user says: which axis there is, and which parameters are experts."""
    return {"axes": {"ep": world}, "domains": [{"match": "*.mlp.experts.*", "domain": "expert"}], "mode": "enforce"}


def true_norm(model: nn.Module) -> float:
    """Every logical element once, float64: experts of all ranks, and rank 0's copy of the dense gradients."""
    dense = torch.zeros((), dtype=torch.float64)
    experts = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            square = parameter.grad.double().square().sum()
            if ".experts." in name:
                experts += square
            else:
                dense += square
    dist.all_reduce(experts)
    dist.broadcast(dense, 0)
    return float((dense + experts).sqrt())


def drift(model: nn.Module) -> float:
    """Largest difference between the replicas of a dense weight."""
    worst = 0.0
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            high, low = parameter.detach().clone(), parameter.detach().clone()
            dist.all_reduce(high, dist.ReduceOp.MAX)
            dist.all_reduce(low, dist.ReduceOp.MIN)
            worst = max(worst, float((high - low).max()))
    return worst


def _train(run: str, steps: int, max_norm: float, folder: str, progress: Any) -> list[dict[str, float]]:
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    transformers.logging.set_verbosity_error()
    model = build_model()
    make_expert_local(model)
    callbacks: list[Any] = []
    if run == "stock":
        model._ddp_params_and_buffers_to_ignore = expert_names(model)  # type: ignore[assignment]  # read by DDP
    else:
        from ep_hooks.integrations.transformers import EPHooksCallback

        callbacks.append(EPHooksCallback(callback_config(dist.get_world_size())))
    records: list[dict[str, float]] = []

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            records[-1]["drift"] = drift(model)
            if dist.get_rank() == 0:
                progress.put(run)

    class Watched(Trainer):  # type: ignore[misc]  # transformers is not typed
        def _clip_grad_norm(self, wrapped: nn.Module) -> Any:
            true = true_norm(model)
            reported = super()._clip_grad_norm(wrapped)
            records.append({"true": true, "reported": float(reported), "drift": 0.0})
            return reported

    arguments = TrainingArguments(
        output_dir=f"{folder}/out", use_cpu=True, per_device_train_batch_size=_ROWS, max_steps=steps, logging_steps=1,
        report_to=[], save_strategy="no", learning_rate=0.05, optim="sgd", lr_scheduler_type="constant", seed=0,
        data_seed=0, max_grad_norm=max_norm, disable_tqdm=True, average_tokens_across_devices=False,
    )  # fmt: skip
    trainer = Watched(model=model, args=arguments, train_dataset=TextBlocks(_LENGTH), callbacks=[*callbacks, Watch()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    for callback in callbacks:
        callback.remove()
    return records
