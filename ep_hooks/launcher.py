"""``python -m ep_hooks [--config FILE] (SCRIPT | -m MODULE) [ARG ...]``: run a training script with adapters installed.

An adapter is installed when the script imports its framework. Apart from that the script runs as it would without us:
``sys.argv``, ``__name__``, ``__file__``, ``sys.path[0]``, exit codes, signals and tracebacks are its own. With
``EP_HOOKS=0`` no hook is registered and the config file is not read.
"""

from __future__ import annotations

import importlib.util
import io
import os
import pkgutil
import sys
import threading
import zipimport
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, cast

from ep_hooks import import_hooks, registry
from ep_hooks.errors import AdapterError, ConfigError, EPHooksError
from ep_hooks.import_hooks import ImportHook, when_imported
from ep_hooks.modes import PROBE_ONLY, Mode, resolve_mode
from ep_hooks.version import __version__

if TYPE_CHECKING:
    from ep_hooks.config import EPHooksConfig

__all__ = ["install_on_import", "main"]

_USAGE = """\
usage: python -m ep_hooks [--config FILE] [--probe] (SCRIPT | -m MODULE) [ARG ...]

Runs SCRIPT or MODULE as python would, with the ep_hooks adapter of each training framework installed when it is
imported. Also as `torchrun ... -m ep_hooks ...`, `accelerate launch -m ep_hooks ...` and
`deepspeed --module ep_hooks ...`.

  --config FILE   configuration (YAML or JSON); see `ep-hooks check FILE`
  --probe         in the first step, measure whose gradients each gradient is made of, show the table and end the run:
                  status 0 if all is right, 1 if not or if nothing was measured
  --version       show the version
  -h, --help      show this text

environment: EP_HOOKS=0 changes nothing; EP_HOOKS=observe|repair|enforce sets the mode
exit status: that of the script; 2 if ep_hooks is misused or misconfigured
"""


@dataclass(frozen=True, slots=True)
class _Command:
    """A parsed command line; ``target`` is a path, or a module's name if ``is_module``."""

    target: str
    arguments: tuple[str, ...]
    is_module: bool = False
    config: str | None = None
    probe: bool = False


def main() -> None:
    """Entry point of ``python -m ep_hooks``. Replaces the contents of the module ``__main__``."""
    command = _parse(sys.argv[1:])
    try:
        if resolve_mode() is not Mode.OFF:
            # Not at the top: switched off, we import as little as we can before the script.
            from ep_hooks.config import load_config

            config = load_config(command.config)
            if config.resolved_mode() is not Mode.OFF:
                install_on_import(config)
            elif command.probe:
                raise ConfigError("--probe, but the configuration says mode off")
        elif command.probe:
            raise ConfigError("--probe, but EP_HOOKS says off")
    except EPHooksError as error:
        raise _misuse(str(error)) from None
    if command.probe:
        os.environ[PROBE_ONLY] = "1"
    if command.is_module:
        _run_module(command.target, command.arguments)
    else:
        _run_script(command.target, command.arguments)
    if command.probe:  # a probe ends the run
        print(
            "ep_hooks: the script has ended without a step that ep_hooks measures: nothing was probed", file=sys.stderr
        )
        sys.exit(1)


def install_on_import(config: EPHooksConfig) -> list[ImportHook]:
    """Install each adapter when its framework is imported, or now if it is.

    Returns:
        The hooks. Removing them stops waiting; adapters that are installed stay.

    Raises:
        AdapterError: no adapter is known, or one cannot be used.
    """
    adapters = registry.adapters()
    if not adapters:
        raise AdapterError(
            "no adapter found, so nothing would be patched: ep-hooks must be installed (pip install ep-hooks, or "
            "pip install -e . in a checkout), not only on sys.path"
        )
    hooks = []
    for adapter in adapters:
        installer = _Installer(adapter, config)
        hooks += [when_imported(name, installer) for name in adapter.host_modules]
    return hooks


class _Installer:
    """Installs one adapter at the first import of a host module, and again after a reload has undone it."""

    def __init__(self, adapter: registry.RegisteredAdapter, config: EPHooksConfig) -> None:
        self._adapter = adapter
        self._config = config
        self._seen: set[str] = set()
        self._lock = threading.RLock()

    def __call__(self, module: ModuleType) -> None:
        with self._lock:
            reloaded = module.__name__ in self._seen
            if self._seen and not reloaded:
                self._seen.add(module.__name__)
                return
            try:
                if reloaded:
                    self._adapter.uninstall()
                self._adapter.install(self._config)
            except EPHooksError:
                raise
            except Exception as error:
                # As an ImportError it might be swallowed by a `try: import` of the script, and nobody would notice.
                reason = f"{type(error).__name__}: {error}"
                raise AdapterError(f"adapter {self._adapter.name!r} cannot be installed: {reason}") from error
            self._seen.add(module.__name__)


def _parse(arguments: Sequence[str]) -> _Command:
    rest = list(arguments)
    config: str | None = None
    probe = False
    passed_on: list[str] = []
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name == "--config":
            if not equals and not rest:
                raise _misuse("--config needs a file", usage=True)
            config = value if equals else rest.pop(0)
        elif name in ("--local_rank", "--local-rank") and equals:
            # The deepspeed launcher puts this before the first argument; it is meant for the script.
            passed_on.append(word)
        elif word == "--probe":
            probe = True
        elif word in ("-h", "--help"):
            print(_USAGE, end="")
            sys.exit(0)
        elif word == "--version":
            print(f"ep_hooks {__version__}")
            sys.exit(0)
        elif word == "-m":
            if not rest:
                raise _misuse("-m needs a module", usage=True)
            return _Command(rest[0], (*passed_on, *rest[1:]), True, config, probe)
        elif word == "--" and rest:
            return _Command(rest[0], (*passed_on, *rest[1:]), False, config, probe)
        elif word.startswith("-"):
            raise _misuse(f"unknown option {word!r}; options of the script come after its name", usage=True)
        else:
            return _Command(word, (*passed_on, *rest), False, config, probe)
    raise _misuse("no script given", usage=True)


def _misuse(message: str, *, usage: bool = False) -> SystemExit:
    """Print what is wrong; the exit that goes with it."""
    print(f"ep_hooks: {message}", file=sys.stderr)
    if usage:
        print(_USAGE.splitlines()[0], file=sys.stderr)
    return SystemExit(2)


def _run_script(path: str, arguments: Sequence[str]) -> None:
    """As ``python path arguments``; ``path`` may be a folder or a zip file with a ``__main__``."""
    sys.argv[:] = [path, *arguments]
    # Python makes the path absolute and does not normalise it.
    file = os.path.join(os.getcwd(), path)
    spec = _main_inside(file)
    if spec is not None:
        if not sys.flags.safe_path:
            sys.path[0] = file
        _execute(lambda: _code_of(spec), _spec_names(spec), under_runpy=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        with io.open_code(file) as stream:
            source = stream.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    loader: SourceFileLoader | SourcelessFileLoader
    if file.endswith(".pyc"):
        loader = compiled = SourcelessFileLoader("__main__", file)
        build: Callable[[], CodeType | None] = lambda: compiled.get_code("__main__")  # noqa: E731
    else:
        loader = SourceFileLoader("__main__", file)
        build = lambda: compile(source, file, "exec", dont_inherit=True)  # noqa: E731
    names = {"__file__": file, "__loader__": loader, "__spec__": None, "__package__": None, "__cached__": None}
    _execute(build, names, under_runpy=False)


def _run_module(name: str, arguments: Sequence[str]) -> None:
    """As ``python -m name arguments``; ``sys.path[0]`` is the working directory already."""
    sys.argv[:] = ["-m", *arguments]
    spec = _find_module(name)
    sys.argv[0] = spec.origin or name
    _execute(lambda: _code_of(spec), _spec_names(spec), under_runpy=True)


def _find_module(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        sys.exit(
            f"{sys.executable}: Error while finding module specification for {name!r} ({type(error).__name__}: {error})"
        )
    if spec is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    if spec.submodule_search_locations is None:
        return spec
    inner = importlib.util.find_spec(f"{name}.__main__")
    if inner is None:
        sys.exit(
            f"{sys.executable}: No module named {name}.__main__; {name!r} is a package and cannot be directly executed"
        )
    return inner


def _main_inside(path: str) -> ModuleSpec | None:
    """Spec of ``__main__`` in a folder or zip file; ``None`` for an ordinary script."""
    finder = pkgutil.get_importer(path)
    if not os.path.isdir(path) and not isinstance(finder, zipimport.zipimporter):
        return None
    assert finder is not None
    spec = finder.find_spec("__main__")
    if spec is None:
        sys.exit(f"{sys.executable}: can't find '__main__' module in {path!r}")
    return spec


def _code_of(spec: ModuleSpec) -> CodeType | None:
    # zipimporter has the method without being registered as an InspectLoader.
    loader = cast(InspectLoader, spec.loader)
    return loader.get_code(spec.name)


def _spec_names(spec: ModuleSpec) -> dict[str, Any]:
    return {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__spec__": spec,
        "__package__": spec.parent,
        "__cached__": spec.cached,
    }


def _execute(build: Callable[[], CodeType | None], names: dict[str, Any], *, under_runpy: bool) -> None:
    """Run code in the module ``__main__``, emptied of what belongs to us.

    ``under_runpy``: without us the code would run below :mod:`runpy` and its frames are part of the traceback.
    """
    namespace = vars(sys.modules["__main__"])
    fresh = {"__name__": "__main__", "__doc__": None, "__annotations__": {}, **names}
    for key in list(namespace):
        # Which of these names exist depends on the Python version; python -m has made the right ones.
        if key in fresh:
            namespace[key] = fresh[key]
        elif key != "__builtins__":
            del namespace[key]
    try:
        code = build()
        if code is None:
            raise ImportError(f"no code object available for {names['__file__']}")
        exec(code, namespace)
    except SystemExit:
        raise
    except BaseException:
        # The interpreter itself prints and picks the exit status (a signal after KeyboardInterrupt), with the hook that
        # the script may have set; only the traceback that it is given is the script's.
        hook = sys.excepthook

        def without_launcher(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            trimmed = _trim(trace, under_runpy)
            hook(kind, error.with_traceback(trimmed), trimmed)

        sys.excepthook = without_launcher
        raise


def _trim(trace: TracebackType | None, under_runpy: bool) -> TracebackType | None:
    """The traceback without the frames of the launcher and of import hooks."""
    ours = {__file__, os.path.join(os.path.dirname(__file__), "__main__.py")}
    kept: list[TracebackType] = []
    in_head = True
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file == import_hooks.__file__:
            # Python hides the import system's frames around a module; a hook in between makes them show.
            while kept and kept[-1].tb_frame.f_code.co_filename.startswith("<frozen importlib"):
                kept.pop()
        elif file not in ours and not (in_head and file == "<frozen runpy>" and not under_runpy):
            in_head = False
            kept.append(trace)
        trace = trace.tb_next
    following: TracebackType | None = None
    for item in reversed(kept):
        item.tb_next = following
        following = item
    return following
