"""One process: ep_hooks.clip_grad_norm_ beside torch.nn.utils.clip_grad_norm_, interleaved, ratios of CPU time.

    python benchmarks/single_process.py [--rounds 15]

Prints a Markdown table. A ratio below 1 means that ep_hooks is faster. Absolute times depend on the machine and its
load; the ratio of two calls that alternate within one run does not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import ep_hooks

CELLS = ((200, 65_536), (2_000, 8_192), (2_000, 1_024), (20, 1_048_576))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {rounds} rounds, median of paired CPU-time ratios\n")
    print("| gradients | dtype | clips | ep_hooks / torch | quartiles | error of torch | error of ep_hooks |")
    print("|---|---|---|---|---|---|---|")
    for count, numel in CELLS:
        for dtype in (torch.float32, torch.bfloat16):
            for clips in (False, True):
                print(_cell(count, numel, dtype, clips, rounds), flush=True)


def _cell(count: int, numel: int, dtype: torch.dtype, clips: bool, rounds: int) -> str:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(numel, dtype=dtype)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(numel, generator=generator).to(dtype)
    true = float(torch.stack([p.grad.double().square().sum() for p in parameters if p.grad is not None]).sum().sqrt())
    # Clipping to just below the norm keeps the gradients the same size over the rounds.
    max_norm = true * 0.999999 if clips else 1e30
    ours: Callable[[], Tensor] = lambda: ep_hooks.clip_grad_norm_(parameters, max_norm)  # noqa: E731  # a pair of calls
    theirs: Callable[[], Tensor] = lambda: nn.utils.clip_grad_norm_(parameters, max_norm)  # noqa: E731
    norms = nn.utils.clip_grad_norm_(parameters, torch.inf), ep_hooks.total_norm(parameters)
    errors = [abs(float(norm) / true - 1) for norm in norms]
    ratios = []
    for index in range(rounds):
        pair = {}
        for call in (ours, theirs) if index % 2 else (theirs, ours):
            start = time.thread_time()
            call()
            pair[call] = time.thread_time() - start
        ratios.append(pair[ours] / pair[theirs])
    low, middle, high = statistics.quantiles(ratios, n=4)
    name = str(dtype).removeprefix("torch.")
    return (
        f"| {count:,} x {numel:,} | {name} | {'yes' if clips else 'no'} | **{middle:.2f}** | {low:.2f} to {high:.2f} "
        f"| {errors[0]:.1e} | {errors[1]:.1e} |"
    )


if __name__ == "__main__":
    main()
