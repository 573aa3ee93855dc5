"""Sessions for calls without ``attach``: found again by their parameters, and changed on all ranks together.

``clip_grad_norm_(parameters, ...)`` is called with a list that may change on one rank only (an expert is frozen there).
That rank has to agree on the new list, while to the others nothing has changed and they go straight to the norm's
all-reduce. So it joins that all-reduce with zeros and a request; the others see the request and classify again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ep_hooks.adapter import Adapter
from ep_hooks.agreement import gather_objects, raise_first
from ep_hooks.config import EPHooksConfig
from ep_hooks.errors import EPHooksError
from ep_hooks.modes import Mode
from ep_hooks.norm import packed_norm
from ep_hooks.session import AD_HOC_SLOTS, Answer, Session

__all__ = ["session_for"]

_MOST = 4
"""Sessions kept; each keeps its parameters alive."""

_SESSIONS: dict[tuple[Any, ...], tuple[list[weakref.ref[Tensor]], Session]] = {}
_LAST: dict[tuple[int, ...], Session] = {}
"""Rank set -> a session over it: its group carries the request of a rank to which the parameters are new."""


def session_for(
    key: tuple[Any, ...],
    parameters: Sequence[Tensor],
    adapter: Adapter,
    config: EPHooksConfig,
    mode: Mode,
    norm_type: float,
) -> Session:
    """The session of these parameters; a collective over the rank set if they are new.

    Args:
        key: what else distinguishes calls: meshes, group, assumptions.
        adapter: used if the parameters are new.
        norm_type: of the call, since the collective that a new rank joins depends on it.
    """
    key = (*key, mode, tuple(map(id, parameters)))
    if key in _SESSIONS:
        references, session = _SESSIONS[key]
        # An id may have been reused since; the parameters must be the same objects.
        if all(reference() is parameter for reference, parameter in zip(references, parameters, strict=True)):
            return session
        del _SESSIONS[key]
    last = _LAST.get(_rank_set(adapter))
    if last is not None and last.host_decides and last.group is not None:
        packed_norm({}, len(AD_HOC_SLOTS), norm_type, last.group, last.device, requests=1)
        answers = gather_objects(Answer(changed=True), last.group)
        raise_first(None, [answer.error for answer in answers], last.topology.ranks)
    session = Session(adapter, config, mode, ad_hoc=True)
    while len(_SESSIONS) >= _MOST:
        _SESSIONS.pop(next(iter(_SESSIONS)))
    _SESSIONS[key] = ([weakref.ref(parameter) for parameter in parameters], session)
    _LAST[session.topology.ranks] = session
    return session


def _rank_set(adapter: Adapter) -> tuple[int, ...]:
    try:
        return adapter.topology().ranks
    except EPHooksError:  # raised again, on all ranks together, when the session is built
        return ()
