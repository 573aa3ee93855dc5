"""Run conformance cases on real gloo ranks, through the public API.

    python tests/conformance/run_cases.py FILE.json [--timeout SECONDS]

A case is a toy world with an exact answer; the schema is described in tests/conformance/README.md. Domains are declared
from ``shard`` (equal number: replica of the same piece) and ``sync`` alone, pending reductions are run by ep_hooks. The
label ``domain`` is for people and is not looked at. Prints a line per case, closes with ``N passed, M failed``.

Exit status: 0 all passed, 1 some failed, 2 the file cannot be used.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing as mp
import os
import queue
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOLERANCE = 1e-6
CLIP_TOLERANCE = 1e-5


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a case counts as hung")
    arguments = parser.parse_args()
    try:
        cases = load(arguments.file)
    except (OSError, ValueError) as error:
        print(f"{arguments.file}: {error}", file=sys.stderr)
        return 2
    verdicts = run(cases, arguments.timeout)
    for case in cases:
        passed, got, why = verdicts[case["id"]]
        shown = ", ".join(f"{value:.9g}" if isinstance(value, float) else str(value).splitlines()[0] for value in got)
        print(
            f"{case['id']:24s} expected {case['expect_norm']:.9g}  got [{shown}]  {'PASS' if passed else 'FAIL ' + why}"
        )
    good = sum(passed for passed, _, _ in verdicts.values())
    print(f"{good} passed, {len(cases) - good} failed")
    return 0 if good == len(cases) else 1


def load(path: Path) -> list[dict[str, Any]]:
    """The cases of a file.

    Raises:
        ValueError: no JSON, or a case that lacks something; names the case and what.
    """
    cases = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(cases, list):
        raise ValueError("expected a list of cases")
    seen = set()
    for number, case in enumerate(cases):
        if not isinstance(case, dict):
            raise ValueError(f"case {number} is no object")
        name = case.get("id", number)
        if missing := {"id", "world", "groups", "params", "expect_norm"} - case.keys():
            raise ValueError(f"case {name!r} lacks {', '.join(sorted(missing))}")
        if name in seen:
            raise ValueError(f"two cases are called {name!r}")
        seen.add(name)
        try:
            _check(case)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"case {name!r}: {error}") from None
    return cases


def _check(case: dict[str, Any]) -> None:
    if not isinstance(case["world"], int) or case["world"] < 1:
        raise ValueError(f"world must be a number of ranks, got {case['world']!r}")
    float(case["expect_norm"])
    ranks = range(case["world"])
    for axis, groups in case["groups"].items():
        members = [rank for group in groups for rank in group]
        if len(set(members)) < len(members) or not set(members) <= set(ranks):
            raise ValueError(f"the groups of axis {axis!r} must be disjoint and within {case['world']} ranks: {groups}")
    for parameter in case["params"]:
        if missing := {"name", "grads", "shard"} - parameter.keys():
            raise ValueError(f"a parameter lacks {', '.join(sorted(missing))}")
        label = parameter["name"]
        if parameter["grads"].keys() != parameter["shard"].keys():
            raise ValueError(f"parameter {label!r} needs grads and shard for the same ranks")
        if outside := [rank for rank in parameter["grads"] if int(rank) not in ranks]:
            raise ValueError(f"parameter {label!r}: ranks {outside} are outside the world of {case['world']}")
        for values in parameter["grads"].values():
            [float(value) for value in values or ()]
        if sync := parameter.get("sync"):
            axes = [sync.get("group"), sync.get("group2")][: len(OPERATORS.get(sync.get("op"), ()))]
            if not axes or not set(axes) <= case["groups"].keys():
                raise ValueError(f"parameter {label!r}: cannot read sync {sync}")


OPERATORS = {"sum": ("sum",), "avg": ("avg",), "avg_then_sum": ("avg", "sum"), "sum_then_avg": ("sum", "avg")}


def run(cases: list[dict[str, Any]], timeout: float) -> dict[str, tuple[bool, list[Any], str]]:
    """Verdict of every case: (passed, norm or error per rank, why not)."""
    verdicts: dict[str, tuple[bool, list[Any], str]] = {}
    for world in sorted({case["world"] for case in cases}):
        todo = [case for case in cases if case["world"] == world]
        while todo:  # a case that hangs, kills a rank or raises ends its launch; the rest start afresh
            done = _launch(todo, world, timeout)
            for case, answers in zip(todo, done, strict=False):
                verdicts[case["id"]] = judge(case, answers)
            if not done:  # it hung with nothing before it that could be to blame
                verdicts[todo[0]["id"]] = (False, ["no answer"] * world, f"hung or died within {timeout:g} s")
            todo = todo[max(1, len(done)) :]
    return verdicts


def judge(case: dict[str, Any], answers: list[Any]) -> tuple[bool, list[Any], str]:
    """Compare what the ranks gave with the exact answer."""
    norms = [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
    expected = float(case["expect_norm"])
    for answer in answers:
        if not isinstance(answer, tuple):
            return False, norms, "raised"
        norm, clipped = answer
        if not math.isclose(norm, expected, rel_tol=TOLERANCE):
            return False, norms, "wrong norm"
        if expected > 0 and not math.isclose(clipped, _clipped(norm, expected / 2), rel_tol=CLIP_TOLERANCE):
            return False, norms, f"after clipping to {expected / 2:g} the norm is {clipped:g}"
    if len(set(norms)) > 1:
        return False, norms, "ranks disagree"
    return True, norms, ""


def _clipped(norm: float, max_norm: float) -> float:
    """Norm after clipping with torch's coefficient, whose epsilon counts where norms are tiny."""
    return norm * min(1.0, max_norm / (norm + 1e-6))


def _launch(cases: list[dict[str, Any]], world: int, timeout: float) -> list[list[Any]]:
    """Answers of all ranks to the cases, up to the first that raises on some rank, or to the last before a hang."""
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank, args=(rank, world, str(Path(folder) / "store"), cases, timeout, answers), daemon=True
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        done: list[list[Any]] = []
        deadline = time.monotonic() + 120 + timeout  # the first answer waits for the imports
        waiting: dict[int, dict[int, Any]] = {}
        while len(done) < len(cases):
            try:
                number, rank, answer = answers.get(timeout=0.5)
            except queue.Empty:
                if time.monotonic() > deadline or any(process.exitcode not in (None, 0) for process in ranks):
                    break
                continue
            waiting.setdefault(number, {})[rank] = answer
            if len(waiting[number]) == world:
                done.append([waiting[number][r] for r in range(world)])
                deadline = time.monotonic() + timeout
                if not all(isinstance(answer, tuple) for answer in done[-1]):
                    break  # ranks may stand at different points of the program now
        for process in ranks:
            if len(done) == len(cases):
                process.join(20)
            process.kill()
            process.join()
    return done


def _rank(rank: int, world: int, store: str, cases: list[dict[str, Any]], timeout: float, answers: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the banner and table of every case, for as long as we run
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout)
    )
    for number, case in enumerate(cases):
        try:
            answer: Any = _case(case, rank)
        except Exception as error:  # whatever it is, it is this case's answer
            answer = f"{type(error).__name__}: {error}"
        answers.put((number, rank, answer))
    dist.barrier()
    dist.destroy_process_group()


def _case(case: dict[str, Any], rank: int) -> tuple[float, float]:
    """Norm, and norm after clipping to half of it, on this rank."""
    import torch
    from torch import nn

    import ep_hooks
    from ep_hooks.topology import Axis

    model = nn.Module()
    axes = {name: Axis(name, tuple(tuple(group) for group in groups)) for name, groups in case["groups"].items()}
    for number, described in enumerate(case["params"]):
        if str(rank) not in described["grads"]:
            continue
        pieces: dict[Any, list[int]] = {}
        for holder, piece in described["shard"].items():
            pieces.setdefault(piece, []).append(int(holder))
        pending = []
        if sync := described.get("sync"):
            names = [sync["group"], sync.get("group2")]
            for op, name in zip(OPERATORS[sync["op"]], names, strict=False):
                pending.append((axes[name], ep_hooks.partial(op)))
        values = described["grads"][str(rank)]
        # null: it holds the parameter and has no gradient; the shape is that of the other holders of its piece.
        twins = [described["grads"][str(other)] for other in pieces[described["shard"][str(rank)]]]
        parameter = nn.Parameter(torch.zeros(next((len(twin) for twin in twins if twin is not None), 1)))
        if values is not None:
            parameter.grad = torch.tensor(values, dtype=torch.float32)
        replicas = tuple(tuple(sorted(holders)) for holders in pieces.values())
        ep_hooks.declare(parameter, ep_hooks.Domain.of_replicas(f"parameter{number}", replicas, pending))
        model.register_parameter(f"parameter{number}", parameter)
    # The declared sums are pending by definition here, also where their inputs happen to be equal.
    with ep_hooks.attach(
        model, config={"mode": "enforce", "sync": {"already_reduced": "off", "broadcast": False}}
    ) as handle:
        expected = float(case["expect_norm"])
        norm = float(handle.clip(expected / 2 if expected > 0 else math.inf).norm)
        return norm, float(handle.clip(math.inf).norm)


if __name__ == "__main__":
    sys.exit(main())
