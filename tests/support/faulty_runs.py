"""Short runs of DDP and FSDP2 with expert-parallel layers into which one fault is planted.

A fault sits in the framework's code or state, never in what the classifier reads. :class:`Run` can be given the
findings of an earlier run: it then does what their remedies say, by kind, parameter and ranks, and leaves the planted
code in. A remedy that names the wrong parameter or the wrong thing to do leaves the fault where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ep_hooks
from ep_hooks.findings import Finding, Kind, Severity
from ep_hooks.plan import Slice

__all__ = ["FsdpRun", "HsdpRun", "Run", "dense_names", "expert_names"]

PLAIN = {"trunk": ("trunk", 6), "twin": ("twin", 6), "tower": ("tower", 9), "branch": ("branch", 4)}
FOREIGN = {"trunk": ("Ω mixer", 5), "twin": ("expert_bias_lora_A", 5), "tower": ("0", 13), "branch": ("norm-γ", 1)}
"""Names that suggest another domain, or nothing; one layer has less elements than there are ranks."""
OUTPUTS = {"plain": 3, "foreign": 7}

_MIXED = {Kind.WRONG_RANKS, Kind.PIECES_EQUAL}


def _roles(foreign: bool) -> Mapping[str, tuple[str, int]]:
    return FOREIGN if foreign else PLAIN


def dense_names(foreign: bool = False, role: str = "") -> tuple[str, ...]:
    """Ids of all dense parameters, or of those of one layer."""
    roles = _roles(foreign)
    layers = [role] if role else ["trunk", "twin", "tower"]
    return tuple(sorted(f"{roles[layer][0]}.{leaf}" for layer in layers for leaf in ("weight", "bias")))


def expert_names(foreign: bool = False) -> tuple[str, ...]:
    """Ids of the expert-parallel parameters."""
    return dense_names(foreign, "branch")


class Net(nn.Module):
    """Three dense layers, and one of which every EP rank has its own."""

    def __init__(self, foreign: bool, ep_rank: int) -> None:
        super().__init__()
        roles = _roles(foreign)
        sizes = {role: size for role, (_, size) in roles.items()}
        outputs = {
            "trunk": sizes["tower"],
            "twin": sizes["tower"],
            "tower": sizes["branch"],
            "branch": OUTPUTS["foreign" if foreign else "plain"],
        }
        self.inputs = sizes["trunk"]
        for role, (name, size) in roles.items():
            torch.manual_seed(len(role) * 7 + (1 + ep_rank if role == "branch" else 0))
            self.add_module(name, nn.Linear(size, outputs[role]))
        self.names = {role: name for role, (name, _) in roles.items()}

    def layer(self, role: str) -> nn.Linear:
        """The layer that plays ``role``."""
        module = self.get_submodule(self.names[role])
        assert isinstance(module, nn.Linear)
        return module

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        mixed = (self.layer("trunk")(x) * self.layer("twin")(x)).tanh()
        loss: Tensor = self.layer("branch")(self.layer("tower")(mixed)).square().sum()
        return loss


_all_reduce = dist.all_reduce


def _mean_of_float64(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a framework may put in the place of ``torch.distributed.all_reduce``."""
    work = _all_reduce(tensor, *args, **kwargs)
    if tensor.dtype is torch.float64:
        tensor /= dist.get_world_size()
    return work


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return getattr(tensor, "_local_tensor", tensor)


class Run:
    """Three steps of DDP with EP-local experts, two of them audited, and a place for a fault in each phase.

    Args:
        fault: what is planted; ``"nothing"``.
        foreign: with names and shapes that suggest nothing.
        findings: of the run to be mended.
    """

    probed: tuple[str, ...] = (
        *("flag missing", "sum", "reduced twice", "divided twice", "wrong divisor", "operator max", "broadcast"),
        *("rank 1 ignored", "rank 0 counted twice", "rank 1 subtracted", "weights per rank", "wrong group"),
    )
    """Faults that the probe can see: it is run first, and nothing is repaired in these runs."""

    def __init__(self, fault: str, *, foreign: bool = False, findings: Sequence[Finding] = ()) -> None:
        self.fault, self.foreign = fault, foreign
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        by_kind: dict[Kind, dict[str, Finding]] = {}
        serious = [finding for finding in findings if finding.severity > Severity.INFO]
        for finding in serious:
            if finding.step > min(other.step for other in serious):
                continue  # what the first ones led to
            by_kind.setdefault(finding.kind, {})[finding.id] = finding
        self.mends = by_kind
        self.keep_out = {name for kind in _MIXED for name in by_kind.get(kind, ())}
        self.weighed_anew = any(finding.step == 0 for finding in findings)
        self.config: dict[str, Any] = {"audit": {"level": "warn"}}
        self.meshes: Any = None
        self.build()
        self.parameters = dict(self.net.named_parameters())
        self.optimizers = self._optimizers()
        if fault == "missing initial broadcast" and self.rank == 1:
            _local(self.net.layer("twin").bias).data += 1e-3

    # ---- the model -----------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Sets net, model, config and meshes."""
        self.net = Net(self.foreign, self.rank)
        trunk, branch = self.net.names["trunk"], self.net.names["branch"]
        ignored = {f"{branch}.{leaf}" for leaf in ("weight", "bias")}
        if self.fault == "flag missing":
            ignored = ignored & self.keep_out
        if self.fault == "a dense parameter is ignored":
            ignored.add(f"{trunk}.weight")
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.net, sorted(ignored))
        options: dict[str, Any] = {}
        if self.fault == "wrong group" and not self.weighed_anew:
            groups = [dist.new_group([0]), dist.new_group(list(range(1, self.world)))]
            options["process_group"] = groups[min(self.rank, 1)]
        ddp = DistributedDataParallel(self.net, **options)
        if self.fault in self.probed and self.fault not in ("flag missing", "wrong group"):
            ddp.register_comm_hook(None, self._comm_hook())
        self.model: nn.Module = ddp
        rules = [self._rule("branch", "expert"), *self._dense()]
        self.config |= {"axes": {"ep": -1}, "domains": rules, "ranks": list(range(self.world))}

    def _rule(self, role: str, domain: str) -> dict[str, Any]:
        return {"match": f"{self.net.names[role]}.*", "domain": domain}

    def _dense(self) -> list[dict[str, Any]]:
        return [self._rule(role, "dense") for role in ("trunk", "twin", "tower")]

    def _comm_hook(self) -> Any:
        fault = "mean" if self.weighed_anew else self.fault

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            buffer = self.reduced(bucket.buffer(), fault)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future

        hook.__annotations__.clear()  # DDP compares them with types, and these are strings
        return hook

    def reduced(self, buffer: Tensor, fault: str) -> Tensor:
        """A mean over all ranks, or what ``fault`` makes of it."""
        rank, world = self.rank, self.world
        if fault == "broadcast":
            dist.broadcast(buffer, 0)
            return buffer
        if (fault, rank) == ("rank 1 ignored", 1):
            buffer.zero_()
        if (fault, rank) == ("rank 0 counted twice", 0):
            buffer *= 2
        if (fault, rank) == ("rank 1 subtracted", 1):
            buffer.neg_()
        if fault == "weights per rank":
            buffer *= 2 * (rank + 1) / (world + 1)
        dist.all_reduce(buffer, dist.ReduceOp.MAX if fault == "operator max" else dist.ReduceOp.SUM)
        if fault == "reduced twice":
            dist.all_reduce(buffer)
        buffer /= {"sum": 1, "wrong divisor": 3, "divided twice": world**2}.get(fault, world)
        return buffer

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        held, mended = dict(self.parameters), self.mends.get(Kind.NOT_UPDATED, {})
        tower, twin = (f"{self.net.names['tower']}.bias", f"{self.net.names['twin']}.bias")
        if self.fault == "no optimizer holds it" and tower not in mended:
            del held[tower]
        if self.fault == "one rank's optimizer lacks it" and self.rank == 1 and twin not in mended:
            del held[twin]
        slower = self.fault == "learning rate per rank" and self.rank == 1
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(held.values(), lr=5e-3 if slower else 1e-2, foreach=False)
        ]
        weight = f"{self.net.names['tower']}.weight"
        if self.fault == "two optimizers hold it" and weight not in mended:
            optimizers.append(torch.optim.SGD([self.parameters[weight]], lr=1e-2))
        return optimizers

    # ---- the run -------------------------------------------------------------------------------------------------

    def train(self, **config: Any) -> list[Finding]:
        """Findings of the probe, where it is run, and of the steps; the third tells what became of the second."""
        before: dict[str, Tensor] = {}
        probed = self.fault in self.probed
        with (
            ExitStack() as stack,
            ep_hooks.attach(
                self.model,
                self.optimizers,
                mesh=self.meshes,
                config={**self.config, **config},
                mode="observe" if probed else "enforce",  # what can be repaired is to be measured
            ) as handle,
        ):
            self._reload()
            if Kind.MISCOUNTED not in self.mends:
                self.after_attach(handle.session)
                if self.fault == "all_reduce takes the mean":
                    stack.enter_context(mock.patch.object(dist, "all_reduce", _mean_of_float64))
            if probed:
                handle.probe(self.in_the_loop if self.fault == "experts by hand" else None)
            for step in range(3):
                self.model.zero_grad()
                torch.manual_seed(100 * step + self.rank)
                self.model(torch.randn(5, self.net.inputs)).backward()
                self.after_backward(step, before)
                handle.clip(0.5)
                if Kind.CLIP not in self.mends:
                    self.after_clip(step)
                for optimizer in self.optimizers:
                    if not self._skips(step):
                        optimizer.step()
                self.after_step(step)
                self._reload()
            return handle.findings

    def in_the_loop(self) -> None:
        """What the training loop itself reduces."""

    def after_attach(self, session: Any) -> None:
        """Faults in the plan of the norm."""
        mine = {session.entries[piece.index].id: piece for piece in session.slices}
        trunk, tower, branch = (f"{self.net.names[role]}.weight" for role in ("trunk", "tower", "branch"))
        if self.fault == "plan gap":  # whoever counts it
            session._slices = tuple(piece for piece in session.slices if piece is not mine.get(trunk))
        if self.fault == "gap on one rank" and self.rank == self.world - 1:
            session._slices = tuple(piece for piece in session.slices if piece is not mine.get(branch))
        if self.fault == "cut off by one":
            session._slices = tuple(
                replace(piece, lo=piece.lo + 1) if piece is mine.get(tower) else piece for piece in session.slices
            )
        if self.fault == "two owners":
            index = next(i for i, entry in enumerate(session.entries) if entry.id == trunk)
            lo, hi = session.interval(session.entries[index])
            others = [piece for piece in session.slices if piece.index != index]
            session._slices = (*others, Slice(index, lo, hi, session.slot_of(index)))
        if self.fault == "counted as if tied":
            session._slices = (*session.slices, *(piece for piece in [mine.get(tower)] if piece))

    def _skips(self, step: int) -> bool:
        """Whether this rank leaves out the optimizer's step, by its own decision."""
        locally = self.fault == "overflow decided locally" and Kind.STEPPED_ALONE not in self.mends
        return locally and step == 0 and self.rank == 1

    def _gradient(self, role: str) -> Tensor:
        return _local(self.net.layer(role).weight.grad)

    def after_backward(self, step: int, before: dict[str, Tensor]) -> None:
        """Faults in gradients of one rank, in the second step; then what the findings want reduced."""
        trunk, twin = self._gradient("trunk"), self._gradient("twin")
        kept = trunk.clone()
        if step == 1 and self.rank == self.world - 1:
            if self.fault == "zeroed":
                trunk.zero_()
            if self.fault == "stale":
                trunk.copy_(before["trunk"])
            if self.fault == "another buffer":
                trunk.copy_(twin)
            if self.fault == "swapped":
                trunk.copy_(twin)
                twin.copy_(kept)
            if self.fault == "sign":
                trunk.neg_()
            if self.fault == "one element":
                trunk.view(-1)[trunk.abs().argmax()] *= 1.01
            if self.fault == "permuted":
                trunk.copy_(trunk.flip(0))
            if self.fault == "reduced twice on one rank":
                trunk.mul_(self.world)
        if step == 1:
            for p in self._kept_in(self.net.layer("branch").named_parameters()):
                if self.fault == "experts reduced in the loop":
                    dist.all_reduce(_local(p.grad))
                if self.fault == "experts broadcast in the loop":
                    dist.broadcast(_local(p.grad), 0)
        before["trunk"] = kept
        for name, finding in sorted(self.mends.get(Kind.NOT_REDUCED, {}).items()):
            if finding.step:
                self.average(_local(self.parameters[name].grad), finding.ranks)

    def _kept_in(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
        return [p for leaf, p in named if f"{self.net.names['branch']}.{leaf}" not in self.keep_out]

    def average(self, tensor: Tensor, ranks: Sequence[int]) -> None:
        """In place, over ``ranks``."""
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, tensor)
        if self.rank in ranks:
            tensor.copy_(sum(parts[other] for other in ranks) / len(ranks))

    def after_clip(self, step: int) -> None:
        """Faults between clip and optimizer."""
        scale = {"clipped twice": 0.5, "clip taken back": 3.0}.get(self.fault)
        if self.fault == "coefficient per rank":
            scale = 0.8 + 0.1 * self.rank
        for p in self.net.parameters():
            if step == 1 and scale is not None:
                _local(p.grad).mul_(scale)
            if step == 1 and self.fault == "reduced after the clip":
                dist.all_reduce(_local(p.grad))

    def after_step(self, step: int) -> None:
        """Faults in weights and optimizer states after the first step: the second audit sees them."""
        if step or self.rank != 1:
            return
        trunk, twin = self.net.layer("trunk"), self.net.layer("twin")
        state = self.optimizers[0].state
        if self.fault == "weights drift":
            _local(trunk.weight).data.view(-1)[0] += 1e-4
        if self.fault == "states drift":
            _local(state[trunk.bias]["exp_avg_sq"]).mul_(1.01)
        if self.fault == "states swapped":
            one, other = (_local(state[layer.weight]["exp_avg"]) for layer in (trunk, twin))
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    def _reload(self) -> None:
        """Weights and states that differ are loaded again as the first of the ranks has them."""
        for kind in (Kind.REPLICAS_DIFFER, Kind.STATE_DIFFERS):
            for name, finding in sorted(self.mends.get(kind, {}).items()):
                parameter = self.parameters[name]
                state = self.optimizers[0].state
                mine: Any = state.get(parameter) if kind is Kind.STATE_DIFFERS else _local(parameter).detach()
                offered: list[Any] = [None] * self.world
                plain = {k: _local(v) for k, v in mine.items()} if isinstance(mine, dict) else mine
                dist.all_gather_object(offered, plain)
                group = next(ranks for ranks in self._replicas(finding) if self.rank in ranks)
                first = offered[group[0]]
                if kind is Kind.REPLICAS_DIFFER:
                    _local(parameter).data.copy_(first)
                elif first and not mine:
                    state[parameter] = first
                elif first:
                    for key, value in first.items():
                        _local(mine[key]).copy_(value)

    def _replicas(self, finding: Finding) -> list[tuple[int, ...]]:
        """Groups of ranks that hold the same: those of the finding, and the others alike."""
        return [finding.ranks]


class FsdpRun(Run):
    """FSDP2: dense layers over all ranks, experts over ``efsdp``, which leaves ``ep`` to be declared."""

    probed = (
        *("experts over ep", "divisor of the dense layers", "divisor of the experts", "SUM for AVG"),
        *("experts by hand", "dense layers on the experts' mesh"),
    )

    def build(self) -> None:
        """Sets net, model, config and meshes."""
        self.net = Net(self.foreign, self.rank % 2)
        mesh = init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("efsdp", "ep"))
        whole = mesh._flatten("fsdp")
        fault = "nothing" if self.weighed_anew and self.fault != "experts by hand" else self.fault
        branch = self.net.layer("branch")
        fully_shard(branch, mesh=whole if fault == "experts over ep" else mesh["efsdp"])
        fully_shard(self.net, mesh=mesh["efsdp"] if fault == "dense layers on the experts' mesh" else whole)
        for module in (self.net, branch):
            assert isinstance(module, FSDPModule)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            layer = {"divisor of the dense layers": (self.net, 3.0), "SUM for AVG": (self.net, 1.0)}
            target, factor = layer.get(fault, (branch, 7.0 if fault == "divisor of the experts" else 0.0))
            if target is module and factor:
                module.set_gradient_divide_factor(factor)
        self.ep = mesh.get_group("ep")
        self.model, self.meshes = self.net, [mesh, whole]
        declared = self._dense() if fault == "dense layers on the experts' mesh" else []
        self.config |= {"domains": [self._rule("branch", "expert"), *declared]}

    def in_the_loop(self) -> None:
        """What the training loop itself reduces."""
        for p in self._kept_in(self.net.layer("branch").named_parameters()):
            dist.all_reduce(_local(p.grad), group=self.ep)


class HsdpRun(Run):
    """FSDP2 with replicas: dense layers on (dp_replicate, fsdp), experts over ``efsdp``."""

    probed = ()

    def build(self) -> None:
        """Sets net, model, config and meshes."""
        self.net = Net(self.foreign, self.rank % 2)
        half = self.world // 2
        dense = init_device_mesh("cpu", (2, half), mesh_dim_names=("dp_replicate", "fsdp"))
        expert = init_device_mesh("cpu", (half, 2), mesh_dim_names=("efsdp", "ep"))
        fully_shard(self.net.layer("branch"), mesh=expert["efsdp"])
        fully_shard(self.net, mesh=dense)
        self.model, self.meshes = self.net, [dense, expert]
        self.config |= {"domains": [self._rule("branch", "expert")]}

    def _replicas(self, finding: Finding) -> list[tuple[int, ...]]:
        half = self.world // 2
        return [tuple(range(first, self.world, half)) for first in range(half)]
