"""Runs the demonstration and shows what came of it."""

from __future__ import annotations

import json
import math
import multiprocessing as mp
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .worker import FIRST_ERROR, RUNS, run_rank

__all__ = ["DemoRow", "run_demo"]

_STALLED = 180.0
"""Seconds without a finished step after which the ranks count as hung."""


@dataclass(frozen=True)
class DemoRow:
    """One framework with one clip.

    Attributes:
        label: framework and run.
        steps: on each rank, one record of ``true``, ``reported`` and ``drift`` a step.
    """

    label: str
    steps: Sequence[Sequence[dict[str, float]]]

    @property
    def reported(self) -> list[float]:
        """Reported norm of the last step on each rank."""
        return [rank[-1]["reported"] for rank in self.steps]

    @property
    def true(self) -> float:
        """True norm of the last step."""
        return self.steps[0][-1]["true"]

    @property
    def ratios(self) -> tuple[float, float]:
        """Smallest and largest reported over true norm, over all ranks and steps."""
        ratios = [record["reported"] / record["true"] for rank in self.steps for record in rank]
        # min and max pass over NaN unless it comes first.
        return (min(ratios), max(ratios)) if all(map(math.isfinite, ratios)) else (math.nan, math.nan)

    @property
    def spread(self) -> float:
        """Largest relative disagreement between ranks about the norm of one and the same step."""
        norms: list[list[float]] = [[record["reported"] for record in step] for step in zip(*self.steps, strict=True)]
        return max(((max(step) / min(step) - 1) for step in norms), default=0.0)

    @property
    def drift(self) -> float:
        """Largest difference between replicas of a dense weight after the last step."""
        return max(rank[-1]["drift"] for rank in self.steps)

    @property
    def right(self) -> bool:
        """Ratio 1 on every rank in every step, and no drift in any."""
        return all(abs(ratio - 1) <= 1e-6 for ratio in self.ratios) and not any(
            record["drift"] for rank in self.steps for record in rank
        )


def run_demo(ranks: int, steps: int, plot: Path | None, max_norm: float) -> int:
    """Train on ``ranks`` processes of this machine's CPU, stock and with ep_hooks, and print one table.

    Returns:
        0 if the run with ep_hooks is right, 1 if it is not or the ranks failed.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe has no width; 80 columns would fold the table
    if 8 % ranks:
        console.print(f"the demo's model has 8 experts: --ranks must be 2, 4 or 8, not {ranks}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        failure = _run(ranks, steps, max_norm, folder)
        if failure:
            print(failure, file=sys.stderr)
            return 1
        by_rank = [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
        banner = [
            line
            for line in (Path(folder) / "0.log").read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("ep_hooks ")
        ]
    rows = [DemoRow(f"HF Trainer, {run}", [rank[run] for rank in by_rank]) for run in RUNS]
    console.print(*banner[:1], soft_wrap=True, highlight=False, markup=False)
    console.print(_table(rows, steps, max_norm))
    if plot is not None:
        _plot(rows, plot)
        console.print(f"plot written to {plot}", highlight=False)
    stock, ours = rows
    verdict = "right on every rank in every step, replicas bit-identical" if ours.right else "NOT right"
    console.print(f"stock: ranks up to {stock.spread:.2%} apart in one step; ep_hooks: {verdict}", highlight=False)
    return 0 if ours.right else 1


def _run(ranks: int, steps: int, max_norm: float, folder: str) -> str:
    """Train with a progress bar; what went wrong, or nothing."""
    context = mp.get_context("spawn")
    done: Any = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, ranks, steps, max_norm, folder, done), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failure, last = "", time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks = {run: bar.add_task(f"{run:9s} {ranks} ranks", total=steps) for run in RUNS}
        while any(process.is_alive() for process in processes):
            try:
                bar.advance(tasks[done.get(timeout=0.5)])
                last = time.monotonic()
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    time.sleep(2)  # the others may be about to say why
                    break
                if time.monotonic() - last > _STALLED:
                    failure = f"no step finished within {_STALLED:g} s: the ranks hang"
                    break
        while not done.empty():
            bar.advance(tasks[done.get()])
    ended = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}  # before any kill
    running = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.join(1)
        if process.is_alive():
            process.kill()
            process.join()
    if not failure and not ended:
        return ""
    lines = [failure] if failure else []
    lines += [f"rank {rank} ended with exit code {code}" for rank, code in ended.items()]
    lines += [f"still running when stopped: ranks {running}"] if running else []
    killed = [rank for rank, code in ended.items() if code < 0]  # by a signal: it could not say why
    first = Path(folder) / FIRST_ERROR
    if first.exists() and not killed:
        lines.append(first.read_text(encoding="utf-8"))
    else:
        for rank in killed or range(len(processes)):
            path = Path(folder) / f"{rank}.log"
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            lines.append(f"--- rank {rank}:\n{text[-2000:]}")
    return "\n".join(lines)


def _table(rows: Sequence[DemoRow], steps: int, max_norm: float) -> Table:
    sheet = Table(title=f"after {steps} steps, clipped to {max_norm:g}", title_justify="left")
    for column in ("run", "reported norm per rank", "true norm", "reported / true", "drift of dense replicas"):
        sheet.add_column(column)
    for row in rows:
        low, high = row.ratios
        ratio = f"{low:.6f}" if f"{low:.6f}" == f"{high:.6f}" else f"{low:.4f} to {high:.4f}"
        reported = " ".join(f"{norm:.4f}" for norm in row.reported)
        sheet.add_row(row.label, reported, f"{row.true:.4f}", ratio, f"{row.drift:.1e}" if row.drift else "0.0")
    return sheet


def _plot(rows: Sequence[DemoRow], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for row, colour in zip(rows, ("tab:red", "tab:blue"), strict=True):
        for rank, records in enumerate(row.steps):
            ratios = [record["reported"] / record["true"] for record in records]
            left.plot(
                range(1, len(ratios) + 1), ratios, color=colour, alpha=0.7, label=row.label if rank == 0 else None
            )
        drifts = [max(rank[i]["drift"] for rank in row.steps) for i in range(len(row.steps[0]))]
        right.plot(range(1, len(drifts) + 1), drifts, color=colour, label=row.label)
    left.set(xlabel="step", ylabel="reported / true norm, one line a rank", title="gradient norm")
    right.set(xlabel="step", ylabel="largest difference", title="drift between replicas of dense weights")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
