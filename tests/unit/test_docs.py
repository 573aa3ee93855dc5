"""Pages that are written from the code say what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_up_to_date() -> None:
    result = subprocess.run([sys.executable, "docs/generate_configuration.py", "--check"], cwd=ROOT, check=False)
    assert result.returncode == 0, "run: python docs/generate_configuration.py"
