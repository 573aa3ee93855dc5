"""Adapter for models in plain PyTorch: FSDP2, DDP, tensor-parallel DTensors and unwrapped modules, in any mixture.

It serves every framework that leaves gradients in ``parameter.grad`` and is the base of the Accelerate and the
transformers adapters.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as PartialPlacement
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ep_hooks.adapter import Phase
from ep_hooks.config import EPHooksConfig
from ep_hooks.domains import REPLICATE, SHARD, Domain, Evidence, EvidenceKind, Placement, partial
from ep_hooks.errors import TooLateError, UnfinishedGradientError, UnsupportedError
from ep_hooks.groups import is_distributed
from ep_hooks.modes import Mode
from ep_hooks.names import logical_name, shorten
from ep_hooks.replay import Gradients, Pattern, Replayed
from ep_hooks.table import Entry, ParameterTable, Source
from ep_hooks.topology import Topology, axis_names

from .ddp_watch import start_watching, stop_watching, wrappers_of
from .replay import replay_plan, replayed

__all__ = ["PyTorchAdapter", "assumed_replicated", "local_tensor"]

EXPERT_AXIS = "ep"
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # read once in DistributedDataParallel.__init__ (torch 2.13: line 886)


def assumed_replicated(source: str) -> Evidence:
    """The default for a dense parameter; shown as assumed, and measured."""
    return Evidence(EvidenceKind.ASSUMED, source, Domain.replicated())


def local_tensor(tensor: Tensor) -> Tensor:
    """The local part of a DTensor without dispatch; other tensors as they are."""
    local: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    # An asynchronous functional collective may have produced it.
    wait = getattr(local, "wait", None)
    return wait() if wait is not None and type(local) is not Tensor else local


class PyTorchAdapter:
    """One model, or a list of parameters, whose gradients are in ``parameter.grad``.

    Args:
        parameters: a module, or tensors without a module (their ids are then numbered by domain).
        meshes: device meshes that name axes which the parameters' own meshes do not.
        optimizers: optimizers over the model, to notice added parameters.
        default: evidence for a plain parameter about which nothing is known.
        containers: further classes (beside ``config.expert_containers``) whose modules hold experts.
    """

    def __init__(
        self,
        parameters: nn.Module | Sequence[Tensor],
        config: EPHooksConfig,
        *,
        meshes: Sequence[DeviceMesh] = (),
        optimizers: Sequence[Optimizer] = (),
        default: Evidence | None = None,
        containers: Sequence[str] = (),
    ) -> None:
        self.module = parameters if isinstance(parameters, nn.Module) else None
        self._tensors = () if self.module is not None else tuple(parameters)  # type: ignore[arg-type]  # not a module
        self.name = "pytorch"
        self.facts: Sequence[tuple[str, str]] = ()
        self.config, self.default = config, default
        self._meshes = tuple(meshes)
        self.optimizers = tuple(optimizers)
        self._containers = (*config.expert_containers, *containers)
        self._ignored_before: list[tuple[nn.Module, Any]] = []
        self._entries: Sequence[Entry] = ()
        self._dtensors: Sequence[Entry] = ()
        self._registrations = 0
        self._registered_at = -1
        self._identity = 0
        self._hook = None
        if self.module is not None:
            self._hook = register_module_parameter_registration_hook(self._on_registration)
            start_watching()

    # ---- set-up -------------------------------------------------------------------------------------------------

    def topology(self) -> Topology:
        """Axes of the config and of all meshes over the union of their ranks."""
        meshes = list(dict.fromkeys([*self._meshes, *self._parameter_meshes()]))
        from_meshes = Topology.from_meshes(meshes) if meshes else None
        ranks = self.config.ranks or self._ranks(from_meshes)
        from_config = self.config.topology(tuple(ranks))
        factorisations = {
            **(from_config.factorisations if from_config else {}),
            **(from_meshes.factorisations if from_meshes else {}),
        }
        return Topology(tuple(sorted(ranks)), factorisations)

    def _ranks(self, from_meshes: Topology | None) -> tuple[int, ...]:
        ranks = set(from_meshes.ranks) if from_meshes else set()
        for ddp in self._ddp_modules():
            ranks |= set(dist.get_process_group_ranks(ddp.process_group))
        if ranks:
            return tuple(ranks)
        return tuple(range(dist.get_world_size())) if is_distributed() else (0,)

    def groups(self) -> Iterator[ProcessGroup]:
        """Groups of all meshes and of DDP."""
        for mesh in dict.fromkeys([*self._meshes, *self._parameter_meshes()]):
            yield from mesh.get_all_groups()
        for ddp in self._ddp_modules():
            yield ddp.process_group

    def sources(self, topology: Topology) -> Iterator[Source]:
        """Trainable parameters with the evidence that torch itself gives."""
        for module in self._modules():
            if isinstance(module, FullyShardedDataParallel):
                raise UnsupportedError(
                    "FSDP1 (FullyShardedDataParallel) keeps flat shards that say nothing of their parameters; "
                    "use fully_shard (FSDP2)"
                )
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
                raise UnsupportedError(
                    f"{module} gives sparse gradients, which are not supported; make it sparse=False"
                )
        suspects, named = self._suspects(topology), self.module is not None
        reduced_by_ddp = self._reduced_by_ddp()
        sharded_by_fsdp = any(isinstance(parameter, DTensor) for _, parameter in self._parameters())
        for name, parameter in self._parameters():
            if parameter.is_sparse or parameter.layout is not torch.strided:
                raise UnsupportedError(f"{name}: sparse parameters are not supported (layout {parameter.layout})")
            if isinstance(parameter, DTensor):
                placed = _placed(name, parameter)
                label = "expert" if placed.get(EXPERT_AXIS, REPLICATE).kind is SHARD.kind else "dense"
                evidence = [Evidence(EvidenceKind.PLACEMENT, _mesh_text(parameter), Domain(label))]
                shape = tuple(parameter._local_tensor.shape)
                suspect = suspects.get(id(parameter), "")
                yield Source(name, parameter, shape, parameter.dtype, evidence, placed, suspect, named=named)
                continue
            suspect, evidence = suspects.get(id(parameter), ""), []
            if id(parameter) in reduced_by_ddp:
                source = "DistributedDataParallel all-reduces it"
                evidence = [Evidence(EvidenceKind.ATTRIBUTE, source, Domain.replicated())]
            elif reduced_by_ddp:
                suspect = suspect or "DistributedDataParallel ignores it"
            elif sharded_by_fsdp and self.default is not None:
                suspect = suspect or "it is a plain tensor in a model whose other parameters are DTensors"
            shape = tuple(parameter.shape)
            yield Source(name, parameter, shape, parameter.dtype, evidence, {}, suspect, named=named)

    def parameter_count(self) -> int:
        """Changes when a module of the model gets a parameter or an optimizer a group."""
        if self._registered_at != self._registrations:
            self._registered_at = self._registrations
            self._identity = hash(tuple(id(parameter) for _, parameter in self._parameters()))
        return self._identity + sum(len(group["params"]) for opt in self.optimizers for group in opt.param_groups)

    def repair(self, table: ParameterTable, mode: Mode) -> Sequence[str]:
        """Keep DDP from averaging what is not replicated over its whole group.

        Sets the ignore list on the unwrapped module; DDP reads it when it is built.
        """
        reduced_by_ddp = self._reduced_by_ddp()
        ranks = len(self.topology().ranks)
        wrong = [
            entry
            for entry in table
            if entry.evidence.kind is EvidenceKind.DECLARED and self._must_not_be_averaged(entry, ranks)
        ]
        if not wrong or self.module is None:
            return ()
        if reduced_by_ddp:
            late = [entry.id for entry in wrong if id(entry.parameter) in reduced_by_ddp]
            if not late:
                return ()
            message = (
                f"DistributedDataParallel averages {len(late)} parameter(s) that are declared otherwise: "
                f"{shorten(late)}. Their weights were overwritten with rank 0's when DDP was built. Call "
                "ep_hooks.attach(model) before DistributedDataParallel(model), or put them in the module's "
                f"{_IGNORED}, and load the weights again."
            )
            if mode is Mode.OBSERVE:
                return (message,)
            raise TooLateError(message)
        ids = {id(entry.parameter) for entry in wrong}
        names = [name for name, parameter in self.module.named_parameters() if id(parameter) in ids]
        before = getattr(self.module, _IGNORED, None)
        new = [name for name in names if name not in set(before or ())]
        if not new:
            return ()
        if mode is Mode.OBSERVE:
            return (f"would keep DistributedDataParallel from averaging {len(new)} parameter(s)",)
        self._ignored_before.append((self.module, before))
        setattr(self.module, _IGNORED, [*(before or ()), *new])
        return (f"DistributedDataParallel, if it is used, ignores {len(new)} parameter(s): {shorten(new, 3)}",)

    def undo_repair(self) -> None:
        """Restore the ignore list and drop the registration hook."""
        for module, before in reversed(self._ignored_before):
            if before is None:
                delattr(module, _IGNORED)
            else:
                setattr(module, _IGNORED, before)
        self._ignored_before.clear()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            stop_watching()

    # ---- each step ----------------------------------------------------------------------------------------------

    def unfinished(self) -> str:
        """FSDP2 or DDP were told not to reduce, and have not since."""
        for ddp in self._ddp_modules():
            # Cleared by a forward under no_sync(), set by the next one that synchronises.
            if not ddp.require_forward_param_sync:
                return "the last backward ran under DistributedDataParallel.no_sync()"
        for group in self._fsdp_groups():
            if group._partial_reduce_output is not None or any(map(_holds_unsharded_gradient, group.fsdp_params)):
                setting = "gradient_sync" if group.all_reduce_grads else "all_reduce"
                return (
                    f"FSDP2 holds unreduced gradients of {group._module_fqn or 'the root module'} (set_requires_"
                    f"{setting}(False)); run the last micro-batch with it set to True"
                )
        return ""

    def gradients(self, entries: Sequence[Entry], phase: Phase) -> list[Tensor | None]:
        """Local gradients; both phases are the same tensors here."""
        return [
            None if (g := entry.source.parameter.grad) is None else g if type(g) is Tensor else local_tensor(g)
            for entry in entries
        ]

    def partials(self, entries: Sequence[Entry]) -> Mapping[str, Mapping[str, Placement]]:
        """Gradients that are ``Partial`` DTensors, or laid out otherwise than their parameter."""
        found = {}
        if self._entries is not entries:
            self._entries, self._dtensors = entries, [e for e in entries if isinstance(e.source.parameter, DTensor)]
        for entry in self._dtensors:
            gradient = entry.source.parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements != entry.source.parameter.placements:  # type: ignore[attr-defined]  # a DTensor's gradient is one
                found[entry.source.id] = _placed(entry.id, gradient)
        return found

    def store(self, entry: Entry, gradient: Tensor) -> None:
        """Write in place; allocate a missing gradient; turn a reduced ``Partial`` into ``Replicate``."""
        parameter = entry.parameter
        current = parameter.grad
        if not isinstance(parameter, DTensor):
            if current is None:
                parameter.grad = gradient.reshape(parameter.shape).to(parameter.dtype, copy=True)
            else:
                current.copy_(gradient.view(current.shape))
            return
        if isinstance(current, DTensor):
            local = local_tensor(current)
            local.copy_(gradient.view(local.shape))
            if not any(p.is_partial() for p in current.placements):
                return
            placements = tuple(
                held if placement.is_partial() else placement
                for placement, held in zip(current.placements, parameter.placements, strict=True)
            )
        else:
            local = gradient.reshape(parameter._local_tensor.shape).to(parameter.dtype, copy=True)
            placements = parameter.placements
        parameter.grad = DTensor.from_local(
            local, parameter.device_mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    def weights(self, entries: Sequence[Entry]) -> list[Tensor]:
        """Local weights."""
        return [local_tensor(entry.parameter.detach()) for entry in entries]

    # ---- the probe ----------------------------------------------------------------------------------------------

    def replay_plan(self, entries: Sequence[Entry]) -> list[Replayed]:
        """Who reduces each parameter: DDP, FSDP2, a hook, or nobody."""
        if why := self.unfinished():
            raise UnfinishedGradientError(f"cannot probe between a backward and its reduction: {why}")
        return replay_plan(self.module, self._ddp_modules(), list(self._fsdp_groups()), entries)

    def replayed(self, pattern: Pattern) -> AbstractContextManager[Gradients]:
        """A surrogate of the model's forward and backward, through the wrappers' own reductions."""
        assert self.module is not None, "replay_plan() has refused"
        read = lambda entries: self.gradients(entries, Phase.READY)  # noqa: E731  # an argument
        return replayed(self.module, self._ddp_modules(), list(self._fsdp_groups()), pattern, read)

    # ---- what torch knows ---------------------------------------------------------------------------------------

    def _on_registration(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        self._registrations += 1

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        if self.module is None:
            for index, tensor in enumerate(self._tensors):
                if tensor.requires_grad or tensor.grad is not None:
                    yield f"parameters[{index}]", tensor
            return
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield logical_name(name), parameter

    def _parameter_meshes(self) -> Iterable[DeviceMesh]:
        return dict.fromkeys(p.device_mesh for _, p in self._parameters() if isinstance(p, DTensor))

    def _modules(self) -> Iterator[nn.Module]:
        return self.module.modules() if self.module is not None else iter(())

    def _ddp_modules(self) -> list[DistributedDataParallel]:
        inside = [module for module in self._modules() if isinstance(module, DistributedDataParallel)]
        return inside + (wrappers_of(self.module) if self.module is not None else [])

    def _fsdp_groups(self) -> Iterator[Any]:
        for module in self._modules():
            state = getattr(module, "_get_fsdp_state", None)
            if state is not None:
                found = state()
                groups = getattr(found, "_fsdp_param_groups", None)  # a list since torch 2.12, one before
                yield from groups if groups is not None else filter(None, [found._fsdp_param_group])

    def _reduced_by_ddp(self) -> set[int]:
        return {
            id(parameter)
            for ddp in self._ddp_modules()
            for name, parameter in ddp.module.named_parameters()
            if name not in ddp.parameters_to_ignore
        }

    def _suspects(self, topology: Topology) -> dict[int, str]:
        """Parameters that an expert container holds, in a topology that has an expert axis."""
        if not self._containers or self.module is None or EXPERT_AXIS not in topology.axes:
            return {}
        if max(map(len, topology.axis(EXPERT_AXIS).groups)) == 1:
            return {}
        found = {}
        for name, module in self.module.named_modules():
            path = f"{type(module).__module__}.{type(module).__qualname__}"
            if any(fnmatch.fnmatchcase(path, pattern) for pattern in self._containers):
                for parameter in module.parameters():
                    found[id(parameter)] = f"it is held by the expert container {logical_name(name)} ({path})"
        return found

    @staticmethod
    def _must_not_be_averaged(entry: Entry, ranks: int) -> bool:
        if isinstance(entry.parameter, DTensor):
            return False
        return bool(entry.domain.reductions) or len(entry.domain.replicas) < ranks


def _holds_unsharded_gradient(fsdp_param: Any) -> bool:
    """Whether FSDP2 keeps a gradient of the whole parameter: in the reduce dtype, or on the unsharded parameter."""
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    return fsdp_param.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


def _placed(name: str, tensor: DTensor) -> dict[str, Placement]:
    placed = {}
    for axis, placement in zip(axis_names(tensor.device_mesh), tensor.placements, strict=True):
        if placement.is_replicate():
            placed[axis] = REPLICATE
        elif isinstance(placement, PartialPlacement):
            if placement.reduce_op not in ("sum", "avg"):
                raise UnsupportedError(f"{name}: a gradient that is Partial({placement.reduce_op!r}) along {axis!r}")
            placed[axis] = partial(placement.reduce_op)
        else:  # Shard and its strided form under FSDP over TP
            placed[axis] = SHARD
    return placed


def _mesh_text(tensor: DTensor) -> str:
    placed = zip(axis_names(tensor.device_mesh), tensor.placements, strict=True)
    return "DTensor on (" + ", ".join(f"{name}: {placement}" for name, placement in placed) + ")"
