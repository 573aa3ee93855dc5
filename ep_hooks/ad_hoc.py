"""Sessions for calls without ``attach``: found again by their parameters, and changed on all ranks together.

``clip_grad_norm_(parameters, ...)`` is called with a list that may change on one rank only (an expert is frozen there).
That rank has to agree on the new list, while to the others nothing has changed and they go straight to the norm's
all-reduce. So it joins that all-reduce with zeros and a request; the others see the request and classify again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ep_hooks.adapter import Adapter
from ep_hooks.agreement import gather_objects, portable, raise_first
from ep_hooks.config import EPHooksConfig
from ep_hooks.errors import EPHooksError
from ep_hooks.groups import ProcessGroups, is_distributed
from ep_hooks.modes import Mode
from ep_hooks.norm import check_norm_type, packed_norm
from ep_hooks.session import AD_HOC_SLOTS, Answer, Session

__all__ = ["session_for"]

_MOST = 4
"""Sessions kept; each keeps its parameters alive."""

_SESSIONS: dict[tuple[Any, ...], tuple[list[weakref.ref[Tensor]], Session]] = {}
_AGREED: dict[tuple[int, ...], ProcessGroup] = {}
"""Rank set -> its group, once a session over it has been agreed on. From then on a rank to which parameters are new
cannot know whether they are new to the others. With an accelerator, where nobody looks at the result on the host, the
list must change on all ranks together."""


def session_for(
    key: tuple[Any, ...],
    parameters: Sequence[Tensor],
    make_adapter: Callable[[], Adapter],
    config: EPHooksConfig,
    mode: Mode,
    norm_type: float,
    problem: Exception | None = None,
) -> Session:
    """The session of these parameters; a collective over the rank set if they are new.

    Args:
        key: what else distinguishes calls: meshes, group, assumptions.
        make_adapter: called if the parameters are new.
        norm_type: of the call, since the collective that a new rank joins depends on it.
        problem: why this rank cannot go on; if the parameters are new, it is raised on all ranks together.
    """
    key = (*key, mode, tuple(map(id, parameters)))
    if key in _SESSIONS:
        references, session = _SESSIONS[key]
        # An id may have been reused since; the parameters must be the same objects.
        if all(reference() is parameter for reference, parameter in zip(references, parameters, strict=True)):
            return session
        _SESSIONS.pop(key)[1].close()
    adapter = make_adapter()
    ranks = _rank_set(adapter)
    group = _AGREED.get(ranks)
    if group is not None and group is _group(ranks):
        power = 2.0
        with contextlib.suppress(TypeError, ValueError):  # the session tells the others what is wrong with it
            power = check_norm_type(norm_type)
        packed_norm({}, len(AD_HOC_SLOTS), power, group, torch.device("cpu"), requests=1)
        answers = gather_objects(Answer(portable(problem), changed=True), group)
        raise_first(problem, [answer.error for answer in answers], ranks)
    session = Session(adapter, config, mode, ad_hoc=True, problem=problem)
    while len(_SESSIONS) >= _MOST:
        _SESSIONS.pop(next(iter(_SESSIONS)))[1].close()
    _SESSIONS[key] = ([weakref.ref(parameter) for parameter in parameters], session)
    if session.group is not None and session.host_decides:
        _AGREED[session.topology.ranks] = session.group
    return session


def _group(ranks: tuple[int, ...]) -> ProcessGroup | None:
    """The group of ``ranks`` today; another one if torch.distributed was initialised again."""
    return ProcessGroups().get(ranks) if is_distributed() else None


def _rank_set(adapter: Adapter) -> tuple[int, ...]:
    try:
        return adapter.topology().ranks
    except EPHooksError:  # raised again, on all ranks together, when the session is built
        return ()
