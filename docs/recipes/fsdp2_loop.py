"""A plain FSDP2 training loop with expert parallelism, and the three lines that make its clip right.

    torchrun --nproc_per_node 4 docs/recipes/fsdp2_loop.py

Dense weights are sharded over all ranks (mesh axis `fsdp`); every expert-parallel rank keeps its own experts, which are
sharded over the ranks that hold the same ones (mesh axes `efsdp` x `ep`, as in torchtitan). Lines that belong to
ep_hooks are marked with (1), (2), (3). The same lines serve torchtitan: call `attach` in `post_optimizer_build_fn`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ep_hooks  # (1)

WIDTH, EXPERTS, STEPS, EP = 32, 8, 5, 2


class Experts(nn.Module):
    """Experts of this expert-parallel rank; expert ``i`` gets the ``i``-th slice of every rank's tokens."""

    def __init__(self, ep: DeviceMesh) -> None:
        super().__init__()
        self.ep = ep
        whole = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.weight = nn.Parameter(distribute_tensor(whole, ep, [Shard(0)]))

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        ranks = self.ep.size()
        even = [tokens.shape[0] // ranks] * ranks
        mine = all_to_all_single_autograd(tokens, even, even, self.ep.get_group())
        mine = torch.bmm(mine.view(weight.shape[0], -1, WIDTH), weight).relu().reshape(-1, WIDTH)
        return all_to_all_single_autograd(mine, even, even, self.ep.get_group())


class Block(nn.Module):
    """A dense layer followed by experts, with a residual connection."""

    def __init__(self, ep: DeviceMesh) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(ep)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.dense(x).relu())


def main() -> None:
    dist.init_process_group("gloo" if not torch.accelerator.is_available() else None)
    world = dist.get_world_size()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    dense_mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("fsdp",))
    expert_mesh = init_device_mesh(device.type, (world // EP, EP), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(expert_mesh["ep"]) for _ in range(2))).to(device)
    for block in model:
        fully_shard(block.experts, mesh=expert_mesh["efsdp"])
        block.experts.set_gradient_divide_factor(float(world))
        if device.type == "cpu" and expert_mesh["efsdp"].size() > 1:
            block.experts.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        fully_shard(block, mesh=dense_mesh)
    fully_shard(model, mesh=dense_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    handle = ep_hooks.attach(model, optimizer)  # (2) after fully_shard; the meshes of the DTensors name the axes

    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * world + dist.get_rank())
        x = torch.randn(64, WIDTH, generator=generator).to(device)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        norm = ep_hooks.clip_grad_norm_(model, max_norm=1.0)  # (3) in place of torch.nn.utils.clip_grad_norm_
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f} grad_norm {norm.item():.6f}", flush=True)
    handle.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
