"""The command ``ep-hooks``. Heavy imports wait inside the commands, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ep_hooks.errors import ConfigError, EPHooksError
from ep_hooks.version import __version__

__all__ = ["BAD_INPUT", "FAILED", "OK", "app", "main"]

OK, FAILED, BAD_INPUT = 0, 1, 2

_EPILOG = (
    "Exit status: 0 fine; 1 a check failed (doctor, demo); 2 wrong usage or configuration. "
    "Colours appear only on a terminal; NO_COLOR=1 switches them off there too."
)

app = typer.Typer(
    name="ep-hooks",
    help="Right gradient norms and clipping for mixture-of-experts training.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the command. Expected errors are one message and exit status 2, without a traceback."""
    try:
        app(prog_name="ep-hooks")
    except EPHooksError as error:
        print(f"ep-hooks: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)


def _version(value: bool) -> None:
    if value:
        print(f"ep_hooks {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog=_EPILOG)
def demo(
    ranks: Annotated[int, typer.Option(min=2, help="Processes that train together on this machine's CPU.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each of the two runs.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of both runs' norms and drift to this file.")] = None,
    max_norm: Annotated[float, typer.Option(min=0.0, help="Gradient norm to clip to.")] = 1.0,
) -> None:
    """Train a small MoE model twice, stock and with ep_hooks, and compare the reported norms with the true one.

    Needs the extra `demo` (pip install 'ep-hooks[demo]').
    """
    try:
        from ep_hooks.integrations.demo.main import run_demo
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("ep_hooks"):
            raise
        print(f"ep-hooks: the demo needs {error.name}: pip install 'ep-hooks[demo]'", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    raise typer.Exit(run_demo(ranks=ranks, steps=steps, plot=plot, max_norm=max_norm))


@app.command(epilog=_EPILOG)
def plan(
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of dense layers.")] = 1,
    etp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of experts.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallel size.")] = 1,
    order: Annotated[str, typer.Option(help="Order of the axes, the first one varying fastest.")] = "tp-cp-ep-dp-pp",
) -> None:
    """Show who counts and who reduces what, from the sizes of the axes alone."""
    from ep_hooks.integrations.megatron_ranks import symbolic_plan

    print(symbolic_plan(world_size, tp=tp, etp=etp, cp=cp, pp=pp, ep=ep, order=order))


@app.command(epilog=_EPILOG)
def explain(
    name: Annotated[str, typer.Argument(help="Logical name of a parameter, such as model.layers.0.mlp.experts.3.w1.")],
    config: Annotated[Path, typer.Option(help="Configuration, YAML or JSON.")],
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
) -> None:
    """Show which rule of a configuration speaks of a parameter, and what that means on each rank."""
    from ep_hooks.config import load_config
    from ep_hooks.report import explain_name

    print(explain_name(name, load_config(config), world_size))


@app.command(epilog=_EPILOG)
def check(config: Annotated[Path, typer.Argument(help="Configuration, YAML or JSON.")]) -> None:
    """Check a configuration and print it with all defaults filled in, as YAML. Exit status 2 if it is wrong."""
    import yaml

    from ep_hooks.config import load_config

    loaded = load_config(config)
    resolved: dict[str, Any] = loaded.model_dump(mode="json")
    resolved["mode"] = str(loaded.resolved_mode())
    print(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), end="")
    print(f"{config}: OK", file=sys.stderr)


@app.command(
    epilog=_EPILOG,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def probe(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Training script; its own arguments follow.")],
    config: Annotated[Path | None, typer.Option(help="Configuration, YAML or JSON.")] = None,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 2,
) -> None:
    """Run a training script up to its first step, and measure whose gradients each reduced gradient is made of.

    The same as `torchrun --nproc-per-node N -m ep_hooks --probe SCRIPT`, which also serves several machines. Exit
    status 1 if a reduction is wrong or nothing could be measured.
    """
    import subprocess

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc_per_node)]
    command += ["-m", "ep_hooks", "--probe", *(["--config", str(config)] if config is not None else [])]
    raise typer.Exit(subprocess.call([*command, str(script), *context.args]))


@app.command(epilog=_EPILOG)
def report(
    records: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON lines that a run has written (`record` in its config).")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="HTML file; FILE with .html if not given; `-` for standard output."),
    ] = None,
) -> None:
    """Make one self-contained HTML page of what probe and audit have found.

    Exit status 0 whatever was found; 2 if the file cannot be read or the page not be written.
    """
    from ep_hooks.findings import printable
    from ep_hooks.html_report import page, summarise

    summary = summarise(records)
    target = records.with_suffix(".html") if output is None else output
    data = page(summary).encode("utf-8", errors="backslashreplace")
    if str(target) == "-":
        # Bytes: the page is UTF-8 whatever the terminal is.
        typer.echo(data, nl=False)
        print(summary.headline, file=sys.stderr)
        return
    name = printable(str(target), 1_000)
    try:
        if target.exists() and target.samefile(records):
            raise ConfigError(f"the report would overwrite its input {name}; give another file with -o")
        target.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror or error}") from None
    print(f"{summary.headline}; written to {name}")


@app.command(epilog=_EPILOG)
def doctor() -> None:
    """Compare installed versions with the tested ones and run a real check on two CPU processes. Under a minute."""
    from ep_hooks.doctor import run_doctor

    raise typer.Exit(run_doctor())
