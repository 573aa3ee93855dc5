"""How Megatron numbers its ranks, from the sizes of its axes alone, and the plan that follows from it.

Source: ``RankGenerator`` of megatron-core 0.16.1 (``parallel_state.py``), with which a test compares it.
"""

from __future__ import annotations

from ep_hooks.domains import REPLICATE, SHARD, Domain
from ep_hooks.errors import ConfigError
from ep_hooks.report import render, short_ranks
from ep_hooks.topology import Topology

__all__ = ["megatron_topology", "symbolic_plan"]


def symbolic_plan(
    world_size: int, *, tp: int, etp: int, cp: int, pp: int, ep: int, order: str = "tp-cp-ep-dp-pp"
) -> str:
    """Who counts and who reduces what, from sizes of axes alone (Megatron's two factorisations of the ranks)."""
    topology = megatron_topology(world_size, tp=tp, etp=etp, cp=cp, pp=pp, ep=ep, order=order)
    kinds = [
        ("dense, replicated", Domain("dense", {"tp": REPLICATE}, REPLICATE)),
        ("dense, cut by tp", Domain("dense", {"tp": SHARD}, REPLICATE)),
        ("expert, cut by etp", Domain("expert", {"ep": SHARD, "etp": SHARD}, REPLICATE)),
        ("expert, same on etp", Domain("expert", {"ep": SHARD, "etp": REPLICATE}, REPLICATE)),
    ]  # fmt: skip
    body = []
    for label, domain in kinds:
        replicas = {domain.resolve(topology, rank).replicas for rank in topology.ranks}
        first = domain.resolve(topology, 0)
        words = [word.split(":") for word in first.text.split() if ":" in word]
        over = " x ".join(axis for axis, kind in words if kind == "replicate") or "nobody"
        holders = len(first.replicas)
        body.append(
            (label, first.text, f"{len(replicas):,}", over, short_ranks(first.replicas), f"1/{holders} by each")
        )
    sizes = ", ".join(
        f"{name}: " + " x ".join(f"{axis.name} {len(axis.groups[0])}" for axis in axes)
        for name, axes in topology.factorisations.items()
    )
    head = ("parameter", "placement", "pieces", "reduced over", "rank 0's piece is held by", "counted")
    return render(head, body, title=f"{world_size} ranks; {sizes}")


def megatron_topology(
    world_size: int, *, tp: int, etp: int, cp: int, pp: int, ep: int, order: str = "tp-cp-ep-dp-pp"
) -> Topology:
    """The two factorisations of a Megatron run: tp x cp x dp x pp and etp x ep x edp x pp, first axis fastest."""
    names = order.split("-")
    if sorted(names) != ["cp", "dp", "ep", "pp", "tp"]:
        raise ConfigError(f"order must name tp, cp, ep, dp and pp once each, got {order!r}")
    for label, product in (("tp x cp x pp", tp * cp * pp), ("etp x ep x pp", etp * ep * pp)):
        if product < 1 or world_size % product:
            raise ConfigError(f"world size {world_size} is not divisible by {label} = {product}")
    dense = {"tp": tp, "cp": cp, "dp": world_size // (tp * cp * pp), "pp": pp}
    expert = {"tp": ("etp", etp), "ep": ("ep", ep), "dp": ("edp", world_size // (etp * ep * pp)), "pp": ("pp", pp)}
    return Topology.grid(
        {
            "dense": {name: dense[name] for name in names if name in dense},
            "expert": dict(expert[name] for name in names if name in expert),
        },
        fastest="first",
    )
