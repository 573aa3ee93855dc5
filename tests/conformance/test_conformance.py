"""The conformance cases through pytest, and the runner's own manners."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.run_cases import load, run

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["cases.json", "more_cases.json"])
def test_cases(name: str) -> None:
    cases = load(HERE / name)
    for (passed, got, why), case in zip(
        run(cases, 60.0).values(), sorted(cases, key=lambda c: c["world"]), strict=True
    ):
        assert passed, (case["id"], got, why)
        for wrong in case["reported_wrong"]:
            assert not any(math.isclose(norm, wrong, rel_tol=1e-5) for norm in got), case["id"]


def _script(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "run_cases.py"), str(path), "--timeout", "20"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def _case(**changes: Any) -> dict[str, Any]:
    parameter = {"name": "w", "grads": {"0": [3.0], "1": [4.0]}, "shard": {"0": 0, "1": 1}, "sync": None}
    return {"id": "own", "world": 2, "groups": {}, "params": [parameter], "expect_norm": 5.0, **changes}


def test_exit_status_follows(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([_case(), _case(id="wrong", expect_norm=7.0)]))
    result = _script(path)
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "1 passed, 1 failed"
    for text, message in (("{", "Expecting"), ("[{}]", "lacks"), (json.dumps([_case(), _case()]), "two cases")):
        path.write_text(text)
        result = _script(path)
        assert result.returncode == 2
        assert message in result.stderr
