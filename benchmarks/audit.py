"""What the audit's pass over the gradients costs beside a norm pass over the same tensors, in one run.

    python benchmarks/audit.py [--rounds 15]

One process, one thread. "norm" reads every gradient once and gives the sum of squares; "audit" gives the sum of squares
and a fingerprint of each tensor in its one pass. Prints a Markdown table of ratios of CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ep_hooks.fingerprints import screen
from ep_hooks.local_norm import accumulate

CELLS = ((2_000, 8_192), (2_000, 1_024), (20_000, 1_024), (200, 65_536))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {rounds} rounds, median of paired CPU-time ratios\n")
    print("| gradients | dtype | audit / norm | quartiles |")
    print("|---|---|---|---|")
    for count, numel in CELLS:
        for dtype in (torch.float32, torch.bfloat16):
            print(_cell(count, numel, dtype, rounds), flush=True)


def _cell(count: int, numel: int, dtype: torch.dtype, rounds: int) -> str:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(numel, generator=generator).to(dtype) for _ in range(count)]
    audit: Callable[[list[Tensor]], object] = screen
    norm: Callable[[list[Tensor]], object] = lambda tensors: accumulate(tensors, 2.0)  # noqa: E731  # a pair of calls
    ratios = []
    for index in range(rounds):
        seconds = {}
        for call in (audit, norm) if index % 2 else (norm, audit):
            start = time.thread_time()
            call(gradients)
            seconds[call] = time.thread_time() - start
        ratios.append(seconds[audit] / seconds[norm])
    low, middle, high = statistics.quantiles(ratios, n=4)
    name = str(dtype).removeprefix("torch.")
    return f"| {count:,} x {numel:,} | {name} | **{middle:.2f}** | {low:.2f} to {high:.2f} |"


if __name__ == "__main__":
    main()
