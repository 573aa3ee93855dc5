"""For a framework's own tests: run a function on several gloo ranks, and assert domains and weights of reductions.

``pip install ep-hooks`` registers the fixture ``ep_hooks_ranks`` with pytest. The functions work without pytest too.
"""

from __future__ import annotations

import datetime
import fnmatch
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from ep_hooks.api import Handle, explain, handle_of, probe
from ep_hooks.errors import ConfigError
from ep_hooks.findings import Severity, worst_first

__all__ = ["assert_domains", "assert_probe", "run_on_ranks"]

_MOST = 20


def run_on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``function(*arguments)`` on new processes in one gloo group; results by rank.

    Args:
        function: at the top level of a module, since the processes import it.
        arguments: picklable, as the results must be.
        timeout: seconds after which the processes are killed. Collectives give up a little earlier.

    Raises:
        AssertionError: a rank failed, died or hung; with the traceback of each.
    """
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    outcomes: dict[int, tuple[bool, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_rank, args=(function, arguments, rank, ranks, store, timeout, answers), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        while len(outcomes) < ranks and time.monotonic() < end:
            dead = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            try:
                rank, fine, value = answers.get(timeout=0.2)
                outcomes[rank] = fine, value
            except queue.Empty:
                if any(rank not in outcomes for rank in dead):
                    break
        for process in processes:
            if len(outcomes) < ranks:
                process.kill()
            process.join(10)
    failed = [f"rank {rank}:\n{value}" for rank, (fine, value) in sorted(outcomes.items()) if not fine]
    for rank, process in enumerate(processes):
        if rank not in outcomes:
            code = process.exitcode
            failed.append(f"rank {rank}: " + ("hung, and was killed" if code == -9 else f"died with exit code {code}"))
    if failed:
        raise AssertionError(f"{function.__name__} failed on {ranks} ranks\n" + "\n".join(failed))
    return [outcomes[rank][1] for rank in range(ranks)]


def _rank(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    rank: int,
    ranks: int,
    store: str,
    timeout: float,
    answers: Any,
) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=max(1.0, 0.8 * timeout))
    try:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
        answers.put((rank, True, function(*arguments)))
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def assert_domains(target: nn.Module | Handle, expected: Mapping[str, str]) -> None:
    """Assert the reduction domain of every trainable parameter of an attached model, as this rank sees it.

    Args:
        expected: glob over logical names -> name of the domain; every parameter must match one.

    Raises:
        AssertionError: names each parameter whose domain is another, and patterns that match nothing.
    """
    session = _handle(target).session
    entries = session.entries if session is not None else ()
    used: set[str] = set()
    wrong = []
    for entry in entries:
        patterns = [pattern for pattern in expected if fnmatch.fnmatchcase(entry.id, pattern)]
        used.update(patterns)
        wanted = {expected[pattern] for pattern in patterns}
        if wanted != {entry.domain.name}:
            said = " and ".join(sorted(wanted)) or "nothing (no pattern matches it)"
            wrong.append(f"{entry.id}: is {entry.domain.name}, expected {said}\n{explain(target, entry.id)}")
    wrong += [f"{pattern!r} matches no trainable parameter" for pattern in expected if pattern not in used]
    if wrong:
        raise AssertionError("\n".join(wrong[:_MOST]))


def assert_probe(
    target: nn.Module | Handle, reduce: Callable[[], object] | None = None, *, undetermined: Sequence[str] = ()
) -> None:
    """Assert that every rank counts what the domains predict in every reduced gradient. Call it on all ranks.

    Args:
        reduce: the reduction that the training loop runs by hand, as for :func:`ep_hooks.probe`.
        undetermined: globs over logical names that need not be measurable.

    Raises:
        AssertionError: the faults, worst first, and parameters that could not be measured.
    """
    result = probe(target, reduce)
    wrong = [str(finding) for finding in worst_first(result.findings) if finding.severity > Severity.INFO]
    for row in result.rows:
        if row.verdict == "undetermined" and not any(fnmatch.fnmatchcase(row.id, glob) for glob in undetermined):
            wrong.append(f"{row.id} could not be measured: {row.why}")
    if wrong:
        raise AssertionError("\n".join(wrong[:_MOST]))


def _handle(target: nn.Module | Handle) -> Handle:
    handle = target if isinstance(target, Handle) else handle_of(list(target.parameters()))
    if handle is None:
        raise ConfigError("an attached model is needed: call ep_hooks.attach(model) first")
    return handle
