"""The meeting of all ranks before the first collective of a set-up, through the store of the default process group.

A collective whose other members never come is a hang, and a rank whose arguments are wrong may not even know whom it
would have had to meet. So ranks first write into the store that they have come, or why they cannot, and look for the
others. Nobody enters a collective before everybody has come.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ep_hooks.agreement import portable
from ep_hooks.errors import AgreementError
from ep_hooks.groups import distributed_rank, is_distributed

__all__ = ["meet", "tell"]

logger = logging.getLogger("ep_hooks")

PATIENCE = 30.0
"""Seconds after which a rank that waits says for whom, and gives up on ranks that have failed or switched off."""

_FAREWELL = 5.0
"""Seconds that a failing rank stays, so that the others can read why before the store's host is gone."""
_FIRST_POLL, _SLOWEST_POLL = 1e-3, 0.25
_MOST_NAMED = 8

_COUNTS: list[tuple[Any, dict[tuple[int, ...], int]]] = []


def tell(what: str) -> None:
    """Leave word for ranks that will wait for this one in vain, such as "switched off"."""
    store = _store()
    if store is not None:
        _write(store, f"ep_hooks/word/{distributed_rank()}", ("told", what))


def meet(ranks: Sequence[int], error: Exception | None) -> None:
    """Wait until all of ``ranks`` have called this, then raise on all of them if one has an error.

    Args:
        ranks: the rank set, ascending; as well as this rank knows it, if it has an error.
        error: why this rank cannot go on.

    Runs no collective: a few small entries in the store per rank, polled at most four times a second.

    Raises:
        Exception: ``error`` itself; on the other ranks one of the same class that names the rank.
        AgreementError: a rank waits for another rank set, has switched ep_hooks off, or does not come within the
            time-out of the default process group.
    """
    store = _store() if len(ranks) > 1 else None
    if store is None:
        if error is not None:
            raise error
        return
    me, ranks = distributed_rank(), tuple(ranks)
    counts = _counts()
    count = counts[ranks] = counts.get(ranks, 0) + 1
    room = f"ep_hooks/set-up/{hashlib.sha1(str(ranks).encode(), usedforsecurity=False).hexdigest()}/{count}"
    _write(store, f"ep_hooks/word/{me}", ("waits", ranks, count))
    store.set(f"{room}/{me}", "1")
    if error is not None:
        _write(store, f"{room}/error/{store.add(f'{room}/errors', 1)}", (me, portable(error)))
        _write(store, f"ep_hooks/word/{me}", ("failed", portable(error)))
    if store.add(f"{room}/count", 1) == len(ranks):
        store.set(f"{room}/ready", "1")
    try:
        _wait(store, room, ranks, alone=error is not None)
    except Exception as hopeless:
        if error is None:
            _write(store, f"ep_hooks/word/{me}", ("failed", portable(hopeless)))
            raise
    if error is None:
        _write(store, f"ep_hooks/word/{me}", ("met", ranks, count))
        if store.add(f"{room}/errors", 0) == 0:
            return
    _part(store, room, len(ranks))
    if error is not None:
        raise error
    rank, (text, kind) = _read(store, f"{room}/error/1")
    raise kind(f"rank {rank} failed: {text}")


def _wait(store: Store, room: str, ranks: tuple[int, ...], *, alone: bool) -> None:
    """Poll until everybody is in the room; ``alone``: this rank has failed, and waits only for a while."""
    start, said, pause = time.monotonic(), False, _FIRST_POLL
    limit = max(store.timeout.total_seconds(), PATIENCE)  # type: ignore[attr-defined]  # torch does not declare it
    while not store.check([f"{room}/ready"]):
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_POLL)
        waited = time.monotonic() - start
        if alone and waited > _FAREWELL:
            return
        if pause < _SLOWEST_POLL:
            continue
        late = waited > limit
        if (waited > PATIENCE and not said) or late or int(waited / _SLOWEST_POLL) % 8 == 0:
            absent = _absent(store, room, ranks)
            _raise_if_hopeless(absent, ranks, patient=waited <= PATIENCE)
            where = "\n".join(f"  rank {rank}: {_in_words(word)}" for rank, word in absent)
            if late and absent:
                raise AgreementError(
                    f"these ranks of {_shown(ranks)} did not come to the set-up of ep_hooks in {waited:.0f} s:\n{where}"
                )
            if waited > PATIENCE and not said and absent:
                said = True
                logger.warning("ep_hooks: waiting in the set-up over ranks %s for\n%s", _shown(ranks), where)


def _absent(store: Store, room: str, ranks: Sequence[int]) -> list[tuple[int, Any]]:
    """The first ranks that are not in the room, and the last word of each."""
    absent: list[tuple[int, Any]] = []
    for rank in ranks:
        if len(absent) < _MOST_NAMED and not store.check([f"{room}/{rank}"]):
            word = f"ep_hooks/word/{rank}"
            absent.append((rank, _read(store, word) if store.check([word]) else None))
    return absent


def _raise_if_hopeless(absent: Sequence[tuple[int, Any]], ranks: tuple[int, ...], *, patient: bool) -> None:
    for rank, word in absent:
        match word:
            case ("waits", tuple() as other, int(count)) if (
                distributed_rank() in other and _counts().get(other, 0) < count
            ):
                # It cannot leave its room without this rank, nor this rank without it.
                raise AgreementError(
                    f"rank {distributed_rank()} and rank {rank} disagree about the rank set: {_shown(ranks)} and "
                    f"{_shown(other)}. Give all ranks the same `ranks`, axes and meshes."
                )
            case ("failed", (text, kind)) if not patient:
                raise kind(f"rank {rank} failed: {text}")
            case ("told", what) if not patient:
                raise AgreementError(
                    f"rank {rank} does not take part: it has ep_hooks {what}, while rank {distributed_rank()} has not. "
                    "Start all ranks with the same configuration and environment."
                )


def _in_words(word: Any) -> str:
    match word:
        case ("waits" | "met" as what, tuple() as other, int()):
            return f"{'waits in' if what == 'waits' else 'last did'} a set-up over ranks {_shown(other)}"
        case ("failed", (text, _)):
            return f"failed: {text}"
        case ("told", what):
            return f"has ep_hooks {what}"
        case _:
            return "has not called ep_hooks"


def _part(store: Store, room: str, ranks: int) -> None:
    """Stay until all have read the error: the process that hosts the store may be about to end."""
    store.add(f"{room}/left", 1)
    start = time.monotonic()
    while store.add(f"{room}/left", 0) < ranks and time.monotonic() - start < _FAREWELL:
        time.sleep(0.01)


def _shown(ranks: Sequence[int]) -> str:
    return f"{list(ranks)}" if len(ranks) <= 16 else f"{list(ranks[:16])}... ({len(ranks)})"


def _store() -> Store | None:
    """The default group's store; ``None`` where it has none, as with MPI."""
    if not is_distributed() or dist.group.WORLD is None:
        return None
    try:
        store: Store = dist.group.WORLD.get_group_store()
    except (AttributeError, RuntimeError):
        return None
    return store


def _write(store: Store, key: str, value: Any) -> None:
    store.set(key, base64.b64encode(pickle.dumps(value)).decode())


def _read(store: Store, key: str) -> Any:
    return pickle.loads(base64.b64decode(store.get(key)))


def _counts() -> dict[tuple[int, ...], int]:
    """Rank set -> set-ups over it so far, under today's default group."""
    world = dist.group.WORLD
    if not _COUNTS or _COUNTS[0][0] is not world:
        _COUNTS[:] = [(world, {})]
    return _COUNTS[0][1]
