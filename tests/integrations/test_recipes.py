"""The recipes in docs/ run as they stand, and their norm is torchtitan's rule's: right on this layout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2_loop(ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    result = subprocess.run(
        [*command, "docs/recipes/fsdp2_loop.py"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    norms = [float(norm) for norm in re.findall(r"grad_norm ([\d.]+)", result.stdout)]
    assert len(norms) == 5 and all(norm > 0 for norm in norms)
    assert "ep_hooks" in result.stderr and "expert" in result.stderr, "banner and table"
