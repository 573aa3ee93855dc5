"""``ep-hooks probe SCRIPT`` in real processes: what it shows, and its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ep_hooks

assert sys.argv[1:] == [sys.argv[1], "--lr", "0.1"]
dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
mixed = sys.argv[1] == "mixed"
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [] if mixed else ["1.weight", "1.bias"])
model = DistributedDataParallel(net)
config = {
    "axes": {"ep": -1},
    "domains": [{"match": "1.*", "domain": "expert"}, {"match": "0.*", "domain": "dense"}],
    "mode": "observe" if mixed else "enforce",
}
handle = ep_hooks.attach(model, torch.optim.SGD(net.parameters(), lr=0.1), config=config)
model(torch.randn(3, 4)).sum().backward()
if sys.argv[1] != "never":
    handle.clip(1.0)
print("went on")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("case", "status", "shown"),
    [
        ("right", 0, ["probe: 4 right", "0.5 x2", "1, 0"]),
        ("mixed", 1, ["probe: 2 right, 2 wrong", "wrong-ranks", "1.weight"]),
        ("never", 1, ["went on", "nothing was probed"]),
    ],
)
def test_status_and_table(case: str, status: int, shown: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = "import sys; from ep_hooks.cli import main; sys.argv[0] = 'ep-hooks'; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "probe", "--nproc-per-node", "2", str(script), case, "--lr", "0.1"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode == status, text
    assert all(words in text for words in shown), text
    assert ("went on" in text) is (case == "never")


def test_switched_off_is_misuse(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('went on')")
    (tmp_path / "off.yaml").write_text('mode: "off"\n')
    for options, env in ((["--probe"], "0"), (["--probe", "--config", "off.yaml"], "1")):
        done = subprocess.run(
            [sys.executable, "-m", "ep_hooks", *options, "train.py"],
            capture_output=True, text=True, timeout=60, cwd=tmp_path, env={"EP_HOOKS": env},
        )  # fmt: skip
        assert done.returncode == 2 and "--probe, but" in done.stderr and "went on" not in done.stdout
