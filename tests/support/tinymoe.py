"""A mixture-of-experts language model small enough for unit tests, with a real expert-parallel all-to-all.

The model is a function of its seed: with default options the parameters are drawn in one fixed order, and optional
parts (biases, the shared expert, the adapter) are drawn afterwards, so that an option never changes the other weights.
Built whole on one process it is the reference for every parallel layout of the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single_autograd
from torch.distributed.tensor import DTensor

__all__ = ["Experts", "Options", "TinyMoE", "batch", "build", "reference_gradients"]

DIM = 16
HIDDEN = 24
EXPERTS = 4
TOP_K = 2
VOCAB = 32
LORA_RANK = 2


@dataclass(frozen=True, slots=True)
class Options:
    """What the model is made of.

    Attributes:
        seed: Seed of the initial weights.
        dtype: Type of all parameters.
        blocks: Number of blocks.
        expert_bias: Experts have biases.
        tied_head: The head shares its weight with the embedding and has no bias.
        shared_expert: A dense feed-forward beside the experts, seen by every token.
        shared_lora: The experts' first weight carries ``A @ B[j]`` with one ``A`` for all experts of a block.
        idle_gradients: Experts without tokens get a zero gradient; without it a rank whose experts are all idle has
            none.
    """

    seed: int = 0
    dtype: torch.dtype = torch.float32
    blocks: int = 2
    expert_bias: bool = False
    tied_head: bool = False
    shared_expert: bool = False
    shared_lora: bool = False
    idle_gradients: bool = True


class Experts(nn.Module):
    """The experts of one block as stacked weights, expert number first.

    ``ep_group`` is ``None`` while the module holds all experts. A layout that keeps a slice sets it to the group over
    which the slices, in rank order, make up the whole. Weights may be plain tensors or ``DTensor``: the computation
    uses the local part.
    """

    stacked = ("w1", "w2", "b1", "b2", "lora_b")

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.ep_group: dist.ProcessGroup | None = None
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * 0.6)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * 0.6)
        for name in ("b1", "b2", "lora_a", "lora_b"):
            self.register_parameter(name, None)

    def add_options(self) -> None:
        """Draw the optional parameters."""
        if self.options.expert_bias:
            self.b1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.3)
            self.b2 = nn.Parameter(torch.randn(EXPERTS, DIM) * 0.3)
        if self.options.shared_lora:
            self.lora_a = nn.Parameter(torch.randn(DIM, LORA_RANK) * 0.5)
            self.lora_b = nn.Parameter(torch.randn(EXPERTS, LORA_RANK, HIDDEN) * 0.5)

    def compute(self, x: Tensor, expert: Tensor) -> Tensor:
        """Apply to each row of ``x`` the local expert whose number stands in ``expert``."""
        local = {name: _local(p) for name, p in self._tensors().items()}
        out = x * 0
        if self.options.idle_gradients:
            out = out + 0 * sum(t.sum() for t in local.values())
        for j in range(local["w1"].shape[0]):
            rows = (expert == j).nonzero().flatten()
            if rows.numel() == 0:
                continue
            w1 = local["w1"][j]
            if "lora_a" in local:
                w1 = w1 + local["lora_a"] @ local["lora_b"][j]
            y = x[rows] @ w1
            if "b1" in local:
                y = y + local["b1"][j]
            y = torch.relu(y) @ local["w2"][j]
            if "b2" in local:
                y = y + local["b2"][j]
            out = out.index_add(0, rows, y.to(out.dtype))
        return out

    def _tensors(self) -> dict[str, Tensor]:
        """By attribute, so that parametrised weights (PEFT) are seen as the module computes with them."""
        tensors = {name: getattr(self, name) for name in ("w1", "w2", "b1", "b2", "lora_a", "lora_b")}
        return {name: t for name, t in tensors.items() if t is not None}

    def forward(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """``x`` [tokens, DIM]; ``expert`` and ``weight`` [tokens, TOP_K]: global expert numbers and mixing weights."""
        flat = expert.reshape(-1)
        order = torch.argsort(flat, stable=True)
        rows = x[order // TOP_K]
        y = self.compute(rows, flat[order]) if self.ep_group is None else self._exchange(rows, flat, self.ep_group)
        unsorted = torch.empty_like(y)
        unsorted[order] = y
        return (unsorted.view(*expert.shape, -1) * weight.unsqueeze(-1)).sum(1)

    def _exchange(self, rows: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Send rows, sorted by expert, to the ranks that hold the experts, compute there, and bring them back."""
        ranks = dist.get_world_size(group)
        local = EXPERTS // ranks
        sent = torch.bincount(flat, minlength=EXPERTS).view(ranks, local)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        out_sizes, in_sizes = received.sum(1).tolist(), sent.sum(1).tolist()
        arrived = _wait(all_to_all_single_autograd(rows, out_sizes, in_sizes, group))
        expert = torch.arange(local).repeat(ranks).repeat_interleave(received.reshape(-1))
        return _wait(all_to_all_single_autograd(self.compute(arrived, expert), in_sizes, out_sizes, group))


class Block(nn.Module):
    """A dense layer, a router and experts, with residual connections."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts(options)
        self.shared: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        weight, expert = self.gate(x).softmax(-1).topk(TOP_K, -1)
        y = x + self.experts(x, expert, weight)
        return y if self.shared is None else y + self.shared(x)


class TinyMoE(nn.Module):
    """Embedding, blocks, head; returns ``{"loss": ..., "logits": ...}`` like a transformers model."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.blocks))
        self.head = nn.Linear(DIM, VOCAB, bias=not options.tied_head)
        for block in self.blocks:
            block.experts.add_options()
            if options.shared_expert:
                block.shared = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM))
        if options.tied_head:
            self.head.weight = self.emb.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: object) -> dict[str, Tensor]:
        x = self.emb(input_ids).reshape(-1, DIM)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.float(), labels.reshape(-1)), "logits": logits}


def build(options: Options = Options()) -> TinyMoE:
    """The whole model on this process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return TinyMoE(options).to(options.dtype)


def batch(step: int, parts: int, part: int | None = None, *, size: int = 4, length: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and labels of ``step``: the global batch of ``parts * size`` rows, or only rows of one ``part``."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (parts * size, length)
    x = torch.randint(0, VOCAB, shape, generator=generator)
    y = torch.randint(0, VOCAB, shape, generator=generator)
    if part is None:
        return x, y
    rows = slice(part * size, (part + 1) * size)
    return x[rows], y[rows]


def reference_gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradients of the whole model on the global batch, by parameter name, in float64; frozen parameters left out."""
    model.zero_grad()
    model(input_ids=x, labels=y)["loss"].backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def _local(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def _wait(t: Tensor) -> Tensor:
    return t.wait() if isinstance(t, AsyncCollectiveTensor) else t
