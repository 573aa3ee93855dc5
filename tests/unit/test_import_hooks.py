"""Import hooks: called once per execution of a module, invisible to it, gone when removed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ep_hooks import import_hooks
from ep_hooks.errors import AdapterError
from ep_hooks.import_hooks import ImportHook, when_imported


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with a package ``hooked_pkg``; whatever was imported from it is forgotten afterwards."""
    package = tmp_path / "hooked_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from hooked_pkg.inner import VALUE\nLATE = 1\n")
    (package / "inner.py").write_text(
        "VALUE = 1\nLOADER, SPEC_LOADER = __loader__, __spec__.loader\n\ndef f():\n    return VALUE\n"
    )
    (tmp_path / "hooked_namespace").mkdir()
    (tmp_path / "hooked_namespace" / "part.py").write_text("VALUE = 2\n")
    (tmp_path / "hooked_broken.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before, finders = set(sys.modules), list(sys.meta_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("hooked_"):
            del sys.modules[name]
    for hooks in list(import_hooks._hooks.values()):
        for hook in list(hooks):
            hook.remove()
    assert sys.meta_path == finders


class Calls(list[ModuleType]):
    def __call__(self, module: ModuleType) -> None:
        self.append(module)


def test_called_after_the_module_is_executed(tree: Path) -> None:
    calls = Calls()
    when_imported("hooked_pkg.inner", calls)
    assert "hooked_pkg" not in sys.modules
    import hooked_pkg.inner as inner  # type: ignore[import-not-found]

    assert calls == [inner]
    assert inner.VALUE == 1


def test_called_while_the_package_above_is_half_imported(tree: Path) -> None:
    seen: list[bool] = []
    when_imported("hooked_pkg.inner", lambda module: seen.append(hasattr(sys.modules["hooked_pkg"], "LATE")))
    importlib.import_module("hooked_pkg")
    assert seen == [False]


def test_called_at_once_if_imported(tree: Path) -> None:
    inner = importlib.import_module("hooked_pkg.inner")
    calls = Calls()
    when_imported("hooked_pkg.inner", calls)
    assert calls == [inner]


def test_module_sees_its_own_loader(tree: Path) -> None:
    when_imported("hooked_pkg.inner", Calls())
    inner = importlib.import_module("hooked_pkg.inner")
    plain = importlib.machinery.SourceFileLoader
    assert [type(x) for x in (inner.LOADER, inner.SPEC_LOADER, inner.__loader__, inner.__spec__.loader)] == [plain] * 4
    assert "return VALUE" in inspect.getsource(inner.f)
    assert inner.__file__ == str(tree / "hooked_pkg" / "inner.py")


def test_found_but_not_imported_looks_like_the_real_loader(tree: Path) -> None:
    calls = Calls()
    when_imported("hooked_pkg", calls)
    spec = importlib.util.find_spec("hooked_pkg")
    assert spec is not None
    assert spec.loader is not None
    assert "LATE" in spec.loader.get_source("hooked_pkg")  # type: ignore[attr-defined]
    assert not calls


def test_reload_calls_again(tree: Path) -> None:
    calls = Calls()
    when_imported("hooked_pkg.inner", calls)
    inner = importlib.import_module("hooked_pkg.inner")
    importlib.reload(inner)
    assert calls == [inner, inner]
    assert isinstance(inner.__loader__, importlib.machinery.SourceFileLoader)


def test_reload_of_a_module_imported_before_the_hook(tree: Path) -> None:
    inner = importlib.import_module("hooked_pkg.inner")
    calls = Calls()
    when_imported("hooked_pkg.inner", calls)
    importlib.reload(inner)
    assert len(calls) == 2


def test_namespace_package(tree: Path) -> None:
    calls = Calls()
    when_imported("hooked_namespace", calls)
    when_imported("hooked_namespace.part", calls)
    part = importlib.import_module("hooked_namespace.part")
    namespace = sys.modules["hooked_namespace"]
    assert calls == [namespace, part]
    assert isinstance(namespace.__loader__, importlib.machinery.NamespaceLoader)
    assert list(namespace.__path__) == [str(tree / "hooked_namespace")]


def test_lazy_loader(tree: Path) -> None:
    calls = Calls()
    when_imported("hooked_pkg.inner", calls)
    spec = importlib.util.find_spec("hooked_pkg.inner")
    del calls[:]  # finding it has imported the package above, and that the module
    sys.modules.pop("hooked_pkg.inner", None)
    spec = importlib.util.find_spec("hooked_pkg.inner")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hooked_pkg.inner"] = module
    spec.loader.exec_module(module)
    assert not calls
    assert module.VALUE == 1
    assert calls == [module]


def test_module_that_does_not_exist(tree: Path) -> None:
    when_imported("hooked_absent", Calls())
    with pytest.raises(ModuleNotFoundError, match="hooked_absent"):
        importlib.import_module("hooked_absent")
    assert importlib.util.find_spec("hooked_absent") is None


def test_module_that_fails(tree: Path) -> None:
    calls = Calls()
    when_imported("hooked_broken", calls)
    with pytest.raises(ImportError, match="broken on purpose"):
        importlib.import_module("hooked_broken")
    assert not calls
    assert "hooked_broken" not in sys.modules


def test_error_of_the_callback_fails_the_import_and_the_next_import_tries_again(tree: Path) -> None:
    errors = [ZeroDivisionError()]

    def callback(module: ModuleType) -> None:
        if errors:
            raise errors.pop()

    when_imported("hooked_pkg.inner", callback)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("hooked_pkg.inner")
    assert "hooked_pkg.inner" not in sys.modules
    assert importlib.import_module("hooked_pkg.inner").VALUE == 1


def test_removed_hook_is_not_called_and_the_finder_goes(tree: Path) -> None:
    calls = Calls()
    first, second = when_imported("hooked_pkg", calls), when_imported("hooked_pkg.inner", calls)
    assert sum(isinstance(finder, import_hooks._Finder) for finder in sys.meta_path) == 1
    for _ in range(2):
        first.remove()
        second.remove()
    assert not any(isinstance(finder, import_hooks._Finder) for finder in sys.meta_path)
    importlib.import_module("hooked_pkg")
    assert not calls


def test_several_hooks_in_order(tree: Path) -> None:
    order: list[int] = []
    for index in range(3):
        when_imported("hooked_pkg.inner", lambda module, index=index: order.append(index))
    importlib.import_module("hooked_pkg.inner")
    assert order == [0, 1, 2]


def test_another_finder_that_asks_all_finders_again(tree: Path) -> None:
    class Other:
        busy = False

        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            if self.busy or name != "hooked_pkg":
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    other, calls = Other(), Calls()
    when_imported("hooked_pkg", calls)
    sys.meta_path.insert(0, other)
    sys.meta_path.append(other)
    try:
        module = importlib.import_module("hooked_pkg")
    finally:
        sys.meta_path.remove(other)
        sys.meta_path.remove(other)
    assert calls == [module]


def test_imported_by_the_caller_at_this_moment(tree: Path) -> None:
    (tree / "hooked_circular.py").write_text(
        "from ep_hooks.import_hooks import when_imported\nwhen_imported('hooked_circular', print)\n"
    )
    with pytest.raises(AdapterError, match="is being imported"):
        importlib.import_module("hooked_circular")


def test_threads_import_and_register_at_once(tree: Path) -> None:
    (tree / "hooked_slow.py").write_text("import time\ntime.sleep(0.05)\nVALUE = 5\n")
    start, complete, hooks = threading.Barrier(8), [], []

    def imports() -> None:
        start.wait()
        importlib.import_module("hooked_slow")

    def registers() -> None:
        start.wait()
        hooks.append(when_imported("hooked_slow", lambda module: complete.append(hasattr(module, "VALUE"))))

    threads = [threading.Thread(target=work) for work in [imports, registers] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert complete == [True] * 4
    assert all(isinstance(hook, ImportHook) for hook in hooks)
