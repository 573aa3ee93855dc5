"""``ep-hooks doctor``: installed versions against the tested ones, and a norm and clip on two real processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import queue
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ep_hooks import registry
from ep_hooks.errors import EPHooksError
from ep_hooks.modes import ENVIRONMENT_VARIABLE
from ep_hooks.version import __version__

__all__ = ["Measured", "check_two_processes", "run_doctor", "version_rows"]

WORLD = 2
TIMEOUT = 50.0
MAX_NORM = 1.3

# Pythagoras twice: sqrt(3^2 + 4^2 + 12^2) = 13, while the ranks alone see sqrt(3^2 + 4^2) and sqrt(3^2 + 12^2).
DENSE, EXPERTS, TRUE_NORM = 3.0, (4.0, 12.0), 13.0
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank saw.

    Attributes:
        stock: norm from ``torch.nn.utils.clip_grad_norm_``.
        stock_dense: gradient of the dense parameter after torch's clip.
        ours: norm from ``ep_hooks.clip_grad_norm_``.
        dense: gradient of the dense parameter after our clip.
        expert: gradient of this rank's expert after our clip.
    """

    stock: float
    stock_dense: float
    ours: float
    dense: float
    expert: float


def run_doctor() -> int:
    """Print the report; the last line is ``doctor: OK`` or ``doctor: FAILED``.

    Returns:
        Exit status, 0 or 1. Versions outside the tested range are reported and do not fail the check.
    """
    print(f"ep_hooks {__version__} | Python {platform.python_version()} | {platform.system()} {platform.machine()}")
    fine = _print_versions()
    print(
        f"\nTwo processes (gloo, CPU): a dense parameter on both ranks, another expert on each; true norm {TRUE_NORM:g}"
    )
    started = time.monotonic()
    try:
        measured = check_two_processes()
    except (RuntimeError, OSError) as error:
        print(f"  {error}")
        fine = False
    else:
        for rank, seen in enumerate(measured):
            print(
                f"  rank {rank}: torch says {seen.stock:.6g} (dense gradient clipped to {seen.stock_dense:.6g}), "
                f"ep_hooks says {seen.ours:.6g} (to {seen.dense:.6g})"
            )
        wrong = _wrong(measured)
        for line in wrong:
            print(f"  wrong: {line}")
        fine = fine and not wrong
    print(f"  took {time.monotonic() - started:.1f} s")
    print(f"doctor: {'OK' if fine else 'FAILED'}", flush=True)
    return 0 if fine else 1


def version_rows() -> list[tuple[str, str, str, str, str]]:
    """Adapter, distribution, installed version, tested range and verdict, one row per tested distribution.

    Raises:
        AdapterError: the adapters cannot be listed.
    """
    rows = []
    for name in registry.adapter_names():
        try:
            adapter = registry.adapter(name)
        except EPHooksError as error:
            rows.append((name, "-", "-", "-", f"BROKEN: {error}"))
            continue
        for distribution, tested in sorted(adapter.tested_versions.items()):
            found = registry.installed_version(distribution)
            span = tested[0] if tested[0] == tested[1] else f"{tested[0]} to {tested[1]}"
            if found is None:
                verdict = "not installed, adapter idle"
            elif registry.is_tested(found, tested):
                verdict = "tested"
            else:
                verdict = "UNTESTED: enforce falls back to observe"
            rows.append((name, distribution, found or "-", span, verdict))
    return rows


def check_two_processes() -> list[Measured]:
    """Run the public API on two processes that talk over gloo.

    Raises:
        RuntimeError: a process failed or did not finish in time; carries its traceback.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    answers: dict[int, Measured | str] = {}
    with tempfile.TemporaryDirectory(prefix="ep-hooks-doctor-") as folder:
        store = Path(folder) / "store"
        workers = [
            context.Process(target=_worker, args=(rank, str(store), results), daemon=True) for rank in range(WORLD)
        ]
        try:
            for worker in workers:
                worker.start()
            deadline = time.monotonic() + TIMEOUT
            while len(answers) < WORLD and not any(isinstance(answer, str) for answer in answers.values()):
                try:
                    rank, answer = results.get(timeout=0.2)
                    answers[rank] = answer
                except queue.Empty:
                    dead = [worker.exitcode for worker in workers if worker.exitcode]
                    if dead:
                        raise RuntimeError(f"a process ended by itself with exit code {dead[0]}") from None
                    if time.monotonic() > deadline:
                        missing = sorted(set(range(WORLD)) - set(answers))
                        raise RuntimeError(f"no answer from ranks {missing} within {TIMEOUT:g} s") from None
        finally:
            for worker in workers:
                if worker.pid is not None:
                    worker.join(2.0 if len(answers) == WORLD else 0.0)
                    worker.kill()
                    worker.join()
    measured = []
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, str):
            raise RuntimeError(f"rank {rank} failed:\n{answer}")
        measured.append(answer)
    return measured


def _worker(rank: int, store: str, results: Any) -> None:
    # The check is of what ep_hooks does when it is on, on this machine alone.
    os.environ.pop(ENVIRONMENT_VARIABLE, None)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        results.put((rank, _measure(rank, store)))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def _measure(rank: int, store: str) -> Measured:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import ep_hooks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
        dense, expert = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))

        def backward() -> None:
            dense.grad, expert.grad = torch.tensor([DENSE]), torch.tensor([EXPERTS[rank]])

        backward()
        stock = torch.nn.utils.clip_grad_norm_([dense, expert], MAX_NORM)
        stock_dense = _value(dense.grad)
        ep_hooks.declare(dense, "dense")
        ep_hooks.declare(expert, "expert")
        backward()
        ours = ep_hooks.clip_grad_norm_([dense, expert], MAX_NORM, mesh=mesh)
        return Measured(float(stock), stock_dense, float(ours), _value(dense.grad), _value(expert.grad))
    finally:
        dist.destroy_process_group()


def _value(gradient: Any) -> float:
    return float(gradient.item())


def _wrong(measured: list[Measured]) -> list[str]:
    """What differs from the exact result, in words."""
    wrong = []
    for rank, seen in enumerate(measured):
        if not math.isclose(seen.ours, TRUE_NORM, rel_tol=TOLERANCE):
            wrong.append(f"rank {rank}: norm {seen.ours!r}, expected {TRUE_NORM!r}")
        for label, found, before in (("dense", seen.dense, DENSE), ("expert", seen.expert, EXPERTS[rank])):
            expected = before * MAX_NORM / TRUE_NORM
            if not math.isclose(found, expected, rel_tol=TOLERANCE):
                wrong.append(f"rank {rank}: {label} gradient clipped to {found!r}, expected {expected!r}")
    if len({seen.dense for seen in measured}) > 1:
        wrong.append("replicas of the dense gradient differ after the clip")
    return wrong


def _print_versions() -> bool:
    """Print the table of versions; whether all adapters can be used."""
    try:
        rows = version_rows()
    except EPHooksError as error:
        print(f"  adapters: {error}")
        return False
    if not rows:
        print("  no adapter found: ep-hooks is not installed, only on sys.path (pip install ep-hooks)")
        return False
    head = ("adapter", "host", "installed", "tested", "verdict")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head) - 1)]
    for row in (head, *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[-1]}")
    return not any(row[-1].startswith("BROKEN") for row in rows)
