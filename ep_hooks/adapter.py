"""What the core asks of a framework. Adapters live in ``ep_hooks.integrations``; nothing here knows a framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ep_hooks.domains import Evidence, Placement
from ep_hooks.modes import Mode
from ep_hooks.replay import Gradients, Pattern, Replayed
from ep_hooks.table import Entry, ParameterTable, Source
from ep_hooks.topology import Topology

__all__ = ["Adapter", "Phase"]


class Phase(StrEnum):
    """The two moments at which gradients are readable.

    ``reduced``: model gradients after the framework's own reduction; pending reductions run on these. ``ready``: the
    gradients that the optimizer consumes (the same tensors in plain PyTorch; float32 interval shards in a distributed
    optimizer); the norm runs on these.
    """

    REDUCED = "reduced"
    READY = "ready"


class Adapter(Protocol):
    """One model in one framework.

    Every method is called on all ranks of the rank set, in the same order.
    """

    @property
    def name(self) -> str:
        """Name of the adapter, for the banner."""

    @property
    def facts(self) -> Sequence[tuple[str, str]]:
        """(label, value) that must be equal on all ranks: host versions and modes."""

    optimizers: Sequence[Optimizer]
    """Optimizers over the model, to notice parameters that are added to them."""

    @property
    def default(self) -> Evidence | None:
        """Evidence for a parameter about which nothing is known; ``None``: it is undeclared."""

    def topology(self) -> Topology:
        """Axes and rank set; runs no collective."""

    def groups(self) -> Iterable[ProcessGroup]:
        """The framework's process groups, for reuse."""

    def sources(self, topology: Topology) -> Iterable[Source]:
        """Trainable parameters with what the framework says of them."""

    def parameter_count(self) -> int:
        """A cheap number that changes when parameters are added or removed."""

    def repair(self, table: ParameterTable, mode: Mode) -> Sequence[str]:
        """Set what the framework reads, where it is wrong; returns what was set, in words.

        In ``observe`` nothing is set and the words say what would be.

        Raises:
            TooLateError: the framework has read it already.
        """

    def undo_repair(self) -> None:
        """Take back what :meth:`repair` set."""

    def unfinished(self) -> str:
        """Why the gradients are not reduced yet; empty if they are."""

    def gradients(self, entries: Sequence[Entry], phase: Phase) -> list[Tensor | None]:
        """Local gradient of each entry at ``phase``, without dispatch and without copies."""

    def partials(self, entries: Sequence[Entry]) -> Mapping[str, Mapping[str, Placement]]:
        """Pending reductions that the gradients themselves show (``Partial`` DTensors): id -> axis -> placement."""

    def store(self, entry: Entry, gradient: Tensor) -> None:
        """Write a reduced gradient back; allocate or rebind where needed."""

    def weights(self, entries: Sequence[Entry]) -> list[Tensor]:
        """Local weights of each entry."""

    def replay_plan(self, entries: Sequence[Entry]) -> list[Replayed]:
        """Who reduces each parameter, for :func:`ep_hooks.probing.run_probe`.

        Raises:
            UnsupportedError: the adapter cannot send made-up gradients through the framework's reduction; says why.
        """

    def replayed(self, pattern: Pattern) -> AbstractContextManager[Gradients]:
        """Send ``pattern`` through the framework's own reduction; within the context its outcome can be read.

        Afterwards gradients, buffers, accumulators and generators are as before, bit for bit.
        """
