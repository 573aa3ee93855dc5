"""The command line: exit statuses, messages, and a real run of the doctor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ep_hooks import cli, doctor, registry
from ep_hooks.errors import AdapterError
from ep_hooks.version import __version__

runner = CliRunner()

Command = Callable[..., "Result"]


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The installed command, as the script calls it: ``main()`` with arguments in ``sys.argv``."""

    def run(*arguments: str, **env: str) -> Result:
        monkeypatch.delenv("EP_HOOKS", raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["ep-hooks", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Result(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


class TestHelp:
    @pytest.mark.parametrize("name", ["demo", "plan", "explain", "check", "doctor"])
    def test_every_command_has_help(self, name: str) -> None:
        result = runner.invoke(cli.app, [name, "--help"])
        assert result.exit_code == cli.OK
        assert "Exit status" in " ".join(result.output.split())
        assert name in runner.invoke(cli.app, ["-h"]).output

    def test_no_colour_in_a_pipe(self) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "GITHUB_ACTIONS")}
        words = [sys.executable, "-c", "from ep_hooks.cli import main; main()", "--help"]
        result = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env, check=False)
        assert result.returncode == cli.OK
        assert "doctor" in result.stdout
        assert "\x1b" not in result.stdout + result.stderr

    def test_version(self) -> None:
        assert runner.invoke(cli.app, ["--version"]).output == f"ep_hooks {__version__}\n"

    @pytest.mark.parametrize(
        "arguments", [["unknown"], ["check"], ["plan", "--world-size", "0"], ["demo", "--ranks", "x"]]
    )
    def test_wrong_usage(self, arguments: list[str]) -> None:
        assert runner.invoke(cli.app, arguments).exit_code == cli.BAD_INPUT


class TestCheck:
    def test_prints_the_resolved_config(self, command: Command, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text(
            "mode: observe\nclip: {max_norm: 0.5, norm_type: .inf}\ndomains: [{match: '*', domain: expert}]\n"
        )
        result = command("check", str(path))
        assert result.returncode == cli.OK
        shown = yaml.safe_load(result.stdout)
        assert shown["mode"] == "observe"
        assert shown["clip"]["max_norm"] == 0.5
        assert shown["clip"]["norm_type"] == float("inf")
        assert shown["domains"][0]["match"] == "*"
        assert "clip" in shown

    def test_what_it_prints_is_a_config_itself(self, command: Command, tmp_path: Path) -> None:
        path, again = tmp_path / "c.json", tmp_path / "again.yaml"
        path.write_text('{"axes": {"edp": -1, "ep": 2}, "threshold": {"norm": 10.0, "action": "skip"}}')
        again.write_text(command("check", str(path)).stdout)
        assert command("check", str(again)).stdout == again.read_text()

    def test_environment_wins(self, command: Command, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("mode: observe\n")
        assert yaml.safe_load(command("check", str(path), EP_HOOKS="repair").stdout)["mode"] == "repair"

    @pytest.mark.parametrize("text", ["modd: observe\n", "mode: obsreve\n", "- 1\n", "clip: {max_norm: -1}\n", ": :\n"])
    def test_bad_config(self, command: Command, tmp_path: Path, text: str) -> None:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        result = command("check", str(path))
        assert result.returncode == cli.BAD_INPUT
        assert result.stderr.startswith("ep-hooks: ")
        assert str(path) in result.stderr
        assert "Traceback" not in result.stderr

    def test_missing_file(self, command: Command, tmp_path: Path) -> None:
        result = command("check", str(tmp_path / "absent.yaml"))
        assert result.returncode == cli.BAD_INPUT
        assert "absent.yaml" in result.stderr


class TestPlanAndExplain:
    def test_plan(self) -> None:
        result = runner.invoke(cli.app, ["plan", "--world-size", "8", "--tp", "2", "--ep", "4"])
        assert result.exit_code == cli.OK
        assert "expert" in result.output

    def test_plan_that_does_not_fit(self, command: Command) -> None:
        result = command("plan", "--world-size", "6", "--ep", "4")
        assert result.returncode == cli.BAD_INPUT
        assert "6" in result.stderr

    def test_explain(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("axes: {edp: 2, ep: 2}\ndomains: [{match: '*.experts.*', domain: expert}]\n")
        result = runner.invoke(cli.app, ["explain", "l.experts.0.w", "--config", str(path), "--world-size", "4"])
        assert result.exit_code == cli.OK, result.output
        assert "*.experts.*" in result.output


class TestDemo:
    def test_passes_options_on_and_returns_the_status(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main = pytest.importorskip("ep_hooks.integrations.demo.main")
        calls: list[dict[str, Any]] = []
        monkeypatch.setattr(main, "run_demo", lambda **options: calls.append(options) or 1)
        result = runner.invoke(cli.app, ["demo", "--ranks", "2", "--steps", "3", "--plot", "x.png"])
        assert result.exit_code == cli.FAILED
        assert calls == [{"ranks": 2, "steps": 3, "plot": Path("x.png"), "max_norm": 1.0}]


class TestDoctor:
    def test_two_real_processes(self) -> None:
        measured = doctor.check_two_processes()
        assert [round(seen.stock, 4) for seen in measured] == [5.0, 12.3693]
        assert [seen.ours for seen in measured] == pytest.approx([13.0, 13.0], rel=1e-6)
        assert measured[0].dense == measured[1].dense
        assert doctor._wrong(measured) == []

    def test_report_ends_with_the_verdict(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        good = [doctor.Measured(5.0, 0.78, 13.0, 0.3, 0.4), doctor.Measured(12.37, 0.315, 13.0, 0.3, 1.2)]
        bad = [doctor.Measured(5.0, 0.78, 13.0, 0.3, 0.4), doctor.Measured(12.37, 0.315, 12.0, 0.31, 1.2)]
        row = ("some", "some-host", "1.0", "1.0", "tested")
        monkeypatch.setattr(doctor, "version_rows", lambda: [row])
        for measured, status, verdict in ((good, 0, "OK"), (bad, 1, "FAILED")):
            monkeypatch.setattr(doctor, "check_two_processes", lambda measured=measured: measured)
            assert doctor.run_doctor() == status
            assert capsys.readouterr().out.splitlines()[-1] == f"doctor: {verdict}"

    def test_process_that_fails_is_reported(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fails() -> list[doctor.Measured]:
            raise RuntimeError("rank 1 failed")

        monkeypatch.setattr(doctor, "check_two_processes", fails)
        assert doctor.run_doctor() == 1
        lines = capsys.readouterr().out.splitlines()
        assert "  rank 1 failed" in lines
        assert lines[-1] == "doctor: FAILED"

    def test_versions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tested = {"inside": ("1", "2"), "outside": ("1", "1.5"), "absent": ("1", "1")}
        found = {"inside": "1.5", "outside": "2.0"}
        adapter = registry.RegisteredAdapter("some", ("some_host",), tested, lambda config: None, lambda: None)

        def load(name: str) -> registry.RegisteredAdapter:
            if name == "broken":
                raise AdapterError("it broke")
            return adapter

        monkeypatch.setattr(registry, "adapter_names", lambda: ("broken", "some"))
        monkeypatch.setattr(registry, "adapter", load)
        monkeypatch.setattr(registry, "installed_version", found.get)
        verdicts = {row[1]: row[-1] for row in doctor.version_rows()}
        assert verdicts == {
            "-": "BROKEN: it broke",
            "absent": "not installed, adapter idle",
            "inside": "tested",
            "outside": "UNTESTED: enforce falls back to observe",
        }
