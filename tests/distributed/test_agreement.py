"""Ranks that disagree fail at set-up, all of them and before any training; ranks that rightly differ do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ep_hooks
from ep_hooks.groups import ProcessGroups
from ep_hooks.topology import Axis
from tests.support.ranks import run_ranks

RULES = [{"match": "expert*", "domain": "expert"}, {"match": "shared*", "domain": "ep_sum"}]


def _model(**shapes: Any) -> nn.Module:
    """One weight per argument: its shape, or a ready tensor."""
    model = nn.Module()
    for name, shape in shapes.items():
        tensor = shape if isinstance(shape, torch.Tensor) else torch.ones(shape)
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def _plain(**shapes: Any) -> nn.Module:
    return _model(**{"dense": (3, 2), "expert": (4,), **shapes})


def _odd() -> bool:
    """The rank that differs from all others."""
    return dist.get_rank() == dist.get_world_size() - 1


def _config(**more: Any) -> dict[str, Any]:
    return {"axes": {"ep": dist.get_world_size()}, "domains": RULES[:1], **more}


# ------------------------------------------------------------------------------------------------------ must disagree


def other_shape() -> None:
    ep_hooks.attach(_plain(dense=(2, 3) if _odd() else (3, 2)), config=_config())


def other_dtype() -> None:
    ep_hooks.attach(_plain(dense=torch.ones(3, 2, dtype=torch.bfloat16 if _odd() else torch.float32)), config=_config())


def missing_on_a_replica() -> None:
    model = _plain(extra=(2,))
    if _odd():
        del model.extra
    ep_hooks.attach(model, config=_config())


def frozen_on_a_replica() -> None:
    model = _plain()
    model.dense.requires_grad_(not _odd())
    ep_hooks.attach(model, config=_config())


def other_name() -> None:
    ep_hooks.attach(_model(**{"expert": (4,), "weight" if _odd() else "dense": (3, 2)}), config=_config())


def other_domain() -> None:
    """One rank takes the replicated weight for its own."""
    model = _plain()
    ep_hooks.declare(model.dense, "expert" if _odd() else "dense")
    ep_hooks.attach(model, config=_config())


def other_divisor() -> None:
    model = _plain()
    pending = ep_hooks.partial("avg") if _odd() else ep_hooks.partial("sum")
    ep_hooks.declare(model.dense, ep_hooks.Domain("shared", {"ep": pending}))
    ep_hooks.attach(model, config=_config())


def pending_on_one_rank_only() -> None:
    """The others would never join its sum."""
    model = _plain()
    ep_hooks.declare(model.dense, "ep_sum" if _odd() else "dense")
    ep_hooks.attach(model, config=_config())


def other_order_of_pending_reductions() -> None:
    """Average over edp, then sum over ep; the last rank the other way round."""
    model = _plain()
    order = {"edp": ep_hooks.partial("avg"), "ep": ep_hooks.partial("sum")}
    if _odd():
        order = dict(reversed(order.items()))
    ep_hooks.declare(model.dense, ep_hooks.Domain("shared", order))
    ep_hooks.attach(model, config=_config(axes={"edp": dist.get_world_size() // 2, "ep": 2}))


def other_configuration() -> None:
    ep_hooks.attach(_plain(), config=_config(sync={"bucket_mb": 10 if _odd() else 20}))


def other_rules() -> None:
    """Here a rule more, by which nothing changes."""
    rules = [*RULES[:1], {"match": "dense", "domain": "dense"}] if _odd() else RULES[:1]
    ep_hooks.attach(_plain(), config=_config(domains=rules))


def other_mode() -> None:
    ep_hooks.attach(_plain(), config=_config(), mode="observe" if _odd() else "enforce")


def other_version() -> None:
    from ep_hooks import session

    before = session.__version__
    session.__version__ = "0.0.0" if _odd() else before
    try:
        ep_hooks.attach(_plain(), config=_config())
    finally:
        session.__version__ = before


def other_axis() -> None:
    sizes = {"edp": 2, "ep": 2} if not _odd() else {"ep": 2, "edp": 2}
    ep_hooks.attach(_plain(), config=_config(axes={"ranks": sizes}))


def other_holders() -> None:
    """The replicas that ranks declare do not fit together."""
    model = _plain()
    world = dist.get_world_size()
    groups = ((0, world - 1),) if _odd() else ((0, 1),)
    ep_hooks.declare(model.dense, ep_hooks.Domain.of_replicas("pairs", groups))
    ep_hooks.attach(model, config=_config())


def holders_outside_the_run() -> None:
    model = _plain()
    if _odd():
        ep_hooks.declare(model.dense, ep_hooks.Domain.of_replicas("pairs", ((dist.get_rank(), 99),)))
    ep_hooks.attach(model, config=_config())


def rule_without_match() -> None:
    ep_hooks.attach(_plain(), config=_config(domains=[*RULES[:1], {"match": "exports.*", "domain": "dense"}]))


def two_rules_on_one_rank() -> None:
    """Only the last rank has the parameter that two rules match."""
    rules = [*RULES[:1], {"match": "head*", "domain": "dense"}, {"match": "head.*", "domain": "expert"}]
    model = _plain()
    if _odd():
        model.head = nn.Linear(2, 2)
    ep_hooks.attach(model, config=_config(domains=rules))


def missing_axis() -> None:
    ep_hooks.attach(_plain(), config={"domains": RULES[:1]})


def undeclared_on_one_rank() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Parameter(torch.ones(2))

    model = _plain()
    if _odd():
        model.moe = Experts()
    ep_hooks.attach(model, config=_config(expert_containers=["*.Experts"]))


def exception_on_one_rank() -> None:
    """Something that is no error of ours."""
    from ep_hooks.integrations.pytorch import PyTorchAdapter

    original = PyTorchAdapter.sources

    def sources(self: Any, topology: Any) -> Any:
        if _odd():
            raise KeyError("broken on purpose")
        return original(self, topology)

    PyTorchAdapter.sources = sources  # type: ignore[method-assign]  # undone below
    try:
        ep_hooks.attach(_plain(), config=_config())
    finally:
        PyTorchAdapter.sources = original  # type: ignore[method-assign]  # as it was


def without_attach() -> None:
    """A declared parameter that differs, in the first call of the function."""
    parameter = nn.Parameter(torch.ones(3 if _odd() else 2))
    ep_hooks.declare(parameter, "dense")
    ep_hooks.clip_grad_norm_([parameter], 1.0)


DISAGREE = [
    (other_shape, "AgreementError", ["'dense'", "[3, 2]", "[2, 3]"]),
    (other_dtype, "AgreementError", ["'dense'", "float32", "bfloat16"]),
    (missing_on_a_replica, "AgreementError", ["'extra'", "has no such parameter"]),
    (frozen_on_a_replica, "AgreementError", ["'dense'", "has no such parameter"]),
    (other_name, "AgreementError", ["'dense'", "has no such parameter"]),
    (other_domain, "AgreementError", ["'dense'", "held by"]),
    (other_divisor, "AgreementError", ["'dense'", "partial"]),
    (pending_on_one_rank_only, "AgreementError", ["'dense'", "partial"]),
    (other_order_of_pending_reductions, "AgreementError", ["'dense'", "partial"]),
    (other_configuration, "AgreementError", ["the configuration"]),
    (other_rules, "AgreementError", ["the configuration"]),
    (other_mode, "AgreementError", ["the mode", "'enforce'", "'observe'"]),
    (other_version, "AgreementError", ["the ep_hooks version", "'0.0.0'"]),
    (other_axis, "AgreementError", ["the configuration"]),
    (other_holders, "AgreementError", ["'dense'"]),
    (holders_outside_the_run, "AgreementError", ["99"]),
    (rule_without_match, "ConfigError", ["'exports.*'", "matches no trainable parameter"]),
    (two_rules_on_one_rank, "DomainError", ["head", "two rules"]),
    (missing_axis, "TopologyError", ["'ep'"]),
    (undeclared_on_one_rank, "UndeclaredParameterError", ["moe.inner"]),
    (exception_on_one_rank, "KeyError", ["broken on purpose"]),
    (without_attach, "AgreementError", ["dense[0]", "[2]", "[3]"]),
]


def _names(value: Any) -> str:
    return value.__name__ if callable(value) else str(value) if isinstance(value, int) else ""


NEEDS_MORE_THAN_TWO = (other_order_of_pending_reductions, other_axis, other_holders)  # two axes, or three ranks


@pytest.mark.parametrize(
    ("world", "disagree", "error", "words"),
    [(world, *case) for world in (2, 4) for case in DISAGREE if world > 2 or case[0] not in NEEDS_MORE_THAN_TWO],
    ids=_names,
)
def test_all_ranks_fail_together(world: int, disagree: Callable[[], None], error: str, words: list[str]) -> None:
    for rank, outcome in enumerate(run_ranks(disagree, world, catch=True, timeout=30)):
        assert outcome.raised(error), (rank, outcome.error_type, outcome.error_text)
        for word in words:
            assert word in outcome.error_text, rank


def _first_difference() -> None:
    """Two parameters differ: the first one in the order of names is told, the same on all ranks."""
    ep_hooks.attach(_model(b=(2,) if _odd() else (3,), a=(2,) if _odd() else (3,), c=(1,)))


def test_the_first_difference_is_named() -> None:
    texts = {outcome.error_text for outcome in run_ranks(_first_difference, 3, catch=True, timeout=30)}
    assert len(texts) == 1
    assert "same piece of 'a'" in texts.pop()


def _tried_again() -> tuple[bool, float]:
    """A failed set-up leaves nothing behind: the model is as it was and can be attached."""
    from torch.nn.modules import module as torch_module

    hooks = len(torch_module._global_parameter_registration_hooks)
    model = _plain(dense=(2, 3) if _odd() else (3, 2))
    before = dict(vars(model))
    with contextlib.suppress(ep_hooks.EPHooksError):
        ep_hooks.attach(model, config=_config())
    clean = vars(model) == before and len(torch_module._global_parameter_registration_hooks) == hooks
    model.dense = nn.Parameter(torch.ones(3, 2))
    model.dense.grad = torch.ones(3, 2)
    model.expert.grad = torch.ones(4)
    with ep_hooks.attach(model, config=_config()) as handle:
        return clean, float(handle.clip(1e6).norm)


def test_a_failed_set_up_leaves_nothing_behind() -> None:
    for clean, norm in run_ranks(_tried_again, 2):
        assert norm == pytest.approx((6 + 2 * 4) ** 0.5)
        assert clean


# ------------------------------------------------------------------------------------------------- may rightly differ


def _norm(model: nn.Module, config: dict[str, Any]) -> float:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with ep_hooks.attach(model, config=config) as handle:
        return float(handle.clip(1e6).norm) ** 2


def uneven_experts() -> float:
    """1, 2, 3, ... experts of four elements, and six dense elements."""
    model = _model(dense=(3, 2), **{f"expert_{dist.get_rank()}_{i}": (4,) for i in range(dist.get_rank() + 1)})
    return _norm(model, _config())


def experts_of_one_local_name() -> float:
    """Every rank calls its experts the same, and they are cut differently."""
    return _norm(_model(dense=(3, 2), expert=(4 + dist.get_rank(),)), _config())


def a_rank_without_experts() -> float:
    model = _plain()
    if _odd():
        del model.expert
    return _norm(model, _config())


def a_rank_without_parameters() -> float:
    return _norm(_model() if _odd() else _model(**{f"expert_{dist.get_rank()}": (4,)}), _config())


def pipeline_stages() -> float:
    """Stages of one layer each, which both call `layer`, with other shapes; a head on the last one."""
    axes = {"pp": 2, "dp": dist.get_world_size() // 2}
    stage = dist.get_rank() // axes["dp"]
    model = _model(layer=(3 + stage,), **({"head": (2,)} if stage else {}))
    return _norm(model, {"axes": axes})


def tied_over_stages() -> float:
    """An embedding on the first and the last stage, to be summed (1 + 1, squared, twice) and counted once."""
    axes = {"pp": 2, "dp": dist.get_world_size() // 2}
    stage = dist.get_rank() // axes["dp"]
    model = _model(embedding=(2,), **{f"layer{stage}": (3,)})
    tied = {"pp": {"partial": "sum", "at": [0, -1]}, "dp": "replicate"}
    rules = [{"match": "embedding", "domain": tied}]
    return _norm(model, {"axes": axes, "domains": rules, "sync": {"already_reduced": "off"}})


def rule_that_matches_on_one_rank() -> float:
    rules = [*RULES[:1], {"match": "only_here", "domain": "expert"}]
    return _norm(_plain(**({"only_here": (2,)} if _odd() else {})), _config(domains=rules))


def ranks_that_never_call() -> float:
    """The rank set is the first two ranks; the others do something else, here with a process group of their own."""
    if dist.get_rank() > 0:
        ProcessGroups().get((1, 2))
    if dist.get_rank() > 1:
        return -1.0
    return _norm(_plain(), {"axes": {"ep": 2}, "ranks": [0, 1], "domains": RULES[:1]})


def groups_that_overlap() -> float:
    """Each of three ranks takes part in another number of sums, over groups that overlap."""
    model = _model(first=(1,), second=(1,))
    for parameter, apart, ranks in ((model.first, 0, (1, 2)), (model.second, 2, (0, 1))):
        axis = Axis("pair", (ranks,))
        domain = ep_hooks.Domain.of_replicas("pair", ((apart,), ranks), [(axis, ep_hooks.partial("sum"))])
        ep_hooks.declare(parameter, domain)
    return _norm(model, {"sync": {"already_reduced": "off"}})


def other_groups_of_one_axis() -> float:
    """An explicit axis of uneven groups, over which sums of different sizes run."""
    world = dist.get_world_size()
    axis = Axis("uneven", ((0,), tuple(range(1, world))))
    model = _model(dense=(3, 2), shared=(1,))
    replicas = ep_hooks.Domain.of_replicas("shared", axis.groups, [(axis, ep_hooks.partial("sum"))])
    ep_hooks.declare(model.shared, replicas)
    return _norm(model, {"sync": {"already_reduced": "off"}})


MAY_DIFFER = [
    (uneven_experts, 2, 6 + 4 * 3),
    (uneven_experts, 4, 6 + 4 * 10),
    (experts_of_one_local_name, 3, 6 + 4 + 5 + 6),
    (a_rank_without_experts, 2, 6 + 4),
    (a_rank_without_experts, 4, 6 + 12),
    (a_rank_without_parameters, 2, 4),
    (a_rank_without_parameters, 3, 8),
    (pipeline_stages, 2, 3 + 4 + 2),
    (pipeline_stages, 4, 3 + 4 + 2),
    (tied_over_stages, 2, 2 * 4 + 6),
    (tied_over_stages, 4, 2 * 4 + 6),
    (rule_that_matches_on_one_rank, 2, 6 + 8 + 2),
    (other_groups_of_one_axis, 2, 6 + 1 + 1),
    (other_groups_of_one_axis, 3, 6 + 1 + 4),
    (groups_that_overlap, 3, 2 * (1 + 4)),
]


@pytest.mark.parametrize(("differ", "world", "squared"), MAY_DIFFER, ids=_names)
def test_ranks_that_rightly_differ(differ: Callable[[], float], world: int, squared: float) -> None:
    assert run_ranks(differ, world, timeout=30) == pytest.approx([squared] * world, rel=1e-6)


def test_ranks_outside_the_rank_set_need_not_call() -> None:
    assert run_ranks(ranks_that_never_call, 3, timeout=30) == pytest.approx([14, 14, -1])
