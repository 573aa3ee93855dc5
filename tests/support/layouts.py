"""One small model in the parallel layouts that people train mixture-of-experts models in.

Every builder is called on all ranks of a world and returns a :class:`Layout`. A layout carries the *truth* about each
parameter along the axes that its tensor type does not show, as the person who built it knows it: tests declare domains
from it and :mod:`tests.support.oracle` gathers by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.tinymoe import EXPERTS, LORA_RANK, Experts, Options, TinyMoE, batch, build, reference_gradients

__all__ = ["Along", "Layout", "add_expert_lora", "build_layout", "make_expert_local", "slice_lora"]

EXPERT_CONFIG: dict[str, Any] = {"domains": [{"match": "*.experts.*", "domain": "expert"}]}


@dataclass(frozen=True, slots=True)
class Along:
    """What a parameter's gradient is along one axis.

    Attributes:
        kind: ``shard``: the ranks hold different pieces; ``replicate``: the same value; ``sum``: every rank holds the
            same weight and an addend of its gradient.
        dim: For ``shard``, the dimension along which the pieces are joined.
        view: For ``shard``, the shape of a piece in which ``dim`` counts, when it is not the piece's own.
    """

    kind: Literal["shard", "replicate", "sum"]
    dim: int = 0
    view: tuple[int, ...] | None = None


@dataclass
class Layout:
    """A model laid out over the ranks, the same object on each of them but for the local data.

    Attributes:
        name: The builder's name.
        model: What the user would hand to a clip function.
        meshes: The dense mesh, then the expert mesh where there is one.
        truth: Logical name -> axis -> :class:`Along`, for axes a parameter's ``DTensor`` does not have.
        config: Declarations for ``ep_hooks.attach``.
        whole: Builds the single-process model of the same weights.
        parts: Number of different batches in a step.
        part: The batch of this rank.
        forward: Computes the loss to call ``backward`` on, from inputs and labels.
        ddp: The model is made for DDP, its ignore list set.
    """

    name: str
    model: nn.Module
    meshes: tuple[DeviceMesh, ...]
    truth: dict[str, dict[str, Along]]
    whole: Callable[[], nn.Module]
    parts: int
    part: int
    config: dict[str, Any] = field(default_factory=lambda: EXPERT_CONFIG)
    forward: Callable[[Tensor, Tensor], Tensor] | None = None
    ddp: bool = False

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by the name they have in ``whole``; a tied one appears once."""
        named = {name.removeprefix("module."): p for name, p in self.model.named_parameters()}
        return {name: p for name, p in named.items() if p.requires_grad}

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks along ``axis`` from this one."""
        for mesh in self.meshes:
            if axis in (mesh.mesh_dim_names or ()):
                return mesh.get_group(axis)
        raise KeyError(axis)

    def backward(self, step: int = 0) -> None:
        """Fresh gradients from this rank's part of the global batch of ``step``."""
        self.model.zero_grad()
        x, y = batch(step, self.parts, self.part)
        loss = self.forward(x, y) if self.forward else self.model(input_ids=x, labels=y)["loss"]
        loss.backward()

    def reference(self, step: int = 0) -> dict[str, Tensor]:
        """Gradients of one process that holds the whole model and sees the global batch of ``step``."""
        return reference_gradients(self.whole(), *batch(step, self.parts))


def build_layout(
    name: str,
    ep: int = 1,
    options: Options | None = None,
    *,
    frozen: Iterable[str] = (),
    wrap: bool = True,
) -> Layout:
    """Build layout ``name`` with expert-parallel size ``ep``. All ranks call it; groups are created once per world.

    Args:
        name: A key of ``BUILDERS``.
        ep: Must divide the world size.
        options: The model.
        frozen: Parameters whose name contains one of these words do not train.
        wrap: Put a model made for DDP into DDP; without it a trainer can do so.
    """
    options = options or Options()
    frozen = tuple(frozen)

    def whole() -> TinyMoE:
        model = build(options)
        for parameter_name, p in model.named_parameters():
            p.requires_grad_(not any(word in parameter_name for word in frozen))
        return model

    layout = BUILDERS[name](whole, ep)
    layout.name = f"{name}-ep{ep}"
    if layout.ddp and wrap:
        layout.model = DistributedDataParallel(layout.model)
    return layout


# ----------------------------------------------------------------------------------------------------------- pieces


@functools.cache
def _mesh(**sizes: int) -> DeviceMesh:
    """A mesh over the world; the same object for the same axes, so that a pool does not fill up with groups."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _expert_modules(model: nn.Module) -> list[tuple[str, Experts]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]


def _stacked(model: nn.Module) -> Iterable[tuple[Experts, str, str, nn.Parameter]]:
    """Module, attribute, full name and value of every weight with one slice per expert."""
    for prefix, module in _expert_modules(model):
        for attribute in Experts.stacked:
            p = getattr(module, attribute)
            if p is not None:
                yield module, attribute, f"{prefix}.{attribute}", p


def make_expert_local(model: nn.Module, ep: DeviceMesh) -> list[str]:
    """Keep only this rank's experts, as plain tensors that know nothing of ``ep``. Returns the parameters' names."""
    group, size, rank = ep.get_group(), ep.size(), ep.get_local_rank()
    names = []
    for module, attribute, name, p in list(_stacked(model)):
        piece = p.data.chunk(size)[rank].clone()
        setattr(module, attribute, nn.Parameter(piece, requires_grad=p.requires_grad))
        names.append(name)
    for _, module in _expert_modules(model):
        module.ep_group = group
    return names


def _make_expert_dtensor(model: nn.Module, ep: DeviceMesh) -> None:
    """Experts as ``DTensor`` with ``Shard(0)`` on ``ep``."""
    for module, attribute, _, p in list(_stacked(model)):
        placed = distribute_tensor(p.data, ep, [Shard(0)], src_data_rank=None)
        setattr(module, attribute, nn.Parameter(placed, requires_grad=p.requires_grad))
    for _, module in _expert_modules(model):
        module.ep_group = ep.get_group()


def _divide(parameters: Iterable[nn.Parameter], by: int) -> None:
    """The scaling that users write by hand: an expert has seen the losses of ``by`` ranks."""
    for p in parameters:
        if p.requires_grad:
            p.register_hook(lambda grad: grad / by)


def _fsdp(
    model: TinyMoE, dense: DeviceMesh, experts: DeviceMesh | None, *, ignored: set[nn.Parameter] | None = None
) -> None:
    """FSDP2: experts on their own mesh where one is given, then each block, then the root."""
    for block in model.blocks:
        if experts is not None:
            fully_shard(block.experts, mesh=experts)
            module = block.experts
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(float(dist.get_world_size()))
            if experts.size(-1) > 1:  # with one shard, torch 2.13 HSDP would divide twice under forced SUM
                module.set_force_sum_reduction_for_comms(True)
        fully_shard(block, mesh=dense, ignored_params=ignored or None)
    fully_shard(model, mesh=dense, ignored_params=ignored or None)


def _world() -> int:
    return dist.get_world_size()


def _layout(model: nn.Module, meshes: tuple[DeviceMesh, ...], whole: Callable[[], nn.Module], **fields: Any) -> Layout:
    return Layout(
        name="",
        model=model,
        meshes=meshes,
        truth=fields.pop("truth", {}),
        whole=whole,
        parts=fields.pop("parts", _world()),
        part=fields.pop("part", dist.get_rank()),
        **fields,
    )


def _along(names: Iterable[str], **axes: Along) -> dict[str, dict[str, Along]]:
    return {name: dict(axes) for name in names}


# ---------------------------------------------------------------------------------------------------------- layouts


def fsdp_only(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """Everything on one FSDP2 mesh; every rank gathers all experts."""
    dense = _mesh(fsdp=_world())
    model = whole()
    _fsdp(model, dense, None)
    return _layout(model, (dense,), whole, config={})


def titan(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """torchtitan's form: experts ``Shard(0)`` on ``ep``, then FSDP2 on ``efsdp``: ``DTensor`` on (efsdp, ep)."""
    dense, expert = _mesh(fsdp=_world()), _mesh(efsdp=_world() // ep, ep=ep)
    model = whole()
    _make_expert_dtensor(model, expert["ep"])
    _fsdp(model, dense, expert["efsdp"])
    return _layout(model, (dense, expert), whole)


def local(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """VeOmni's and xorl's form: a plain slice per EP rank, then FSDP2 on ``efsdp``: ``DTensor`` that hides ``ep``."""
    dense, expert = _mesh(fsdp=_world()), _mesh(efsdp=_world() // ep, ep=ep)
    model = whole()
    names = make_expert_local(model, expert["ep"])
    _fsdp(model, dense, expert["efsdp"])
    return _layout(model, (dense, expert), whole, truth=_along(names, ep=Along("shard")))


def ignored(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """Plain slices that FSDP2 is told to ignore, with ``ep`` over the whole world and gradients scaled by hand."""
    if ep != _world():
        raise ValueError(f"layout 'ignored' has no rank left to average over: ep must be {_world()}, got {ep}")
    dense, expert = _mesh(fsdp=_world()), _mesh(efsdp=1, ep=ep)
    model = whole()
    names = make_expert_local(model, expert["ep"])
    parameters = [model.get_parameter(name) for name in names]
    _divide(parameters, _world())
    _fsdp(model, dense, None, ignored=set(parameters))
    return _layout(model, (dense, expert), whole, truth=_along(names, ep=Along("shard")))


def _hsdp_meshes(ep: int) -> tuple[DeviceMesh, DeviceMesh]:
    half = _world() // 2
    return _mesh(dp_replicate=2, fsdp=half), _mesh(dp_replicate=2, efsdp=half // ep, ep=ep)


def hsdp_titan(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """HSDP: dense on (dp_replicate, fsdp), experts on (dp_replicate, efsdp, ep)."""
    dense, expert = _hsdp_meshes(ep)
    model = whole()
    _make_expert_dtensor(model, expert["ep"])
    _fsdp(model, dense, expert["dp_replicate", "efsdp"])
    return _layout(model, (dense, expert), whole)


def hsdp_local(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """HSDP: dense on (dp_replicate, fsdp), experts on (dp_replicate, efsdp) and ``ep`` hidden."""
    dense, expert = _hsdp_meshes(ep)
    model = whole()
    names = make_expert_local(model, expert["ep"])
    _fsdp(model, dense, expert["dp_replicate", "efsdp"])
    return _layout(model, (dense, expert), whole, truth=_along(names, ep=Along("shard")))


def tp_ep(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """Dense on (fsdp, tp), experts on (efsdp, ep).

    ``attn`` and ``head`` are sharded over ``tp``, the router is a ``Replicate`` over it, norms and embedding do not
    know it. TP peers see the same batch, so every expert has seen each loss ``tp`` times; dividing by the number of
    all ranks makes that the mean.
    """
    tp = 2
    dense, expert = _mesh(fsdp=_world() // tp, tp=tp), _mesh(efsdp=_world() // ep, ep=ep)
    model = whole()
    tp_mesh = dense["tp"]
    for block in model.blocks:
        parallelize_module(block, tp_mesh, {"attn": ColwiseParallel(output_layouts=Replicate())})
        distribute_module(
            block.gate,
            tp_mesh,
            input_fn=lambda _, args, mesh: (DTensor.from_local(args[0], mesh, [Replicate()]),),
            output_fn=lambda _, out, mesh: out.to_local(),
        )
    parallelize_module(model, tp_mesh, {"head": RowwiseParallel(input_layouts=Replicate())})
    _make_expert_dtensor(model, expert["ep"])
    _fsdp(model, dense["fsdp"], expert["efsdp"])
    dense_names = [(name, p) for name, p in model.named_parameters() if ".experts." not in name]
    unseen = [name for name, p in dense_names if "tp" not in p.device_mesh.mesh_dim_names]
    copied = {"fsdp": "shard", "tp": "replicate"}
    rules = [{"match": name, "domain": copied, "name": "dense"} for name in unseen]
    return _layout(
        model,
        (dense, expert),
        whole,
        truth=_along(unseen, tp=Along("replicate")),
        config={"domains": [*EXPERT_CONFIG["domains"], *rules]},
        parts=_world() // tp,
        part=dense.get_local_rank("fsdp"),
    )


def _ignored_by_ddp(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Set what DDP reads when it wraps ``model``."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))
    return model


def _ddp_truth(model: nn.Module, pieces: Mapping[str, dict[str, Along]]) -> dict[str, dict[str, Along]]:
    """``pieces``, and ``replicate`` over ``dp`` for everything else."""
    return {name: dict(pieces.get(name, {"dp": Along("replicate")})) for name, _ in model.named_parameters()}


def ddp_local(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """DDP with plain EP-local experts in its ignore list and gradients scaled by hand; ``ep`` is the world."""
    dense, expert = _mesh(dp=_world()), _mesh(edp=1, ep=_world())
    model = whole()
    names = make_expert_local(model, expert["ep"])
    _divide([model.get_parameter(name) for name in names], _world())
    truth = _ddp_truth(model, _along(names, ep=Along("shard")))
    return _layout(_ignored_by_ddp(model, names), (dense, expert), whole, truth=truth, ddp=True)


def shared_lora(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """``ddp_local`` whose experts carry a LoRA factor shared by all of them: equal weights, gradients to be added.

    Needs ``Options(shared_lora=True)``.
    """
    dense, expert = _mesh(dp=_world()), _mesh(edp=1, ep=_world())
    model = whole()
    names = make_expert_local(model, expert["ep"])
    shared = [f"{prefix}.lora_a" for prefix, _ in _expert_modules(model)]
    _divide([model.get_parameter(name) for name in [*names, *shared]], _world())
    pieces = _along(names, ep=Along("shard")) | _along(shared, ep=Along("sum"))
    truth = _ddp_truth(model, pieces)
    config = {
        "domains": [
            {"match": "*.experts.lora_a", "domain": "ep_sum"},
            {"match": "*.experts.lora_b", "domain": "expert"},
            {"match": "*.experts.w?", "domain": "expert"},
        ]
    }
    model = _ignored_by_ddp(model, [*names, *shared])
    return _layout(model, (dense, expert), whole, truth=truth, config=config, ddp=True)


def add_expert_lora(model: TinyMoE) -> nn.Module:
    """PEFT LoRA on the stacked expert weights through ``target_parameters``; the head trains too."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=LORA_RANK,
        lora_alpha=4,
        target_modules=[],
        target_parameters=["experts.w1", "experts.w2"],
        init_lora_weights=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        adapted = get_peft_model(model, config)
    for name, p in adapted.named_parameters():
        if "head" in name:
            p.requires_grad_(True)
    return adapted


def slice_lora(name: str, whole: Tensor, size: int, rank: int) -> Tensor:
    """The part of a PEFT factor (0.21, ``ParamWrapper``) that belongs to the experts of EP rank ``rank``.

    ``lora_A`` [experts * r, in] has its rows grouped by expert; ``lora_B`` [out, r * experts] has the expert last.
    """
    if "lora_A" in name:
        return whole.chunk(size)[rank]
    if "lora_B" in name:
        by_expert = whole.reshape(whole.shape[0], LORA_RANK, EXPERTS)
        return by_expert.chunk(size, dim=2)[rank].reshape(whole.shape[0], -1)
    return whole


def _ddp_lora(whole: Callable[[], TinyMoE], ignore: Literal["all", "experts", "nothing"]) -> Layout:
    """EP-local experts with PEFT adapters; ``ignore`` is what DDP has been told to leave alone."""
    dense, expert = _mesh(dp=_world()), _mesh(edp=1, ep=_world())
    size, rank = _world(), dist.get_rank()
    full = dict(add_expert_lora(whole()).named_parameters())
    base = whole()
    make_expert_local(base, expert["ep"])
    model = add_expert_lora(base)
    adapters = []
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = slice_lora(name, full[name].data, size, rank).clone()
            adapters.append(name)
    frozen = [name for name, p in model.named_parameters() if "experts" in name and not p.requires_grad]
    if ignore == "all":
        _divide([model.get_parameter(name) for name in adapters], size)
    pieces = {
        name: {"ep": Along("shard", 2, (p.shape[0], LORA_RANK, -1)) if "lora_B" in name else Along("shard")}
        for name, p in model.named_parameters()
        if "experts" in name
    }
    truth = _ddp_truth(model, pieces)
    names = {"all": [*frozen, *adapters], "experts": frozen, "nothing": []}[ignore]
    model = _ignored_by_ddp(model, names)
    return _layout(model, (dense, expert), lambda: add_expert_lora(whole()), truth=truth, ddp=True)


def ddp_lora(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """DDP, frozen EP-local experts, a PEFT adapter per expert; DDP ignores experts and adapters."""
    return _ddp_lora(whole, "all")


def ddp_lora_undeclared(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """As ``ddp_lora``, but DDP does not know of the adapters: it broadcasts and averages different experts' factors."""
    return _ddp_lora(whole, "experts")


def ddp_lora_forgotten(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """As ``ddp_lora_undeclared``, and DDP's first broadcast overwrites the frozen experts too."""
    return _ddp_lora(whole, "nothing")


def partial(whole: Callable[[], TinyMoE], ep: int) -> Layout:
    """Data parallelism in ``DTensor`` alone: dense weights ``Replicate``, their gradients ``Partial`` and not reduced.

    Experts are ``Shard(0)`` on ``ep``, which is the world.
    """
    dense, expert = _mesh(dp=_world()), _mesh(edp=1, ep=_world())
    model = whole()
    _make_expert_dtensor(model, expert["ep"])
    for module in list(model.modules()):
        for attribute, p in list(module.named_parameters(recurse=False)):
            if not isinstance(p, DTensor):
                placed = distribute_tensor(p.data, dense, [Replicate()], src_data_rank=None)
                setattr(module, attribute, nn.Parameter(placed, requires_grad=p.requires_grad))

    def forward(x: Tensor, y: Tensor) -> Tensor:
        local = {
            name: p.to_local(grad_placements=[Partial() if placement.is_replicate() else placement])
            for name, p in model.named_parameters()
            for placement in p.placements
        }
        loss = torch.func.functional_call(model, local, kwargs={"input_ids": x, "labels": y})["loss"]
        return loss / _world()

    return _layout(model, (dense, expert), whole, forward=forward)


BUILDERS: dict[str, Callable[[Callable[[], TinyMoE], int], Layout]] = {
    builder.__name__: builder
    for builder in (
        fsdp_only,
        titan,
        local,
        ignored,
        hsdp_titan,
        hsdp_local,
        tp_ep,
        ddp_local,
        shared_lora,
        ddp_lora,
        ddp_lora_undeclared,
        ddp_lora_forgotten,
        partial,
    )
}
