"""Expert parallelism by hand, as many code bases do it: each rank keeps its own experts as plain tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["LocalExperts", "expert_names", "make_expert_local"]


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.received, ctx.sent = received, sent
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back = gradients[0].new_empty(sum(ctx.sent), gradients[0].shape[1])
        dist.all_to_all_single(back, gradients[0].contiguous(), ctx.sent, ctx.received)
        return back, None, None


def _exchange(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    out: Tensor = _AllToAll.apply(rows, received, sent)  # type: ignore[no-untyped-call]  # torch does not type apply()
    return out


class LocalExperts(nn.Module):
    """This rank's slice of ``Qwen3MoeExperts``; tokens travel to the rank that has their expert and back.

    Gradients of the local experts are the mean over the global batch, as DDP's are for dense parameters.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.num_experts = int(whole.num_experts)  # type: ignore[arg-type]  # an int on the transformers module
        self.act_fn: Any = whole.act_fn
        for name in ("gate_up_proj", "down_proj"):
            mine = getattr(whole, name).detach().chunk(self.world)[self.rank].clone()
            parameter = nn.Parameter(mine)
            parameter.register_hook(lambda gradient: gradient / self.world)
            self.register_parameter(name, parameter)

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As ``Qwen3MoeExperts.forward``: ``hidden`` [tokens, width], ``experts`` and ``weights`` [tokens, top-k]."""
        top_k, flat = experts.shape[1], experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts).view(self.world, -1)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        sent, received = counts.sum(1).tolist(), incoming.sum(1).tolist()
        rows = _exchange(hidden[order // top_k], received, sent)
        local = torch.arange(incoming.shape[1]).repeat(self.world).repeat_interleave(incoming.reshape(-1))
        # Adding zero times the weights keeps an idle expert in the graph: its gradient is zero, not None.
        out = rows * 1.0 + 0.0 * (self.gate_up_proj.sum() + self.down_proj.sum())
        for index in range(incoming.shape[1]):
            chosen = (local == index).nonzero().flatten()
            if chosen.numel():
                gate, up = nn.functional.linear(rows[chosen], self.gate_up_proj[index]).chunk(2, dim=-1)
                result = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[index])
                out = out.index_copy(0, chosen, result)
        back = _exchange(out, sent, received)
        unsorted = torch.empty_like(back).index_copy(0, order, back)
        return (unsorted.view(*experts.shape, -1) * weights.unsqueeze(-1)).sum(1)


def make_expert_local(model: nn.Module) -> None:
    """Replace every ``mlp.experts`` of a ``Qwen3MoeForCausalLM`` by this rank's slice."""
    for module in list(model.modules()):
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module) and not isinstance(experts, LocalExperts):
            module.experts = LocalExperts(experts)


def expert_names(model: nn.Module) -> list[str]:
    """Names of the local experts, for DDP's ignore list."""
    return [name for name, _ in model.named_parameters() if ".experts." in name]
