"""A fake framework with a distributed optimizer, and its adapter.

It does what Megatron's does and what makes adapters hard: gradients are accumulated in flat buffers, one per kind of
parameter; a reduce-scatter leaves each rank with one interval of the buffer, cut without regard for parameters, and
with its own unreduced gradients elsewhere; float32 copies of the intervals are made late, and those are what the
optimizer consumes; weights are gathered back into the (bfloat16) model. Plain SGD, nothing is overlapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ep_hooks.adapter import Phase
from ep_hooks.domains import Domain, Evidence, EvidenceKind, Placement
from ep_hooks.errors import UnsupportedError
from ep_hooks.modes import Mode
from ep_hooks.plan import Holding
from ep_hooks.replay import Gradients, Pattern, Replayed
from ep_hooks.table import Entry, ParameterTable, Source
from ep_hooks.topology import Topology

__all__ = ["FakeAdapter", "FakeDistributedOptimizer", "FlatBuffer"]

DOMAINS = {"dense": Domain.replicated(), "expert": Domain.expert(), "shared": Domain.ep_sum()}
"""Kind of a parameter, the first part of its name -> its domain. Each kind has a buffer."""
AXES = {"dense": "dp", "expert": "edp", "shared": "edp"}
"""Kind -> the axis over which the framework reduces. The SUM of shared factors over ``ep`` is left to others."""


class FlatBuffer:
    """Gradients of one kind back to back, averaged over ``group``; rank i of it owns the i-th equal interval.

    Attributes:
        views: name -> the parameter's gradient in the buffer (``main_grad`` in Megatron); the same objects for ever.
        spans: name -> by rank of the group, the interval [lo, hi) of the parameter that it owns.
        main: name -> float32 copy of this rank's interval of the weight; its ``grad`` is what the optimizer consumes.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: ProcessGroup, dtype: torch.dtype) -> None:
        self.parameters, self.group = dict(parameters), group
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.size = -(-sum(p.numel() for p in self.parameters.values()) // ranks)
        self.data = torch.zeros(self.size * ranks, dtype=dtype)
        self.views: dict[str, Tensor] = {}
        self.spans: dict[str, list[tuple[int, int]]] = {}
        start = 0
        for name, p in self.parameters.items():
            self.views[name] = self.data[start : start + p.numel()].view(p.shape)
            cuts = [min(max(i * self.size - start, 0), p.numel()) for i in range(ranks + 1)]
            self.spans[name] = [(cuts[i], cuts[i + 1]) for i in range(ranks)]
            start += p.numel()
        self.main = {name: nn.Parameter(self.own(name, p).float()) for name, p in self.parameters.items()}

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's interval of a tensor in the shape of the parameter."""
        lo, hi = self.spans[name][self.rank]
        return whole.detach().reshape(-1)[lo:hi]

    def reduce_scatter(self) -> None:
        """Average over the group; only this rank's interval is written."""
        reduced = self.data.float()
        dist.all_reduce(reduced, dist.ReduceOp.SUM, self.group)
        mine = slice(self.rank * self.size, (self.rank + 1) * self.size)
        self.data[mine] = (reduced[mine] / dist.get_world_size(self.group)).to(self.data.dtype)

    def gather_weights(self) -> None:
        """Main weights of all ranks back into the model."""
        for name, p in self.parameters.items():
            whole = torch.zeros(p.numel())
            lo, hi = self.spans[name][self.rank]
            whole[lo:hi] = self.main[name].detach()
            dist.all_reduce(whole, dist.ReduceOp.SUM, self.group)
            p.data.copy_(whole.view(p.shape))


class FakeDistributedOptimizer:
    """The framework: ``accumulate``, ``reduce``, ``copy_gradients``, ``step``, ``zero_grad``, in this order.

    Args:
        model: its parameters' names begin with ``dense``, ``expert`` or ``shared``.
        groups: axis (``dp``, ``edp``) -> process group of this rank.
        dtype: dtype of the gradient buffers.
    """

    def __init__(self, model: nn.Module, groups: Mapping[str, ProcessGroup], dtype: torch.dtype, lr: float) -> None:
        self.lr, self.state = lr, "zero"
        named = {kind: {n: p for n, p in model.named_parameters() if n.startswith(kind)} for kind in DOMAINS}
        self.buffers = {kind: FlatBuffer(named[kind], groups[AXES[kind]], dtype) for kind in DOMAINS}

    def accumulate(self) -> None:
        """Add ``p.grad`` to the buffers and free it; a gradient of ``None`` adds nothing."""
        for buffer in self.buffers.values():
            for name, p in buffer.parameters.items():
                if p.grad is not None:
                    buffer.views[name].add_(p.grad)
                    p.grad = None
        self.state = "accumulated"

    def reduce(self) -> None:
        """The framework's own reduction: afterwards the gradients are at ``Phase.REDUCED``."""
        for buffer in self.buffers.values():
            buffer.reduce_scatter()
        self.state = "reduced"

    def copy_gradients(self) -> None:
        """Float32 copies of the owned intervals: afterwards the gradients are at ``Phase.READY``."""
        for buffer in self.buffers.values():
            for name, main in buffer.main.items():
                main.grad = buffer.own(name, buffer.views[name]).float().clone() if main.numel() else None
        self.state = "copied"

    def reload_weights(self) -> None:
        """Main weights again from the model's, after somebody has written these."""
        for buffer in self.buffers.values():
            for name, main in buffer.main.items():
                main.data.copy_(buffer.own(name, buffer.parameters[name]))

    def step(self) -> None:
        """SGD on the main weights, which are then gathered."""
        for buffer in self.buffers.values():
            for main in buffer.main.values():
                if main.grad is not None:
                    main.data.sub_(main.grad, alpha=self.lr)
            buffer.gather_weights()

    def zero_grad(self) -> None:
        """Forget the step's gradients."""
        for buffer in self.buffers.values():
            buffer.data.zero_()
            for main in buffer.main.values():
                main.grad = None
        self.state = "zero"


class FakeAdapter:
    """The fake framework's adapter. Implements :class:`ep_hooks.adapter.Adapter` with no other adapter's help."""

    name = "fake distributed optimizer"
    optimizers = ()
    default = None

    def __init__(self, framework: FakeDistributedOptimizer, ep: int) -> None:
        self.framework, self.ep = framework, ep
        self.facts: Sequence[tuple[str, str]] = (("the optimizer", "fake distributed optimizer"),)

    def topology(self) -> Topology:
        """Two factorisations of all ranks."""
        world = dist.get_world_size()
        return Topology.grid({"dense": {"dp": world}, "expert": {"edp": world // self.ep, "ep": self.ep}})

    def groups(self) -> Iterator[ProcessGroup]:
        """The groups of the buffers."""
        return (buffer.group for buffer in self.framework.buffers.values())

    def sources(self, topology: Topology) -> Iterator[Source]:
        """Every parameter as a whole piece, of which each holder has the interval that it owns in the buffer."""
        for kind, buffer in self.framework.buffers.items():
            axis, evidence = topology.axis(AXES[kind]), Evidence(EvidenceKind.ATTRIBUTE, "its buffer", DOMAINS[kind])
            replicas = DOMAINS[kind].resolve(topology, dist.get_rank()).replicas
            for name, p in buffer.parameters.items():
                held = tuple(Holding(rank, *buffer.spans[name][axis.coordinate(rank)]) for rank in replicas)
                yield Source(name, p, tuple(p.shape), buffer.data.dtype, [evidence], holdings=held)

    def parameter_count(self) -> int:
        """The buffers are laid out once."""
        return sum(len(buffer.parameters) for buffer in self.framework.buffers.values())

    def repair(self, table: ParameterTable, mode: Mode) -> Sequence[str]:
        """Nothing is wrong."""
        return ()

    def undo_repair(self) -> None:
        """Nothing was set."""

    def unfinished(self) -> str:
        """The norm reads copies."""
        return "" if self.framework.state == "copied" else f"the gradients are {self.framework.state}, not copied"

    def gradients(self, entries: Sequence[Entry], phase: Phase) -> list[Tensor | None]:
        """Whole gradients in the buffer, or the copies of the owned intervals (``None`` for an empty one)."""
        buffers = [self.framework.buffers[entry.source.id.partition("_")[0]] for entry in entries]
        if phase is Phase.REDUCED:
            return [buffer.views[entry.source.id] for entry, buffer in zip(entries, buffers, strict=True)]
        return [buffer.main[entry.source.id].grad for entry, buffer in zip(entries, buffers, strict=True)]

    def partials(self, entries: Sequence[Entry]) -> Mapping[str, Mapping[str, Placement]]:
        """No DTensors here."""
        return {}

    def store(self, entry: Entry, gradient: Tensor) -> None:
        """Write a whole gradient into the buffer."""
        self.framework.buffers[entry.source.id.partition("_")[0]].views[entry.source.id].copy_(gradient)

    def weights(self, entries: Sequence[Entry]) -> list[Tensor]:
        """The model's weights; whoever writes them calls ``reload_weights``."""
        return [entry.parameter.detach() for entry in entries]

    def replay_plan(self, entries: Sequence[Entry]) -> list[Replayed]:
        """The buffers could be filled; nobody has written that yet."""
        raise UnsupportedError("the fake distributed optimizer cannot replay its reduction")

    def replayed(self, pattern: Pattern) -> AbstractContextManager[Gradients]:
        """Refused by :meth:`replay_plan`."""
        raise NotImplementedError
