"""``python -m ep_hooks`` in real processes: a script runs as it would without it, and its frameworks are patched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

LAUNCHER = ["-m", "ep_hooks"]

REPORT = """\
import json, os, sys
import __main__
names = {k: repr(v) for k, v in sorted(vars(__main__).items())
         if k.startswith("__") and k not in ("__builtins__", "__main__", "__loader__", "__spec__")}
print(json.dumps({"argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__, "names": names,
                  "loader": type(__loader__).__name__, "spec": getattr(__spec__, "name", None),
                  "same": __main__ is sys.modules["__main__"],
                  "excepthook": sys.excepthook is sys.__excepthook__}))
"""


def python(
    arguments: Sequence[str], cwd: Path, *, env: dict[str, str] | None = None, launcher: bool = False
) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS``, or the same under the launcher, in ``cwd``."""
    return subprocess.run(
        [sys.executable, *(LAUNCHER if launcher else []), *arguments],
        cwd=cwd,
        env={**clean_environment(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def clean_environment() -> dict[str, str]:
    dropped = ("EP_HOOKS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in dropped}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Scripts in a folder below the working directory, a package, and a fake host with an adapter."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "report.py").write_text(REPORT)
    (tmp_path / "link.py").symlink_to(tmp_path / "scripts" / "report.py")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "__main__.py").write_text(REPORT)
    (tmp_path / "pkg" / "mod.py").write_text(REPORT)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(REPORT)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", REPORT)
    return tmp_path


class TestSameAsWithout:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["scripts/report.py", "a", "--config", "b c", "-m", "--help"],
            ["./scripts/../scripts/report.py"],
            pytest.param(["link.py"], marks=pytest.mark.slow),
            ["-m", "pkg", "a", "-x"],
            ["-m", "pkg.mod", "--version"],
            ["app", "a"],
            pytest.param(["app.zip", "a"], marks=pytest.mark.slow),
        ],
        ids=lambda arguments: " ".join(arguments[:2]),
    )
    def test_argv_name_file_and_path(self, folder: Path, arguments: list[str]) -> None:
        without, under = python(arguments, folder), python(arguments, folder, launcher=True)
        assert without.returncode == 0, without.stderr
        assert under.returncode == 0, under.stderr
        assert json.loads(under.stdout) == json.loads(without.stdout)

    def test_absolute_path_and_safe_path(self, folder: Path) -> None:
        script = str(folder / "scripts" / "report.py")
        for env in ({}, {"PYTHONSAFEPATH": "1"}):
            without, under = (python([script], Path("/"), env=env, launcher=launcher) for launcher in (False, True))
            assert json.loads(under.stdout) == json.loads(without.stdout)

    @pytest.mark.parametrize(
        "body",
        [
            "pass",
            "import sys; sys.exit(7)",
            pytest.param("import sys; sys.exit('a message')", marks=pytest.mark.slow),
            pytest.param("raise SystemExit", marks=pytest.mark.slow),
            pytest.param("import os; os._exit(9)", marks=pytest.mark.slow),
            "def f():\n    return 1 / 0\n\nf()",
            "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('outer') from error",
            pytest.param("raise ExceptionGroup('several', [ValueError(1), TypeError(2)])", marks=pytest.mark.slow),
            "def broken(:\n    pass",
            "import no_such_module",
            "raise KeyboardInterrupt",
            "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
            "import sys\nsys.excepthook = lambda kind, error, trace: print(kind.__name__, trace.tb_lineno)\n1 / 0",
            pytest.param(
                "import atexit; atexit.register(print, 'bye'); raise RuntimeError('x')", marks=pytest.mark.slow
            ),
            pytest.param("import json; json.loads('{')", marks=pytest.mark.slow),
        ],
    )
    def test_exit_status_output_and_traceback(self, folder: Path, body: str) -> None:
        (folder / "scripts" / "body.py").write_text(body + "\n")
        without, under = (python(["scripts/body.py"], folder, launcher=launcher) for launcher in (False, True))
        assert (under.returncode, under.stdout, under.stderr) == (without.returncode, without.stdout, without.stderr)

    @pytest.mark.parametrize("body", ["1 / 0", "import sys; sys.exit(3)", "raise KeyboardInterrupt"])
    def test_module_exit_status_and_traceback(self, folder: Path, body: str) -> None:
        (folder / "pkg" / "body.py").write_text(body + "\n")
        without, under = (python(["-m", "pkg.body"], folder, launcher=launcher) for launcher in (False, True))
        assert (under.returncode, under.stdout, under.stderr) == (without.returncode, without.stdout, without.stderr)

    @pytest.mark.parametrize(
        "arguments", [["absent.py"], ["-m", "absent"], ["-m", "scripts"], ["-m", "absent.inner"], ["scripts"]]
    )
    def test_missing_target(self, folder: Path, arguments: list[str]) -> None:
        without, under = (python(arguments, folder, launcher=launcher) for launcher in (False, True))
        assert without.returncode != 0
        assert (under.returncode, under.stdout, under.stderr) == (without.returncode, without.stdout, without.stderr)

    @pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals(self, folder: Path, number: signal.Signals) -> None:
        (folder / "scripts" / "waits.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
        ends = []
        for launcher in ([], LAUNCHER):
            process = subprocess.Popen(
                [sys.executable, *launcher, "scripts/waits.py"],
                cwd=folder, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                # A test run in the background of a shell ignores SIGINT, and so would its children.
                preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
            )  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            time.sleep(0.1)
            process.send_signal(number)
            ends.append((process.communicate(timeout=30)[1], process.returncode))
        assert ends[0] == ends[1]
        assert ends[0][1] == -number

    def test_pickle_and_spawned_processes_find_the_scripts_names(self, folder: Path) -> None:
        (folder / "scripts" / "spawns.py").write_text(
            "import multiprocessing as mp, pickle\n\nclass Thing:\n    pass\n\ndef work(x):\n    return x + 1\n\n"
            "if __name__ == '__main__':\n    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
            "    with mp.get_context('spawn').Pool(1) as pool:\n        print(pool.map(work, [1, 2]))\n"
        )
        under = python(["scripts/spawns.py"], folder, launcher=True)
        assert under.stdout == "[2, 3]\n", under.stderr


class TestOwnCommandLine:
    def test_help_and_version(self, folder: Path) -> None:
        shown = python(["--help"], folder, launcher=True)
        assert shown.returncode == 0
        assert "EP_HOOKS=0" in shown.stdout
        assert python(["--version"], folder, launcher=True).stdout.startswith("ep_hooks ")

    @pytest.mark.parametrize("arguments", [[], ["--config"], ["-m"], ["--unknown", "script.py"]])
    def test_misuse(self, folder: Path, arguments: list[str]) -> None:
        result = python(arguments, folder, launcher=True)
        assert result.returncode == 2
        assert "usage:" in result.stderr
        assert "Traceback" not in result.stderr

    def test_bad_config_stops_before_the_script(self, folder: Path) -> None:
        (folder / "bad.yaml").write_text("mod: observe\n")
        result = python(["--config", "bad.yaml", "scripts/report.py"], folder, launcher=True)
        assert result.returncode == 2
        assert result.stdout == ""
        assert "mode" in result.stderr
        assert "Traceback" not in result.stderr

    def test_misspelt_mode_stops_before_the_script(self, folder: Path) -> None:
        result = python(["scripts/report.py"], folder, env={"EP_HOOKS": "enforec"}, launcher=True)
        assert result.returncode == 2
        assert "enforec" in result.stderr
        assert result.stdout == ""

    def test_rank_argument_of_the_deepspeed_launcher_goes_to_the_script(self, folder: Path) -> None:
        result = python(["--local_rank=1", "--config=/dev/null", "scripts/report.py", "a"], folder, launcher=True)
        assert json.loads(result.stdout)["argv"] == ["scripts/report.py", "--local_rank=1", "a"]


class TestInstallsOnImport:
    """A fake host with a fake adapter, found through a distribution's metadata as a real one would be."""

    @pytest.fixture
    def host(self, folder: Path) -> dict[str, str]:
        site = folder / "site"
        (site / "fake_host").mkdir(parents=True)
        (site / "fake_host" / "__init__.py").write_text("from fake_host.trainer import clip\n")
        (site / "fake_host" / "trainer.py").write_text("def clip():\n    return 'stock'\n")
        (site / "fake_adapter.py").write_text(
            "from ep_hooks.patching import PatchSet\n"
            "HOST_MODULES = ('fake_host.trainer', 'fake_host')\nTESTED_VERSIONS = {'fake-host': ('1', '2')}\n"
            "patches = PatchSet()\n\n"
            "def install(config=None):\n    import fake_host.trainer as trainer\n"
            "    print('install', type(config).__name__, config.clip.max_norm)\n"
            "    patches.replace(trainer, 'clip', ours)\n\n"
            "def ours(original):\n    return 'ours over ' + original()\n\ndef uninstall():\n    patches.restore()\n"
        )
        info = site / "fake_adapter-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-adapter\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[ep_hooks.adapters]\nfake = fake_adapter\n")
        (folder / "c.yaml").write_text("clip: {max_norm: 0.5}\n")
        return {"PYTHONPATH": str(site)}

    def run(self, folder: Path, env: dict[str, str], body: str) -> subprocess.CompletedProcess[str]:
        (folder / "scripts" / "train.py").write_text(body)
        return python(["--config", "c.yaml", "scripts/train.py"], folder, env=env, launcher=True)

    def test_installed_when_the_script_imports_the_host(self, folder: Path, host: dict[str, str]) -> None:
        result = self.run(
            folder, host, "import sys\nprint('fake_host' in sys.modules)\nimport fake_host\nprint(fake_host.clip())\n"
        )
        assert result.stdout.split("\n")[:3] == ["False", "install EPHooksConfig 0.5", "ours over stock"], result.stderr

    def test_again_after_a_reload(self, folder: Path, host: dict[str, str]) -> None:
        result = self.run(
            folder,
            host,
            "import importlib\nimport fake_host.trainer as t\nimportlib.reload(t)\nprint(t.clip())\n",
        )
        assert result.stdout.split("\n")[2] == "ours over stock", result.stderr

    def test_not_installed_if_the_host_is_not_imported(self, folder: Path, host: dict[str, str]) -> None:
        assert self.run(folder, host, "print('done')\n").stdout == "done\n"

    @pytest.mark.parametrize("config", ["clip: {max_norm: 0.5}", "mode: off_by_typo"])
    def test_nothing_with_ep_hooks_0(self, folder: Path, host: dict[str, str], config: str) -> None:
        (folder / "c.yaml").write_text(config)
        body = (
            "import sys, fake_host\nprint(fake_host.clip())\n"
            "print([f for f in sys.meta_path if type(f).__module__.startswith('ep_hooks')])\n"
        )
        result = self.run(folder, {**host, "EP_HOOKS": "0"}, body)
        assert result.stdout == "stock\n[]\n", result.stderr

    def test_mode_off_in_the_config(self, folder: Path, host: dict[str, str]) -> None:
        (folder / "c.yaml").write_text("mode: 'off'\n")
        assert self.run(folder, host, "import fake_host\nprint(fake_host.clip())\n").stdout == "stock\n"

    def test_adapter_that_fails_is_not_mistaken_for_a_missing_host(self, folder: Path, host: dict[str, str]) -> None:
        adapter = folder / "site" / "fake_adapter.py"
        adapter.write_text(
            adapter.read_text().replace("def install(", "def install(config=None):\n    import gone\n\ndef _(")
        )
        result = self.run(folder, host, "try:\n    import fake_host\nexcept ImportError:\n    print('no host')\n")
        assert result.returncode == 1
        assert "no host" not in result.stdout
        assert "AdapterError: adapter 'fake' cannot be installed: ModuleNotFoundError" in result.stderr

    def test_traceback_of_a_hooked_module(self, folder: Path, host: dict[str, str]) -> None:
        (folder / "site" / "fake_host" / "trainer.py").write_text("def inner():\n    1 / 0\n\ninner()\n")
        (folder / "scripts" / "train.py").write_text("import fake_host\n")
        without, under = (python(["scripts/train.py"], folder, env=host, launcher=x) for x in (False, True))
        assert (under.returncode, under.stderr) == (without.returncode, without.stderr)


class TestUnderOtherLaunchers:
    BODY = "import os, sys\nprint('RANK', os.environ.get('RANK'), sys.argv[1:], __name__, flush=True)\n"

    def lines(self, command: list[str], folder: Path) -> list[str]:
        (folder / "scripts" / "rank.py").write_text(self.BODY)
        (folder / "c.yaml").write_text("mode: observe\n")
        result = subprocess.run(
            command, cwd=folder, env={**clean_environment(), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return sorted(line for line in result.stdout.splitlines() if line.startswith("RANK"))

    def test_torchrun(self, folder: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command += ["-m", "ep_hooks", "--config", "c.yaml", "scripts/rank.py", "a", "--b"]
        assert self.lines(command, folder) == [f"RANK {rank} ['a', '--b'] __main__" for rank in range(2)]

    def test_accelerate_launch(self, folder: Path) -> None:
        pytest.importorskip("accelerate")
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        command += ["-m", "ep_hooks", "--config", "c.yaml", "scripts/rank.py", "a"]
        assert self.lines(command, folder) == ["RANK None ['a'] __main__"]
