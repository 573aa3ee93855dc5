"""Run a function on every rank of a small gloo world, in processes that stay up between tests.

A pool of ``world`` processes is started the first time a test asks for that world size and serves every later
test. Processes are forked from a fork server that has torch imported and no threads running, so that starting or
restarting a pool costs a fraction of a second and not one import of torch per rank.

What a test may rely on:

* the default process group is initialised (gloo, a TCP store on a port the system chose) and torch runs one thread;
* ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set as ``torchrun`` sets them;
* subgroups may be created freely: a pool that has gathered too many is replaced before the next run;
* after a failure that leaves ranks at different points of the program the pool is replaced, so that no test sees
  the half-finished collective of another one.

Workers write to a log file and not to the terminal; the tail of the log is part of every failure message.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["DIED", "TIMED_OUT", "Outcome", "RankFailure", "run_ranks", "shutdown"]

MAX_WORLD = 4
#: A pool whose ranks hold more process groups than this is replaced (each one costs sockets and threads).
MAX_GROUPS = 48
#: After the first rank has failed, seconds the others get to finish: they may be waiting for it for ever.
GRACE = 10.0
START_TIMEOUT = 120.0

TIMED_OUT = "TimedOut"
DIED = "RankDied"

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank made of the call.

    Attributes:
        value: The returned value, ``None`` after an error.
        error_type: Class name of the exception, ``TIMED_OUT`` for a rank that had to be killed, ``DIED`` for one
            whose process ended by itself, ``None`` when the call returned.
        error_text: ``str(exception)``; for ``TIMED_OUT`` the Python stacks of all the rank's threads.
        error_bases: Class names along the exception's method resolution order.
        details: Traceback and the tail of the rank's log, for failure messages.
        groups: Process groups the rank holds after the call.
    """

    value: Any = None
    error_type: str | None = None
    error_text: str = ""
    error_bases: tuple[str, ...] = ()
    details: str = ""
    groups: int = 0

    @property
    def ok(self) -> bool:
        return self.error_type is None

    @property
    def timed_out(self) -> bool:
        return self.error_type == TIMED_OUT

    def raised(self, error: type[BaseException] | str) -> bool:
        """Whether the rank raised ``error`` or a subclass of it."""
        return (error if isinstance(error, str) else error.__name__) in self.error_bases


class RankFailure(AssertionError):  # noqa: N818 - a test failure, not an error of the code
    """At least one rank raised, died or hung. ``outcomes`` holds what every rank did."""

    def __init__(self, what: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        parts = [what]
        for rank, outcome in enumerate(self.outcomes):
            if outcome.ok:
                parts.append(f"--- rank {rank}: returned")
            else:
                parts.append(f"--- rank {rank}: {outcome.error_type}: {outcome.error_text}\n{outcome.details}".rstrip())
        super().__init__("\n".join(parts))


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    catch: bool = False,
    expect_hang: bool = False,
    fresh: bool = False,
) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a world of ``world`` processes and collect the results in rank order.

    Args:
        fn: A module-level function; it travels by name, so its module must be importable.
        world: Number of ranks, 1 to 4.
        args: Positional arguments, the same on every rank; pickled.
        timeout: Seconds until a rank that has not answered is taken to hang. The pool is then killed.
        catch: Return an :class:`Outcome` per rank, errors and hangs included, and raise nothing.
        expect_hang: As ``catch``, and fail if no rank hangs.
        fresh: Use the pool for this call only; for functions that leave global state behind.

    Raises:
        RankFailure: A rank raised, died or hung and neither ``catch`` nor ``expect_hang`` was asked for.
    """
    if not 1 <= world <= MAX_WORLD:
        raise ValueError(f"world must be 1 to {MAX_WORLD}, got {world}")
    if fresh:
        _discard(world)
    pool = _pool(world)
    try:
        outcomes = pool.run(fn, args, timeout)
    except BaseException:
        _discard(world)
        raise
    if fresh or not _reusable(outcomes):
        _discard(world)
    name = f"{fn.__module__}.{fn.__qualname__}"
    if expect_hang and not any(outcome.timed_out for outcome in outcomes):
        raise RankFailure(f"{name} was expected to hang on {world} ranks and did not", outcomes)
    if catch or expect_hang:
        return outcomes
    if not all(outcome.ok for outcome in outcomes):
        raise RankFailure(f"{name} failed on {world} ranks", outcomes)
    return [outcome.value for outcome in outcomes]


def shutdown() -> None:
    """End every pool. A later :func:`run_ranks` starts new ones."""
    for world in list(_pools):
        _discard(world)


def _reusable(outcomes: Sequence[Outcome]) -> bool:
    """Whether the ranks still stand at the same point: all returned, or all raised the same thing."""
    kinds = {outcome.error_type for outcome in outcomes}
    if len(kinds) > 1 or kinds & {TIMED_OUT, DIED}:
        return False
    return max(outcome.groups for outcome in outcomes) <= MAX_GROUPS


# ---------------------------------------------------------------------------------------------------- parent side

_pools: dict[int, _Pool] = {}


def _pool(world: int) -> _Pool:
    pool = _pools.get(world)
    if pool is None or not pool.alive():
        _discard(world)
        pool = _pools[world] = _Pool(world)
    return pool


def _discard(world: int) -> None:
    pool = _pools.pop(world, None)
    if pool is not None:
        pool.kill()


def _context() -> Any:
    """The fork server's context. The server inherits the environment of its first use."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


class _Pool:
    """``world`` worker processes and a pipe to each."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix=f"ranks{world}-"))
        self.workers: list[Any] = []
        self.pipes: list[mp.connection.Connection] = []
        context = _context()
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                worker = context.Process(
                    target=_serve, args=(rank, world, theirs, str(self.folder)), name=f"rank{rank}", daemon=True
                )
                worker.start()
                theirs.close()
                self.workers.append(worker)
                self.pipes.append(ours)
            port = self._receive(0)
            for pipe in self.pipes[1:]:
                pipe.send(port)
            for rank in range(world):
                self._receive(rank)
        except BaseException:
            self.kill()
            raise

    def _receive(self, rank: int) -> Any:
        if not self.pipes[rank].poll(START_TIMEOUT):
            raise RuntimeError(f"rank {rank} of {self.world} did not start in {START_TIMEOUT:.0f} s\n{self._log(rank)}")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            raise RuntimeError(f"rank {rank} of {self.world} died while starting\n{self._log(rank)}") from None

    def alive(self) -> bool:
        return all(worker.is_alive() for worker in self.workers)

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Outcome]:
        """One call on all ranks; returns when every rank has answered, died or been given up."""
        message = pickle.dumps((list(sys.path), pickle.dumps((fn, args))))
        for pipe in self.pipes:
            pipe.send_bytes(message)
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.world:
            waiting = [rank for rank in range(self.world) if rank not in outcomes]
            by_pipe = {self.pipes[rank]: rank for rank in waiting}
            ready = mp.connection.wait(list(by_pipe), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes.update(self._give_up(waiting, timeout))
                break
            for pipe in ready:
                rank = by_pipe[pipe]
                outcomes[rank] = self._collect(rank)
                if not outcomes[rank].ok:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return [outcomes[rank] for rank in range(self.world)]

    def _collect(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self.workers[rank].join(5)
            code = self.workers[rank].exitcode
            return Outcome(error_type=DIED, error_text=f"process ended with exit code {code}", details=self._log(rank))
        return outcome if outcome.ok else replace(outcome, details=f"{outcome.details}{self._log(rank)}")

    def _give_up(self, ranks: Iterable[int], timeout: float) -> dict[int, Outcome]:
        """Have the silent ranks write their stacks; the caller replaces the pool."""
        ranks = list(ranks)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        text = "no answer in time ({:g} s, or {:g} s after another rank failed); Python stacks:\n{}"
        return {
            rank: Outcome(
                error_type=TIMED_OUT,
                error_text=text.format(timeout, GRACE, _read(self.folder / f"stack{rank}")),
                details=self._log(rank),
            )
            for rank in ranks
        }

    def _log(self, rank: int) -> str:
        tail = _read(self.folder / f"log{rank}")[-2000:].strip()
        return f"[log of rank {rank}]\n{tail}\n" if tail else ""


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


# ---------------------------------------------------------------------------------------------------- worker side


def _serve(rank: int, world: int, pipe: mp.connection.Connection, folder: str) -> None:
    """Main function of a worker: join the world, then answer calls until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect(Path(folder) / f"log{rank}")
    stacks = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115 - stays open: signal handlers write to it
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _join(rank, world, pipe)
    pipe.send("ready")
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)
        pipe.send_bytes(_answer(message))


def _redirect(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _exit_with_parent() -> None:
    """A rank stuck in a collective must not outlive the test session."""
    parent = mp.parent_process()
    if parent is not None:
        mp.connection.wait([parent.sentinel])
        os._exit(1)


def _join(rank: int, world: int, pipe: mp.connection.Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), world, is_master=False)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _answer(message: bytes) -> bytes:
    """Unpickle and run one call; the pickled :class:`Outcome`, whatever happens."""
    import torch
    import torch.distributed as dist

    try:
        path, call = pickle.loads(message)
        sys.path[:] = path
        fn, args = pickle.loads(call)
        outcome = Outcome(value=fn(*args))
    except BaseException as error:
        outcome = Outcome(
            error_type=type(error).__name__,
            error_text=str(error),
            error_bases=tuple(base.__name__ for base in type(error).__mro__),
            details=traceback.format_exc(),
        )
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else MAX_GROUPS + 1
    outcome = replace(outcome, groups=groups)
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # a result that cannot travel is the test's mistake, not the pool's
        return pickle.dumps(
            Outcome(
                error_type=type(error).__name__,
                error_text=f"the result of the call cannot be pickled: {error}",
                groups=outcome.groups,
            )
        )


atexit.register(shutdown)
