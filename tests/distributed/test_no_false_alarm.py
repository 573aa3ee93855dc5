"""A hundred correct set-ups, drawn at random, in which naive detectors cry wolf: nothing above info is found."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ep_hooks
from ep_hooks.findings import Severity
from tests.support.layouts import Layout, build_layout
from tests.support.ranks import run_ranks
from tests.support.tinymoe import EXPERTS, Options, batch

SEEDS = 50
"""For each of two world sizes."""
ON: dict[str, Any] = {"audit": {"level": "warn", "every": 1}, "probe": {"at_first_step": True}}
LAYOUTS = {
    2: [("fsdp_only", 1), ("titan", 2), ("ignored", 2), ("ddp_local", 2), ("shared_lora", 2), ("ddp_lora", 2),
        ("partial", 2)],
    4: [("titan", 2), ("titan", 4), ("local", 2), ("ignored", 4), ("hsdp_titan", 2), ("hsdp_local", 2), ("tp_ep", 2),
        ("ddp_local", 4), ("shared_lora", 4), ("ddp_lora", 4)],
}  # fmt: skip


FLAGS = ("same batches", "experts alike", "idle experts", "minus zeros", "accumulation", "noise on tp", "bf16")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class SetUp:
    """One set-up: a layout, and circumstances that are no fault."""

    def __init__(self, seed: int, world: int) -> None:
        rng = random.Random(1000 * world + seed)
        self.name, self.ep = rng.choice(LAYOUTS[world])
        free = self.name not in ("shared_lora", "ddp_lora")
        self.options = Options(
            tied_head=free and rng.random() < 0.5,
            expert_bias=free and rng.random() < 0.5,
            shared_expert=free and rng.random() < 0.5,
            shared_lora=self.name == "shared_lora",
        )
        self.flags = {
            flag for flag in FLAGS
            if rng.random() < 0.4
        }  # fmt: skip
        if "bf16" in self.flags:
            self.options = replace(self.options, dtype=torch.bfloat16)
        self.optimizer = rng.choice(("sgd", "adamw"))
        self.limit = rng.choice((0.01, 1e9))

    def __str__(self) -> str:
        return f"{self.name} ep{self.ep} {self.options} {sorted(self.flags)} {self.optimizer} {self.limit}"

    def build(self) -> Layout:
        """The layout; experts alike if they shall be."""
        layout = build_layout(self.name, self.ep, self.options)
        if "same batches" in self.flags:
            layout.part = 0
        if "experts alike" in self.flags:
            for name, p in layout.parameters().items():
                if ".experts." in name and "lora" not in name:
                    local = _local(p.detach())
                    local.copy_(torch.linspace(-0.1, 0.1, max(local.numel(), 1))[: local.numel()].view(local.shape))
        return layout

    def config(self, layout: Layout) -> dict[str, Any]:
        """With equal batches the inputs of pending sums are equal, which the session refuses unless it is told."""
        return {**layout.config, **ON, "sync": {"already_reduced": "off" if "same batches" in self.flags else "raise"}}

    def backward(self, layout: Layout, step: int) -> None:
        """Gradients, and what rightly happens to them."""
        layout.backward(step)
        if "accumulation" in self.flags:
            x, y = batch(step + 7, layout.parts, layout.part)
            loss = layout.forward(x, y) if layout.forward else layout.model(input_ids=x, labels=y)["loss"]
            loss.backward()
        rank = dist.get_rank()
        for name, p in layout.parameters().items():
            if p.grad is None:
                continue
            gradient = _local(p.grad)
            if "idle experts" in self.flags and ".experts." in name and "lora_a" not in name and layout.name.endswith(
                f"ep{dist.get_world_size()}"
            ) and rank == dist.get_world_size() - 1:  # fmt: skip
                gradient.zero_()
            if "minus zeros" in self.flags and rank % 2:
                gradient[gradient == 0] = -0.0
            if "noise on tp" in self.flags and self.name == "tp_ep" and rank % 2 and "norm" in name:
                gradient.mul_(1 + (1e-6 if gradient.dtype is torch.float32 else 2**-7))


def _all(world: int) -> list[str]:
    alarms = []
    for seed in range(SEEDS):
        setup = SetUp(seed, world)
        layout = setup.build()
        parameters = list(layout.model.parameters())
        make = torch.optim.SGD if setup.optimizer == "sgd" else torch.optim.AdamW
        optimizer = make(parameters, lr=1e-3, foreach=False)
        with ep_hooks.attach(layout.model, optimizer, mesh=layout.meshes, config=setup.config(layout)) as handle:
            for step in range(3):
                setup.backward(layout, step)
                handle.clip(setup.limit)
                optimizer.step()
            alarms += [f"{setup}: {f}" for f in handle.findings if f.severity > Severity.INFO]
    return alarms


@pytest.mark.parametrize("world", [2, 4])
def test_nothing_is_found_in_correct_runs(world: int) -> None:
    assert world <= EXPERTS
    setups = [SetUp(seed, world) for seed in range(SEEDS)]
    for flag in FLAGS:
        assert sum(flag in setup.flags for setup in setups) >= 10
    for alarms in run_ranks(_all, world, world, timeout=280):
        assert alarms == []
