"""Call a function right after a module has been executed, whoever imports it and whenever.

A finder at the head of ``sys.meta_path`` lets the other finders find the module, and its loader is wrapped for the one
call that executes it. The module itself sees its own loader. With no hook left the finder is taken out again.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from ep_hooks.errors import AdapterError

__all__ = ["ImportHook", "when_imported"]

_lock = threading.RLock()
_hooks: dict[str, list[ImportHook]] = {}


class ImportHook:
    """A function that waits for a module; made by :func:`when_imported`."""

    def __init__(self, name: str, callback: Callable[[ModuleType], object]) -> None:
        self.name = name
        self._callback = callback
        self._seen: ModuleSpec | None = None

    def remove(self) -> None:
        """Stop waiting. Does nothing the second time."""
        with _lock:
            waiting = _hooks.get(self.name, [])
            if self in waiting:
                waiting.remove(self)
            if not waiting:
                _hooks.pop(self.name, None)
            if not _hooks and _finder in sys.meta_path:
                sys.meta_path.remove(_finder)

    def _fire(self, module: ModuleType) -> None:
        """Call back, once for each time the module is executed: every execution has a spec of its own."""
        spec = getattr(module, "__spec__", None)
        with _lock:
            if spec is not None and spec is self._seen:
                return
            self._seen = spec
        self._callback(module)


def when_imported(name: str, callback: Callable[[ModuleType], object]) -> ImportHook:
    """Call ``callback(module)`` once module ``name`` has been executed; at once if it is imported already.

    Called again after ``importlib.reload``. An error of the callback fails the import that triggered it, and the next
    import tries again. While the callback runs, packages above the module may be only half imported.

    Args:
        name: full name, such as ``"accelerate.accelerator"``. It is not imported by this call.

    Raises:
        AdapterError: the calling thread is importing the module at this moment.
    """
    hook = ImportHook(name, callback)
    with _lock:
        _hooks.setdefault(name, []).append(hook)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    if name in sys.modules:
        # Waits where another thread is importing it, which sys.modules alone does not show.
        module = importlib.import_module(name)
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            hook.remove()
            raise AdapterError(f"module {name!r} is being imported by the caller; wait for it before or after that")
        try:
            hook._fire(module)
        except BaseException:
            hook.remove()
            raise
    return hook


def _executed(name: str, module: ModuleType) -> None:
    with _lock:
        waiting = list(_hooks.get(name, ()))
    for hook in waiting:
        hook._fire(module)


class _Loader(importlib.abc.Loader):
    """Executes a module with its own loader, then tells the hooks."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._name = spec.name
        self._inner = spec.loader
        self._namespace = spec.submodule_search_locations if spec.loader is None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if self._inner is None else self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        loader = self._inner or _namespace_loader(self._name, self._namespace)
        if module.__spec__ is not None:
            module.__spec__.loader = loader
        module.__loader__ = loader
        if self._inner is not None:
            self._inner.exec_module(module)
        _executed(self._name, module)

    def __getattr__(self, name: str) -> object:
        """Between finding and executing (``importlib.util``, ``pkgutil``) this stands for the real loader."""
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


def _namespace_loader(name: str, path: Sequence[str] | None) -> importlib.abc.Loader:
    """What the import system gives a package without ``__init__``; its finder works out the path again on changes."""
    from importlib.machinery import NamespaceLoader, PathFinder

    loader: importlib.abc.Loader = NamespaceLoader(name, list(path or ()), PathFinder.find_spec)
    return loader


class _Finder(importlib.abc.MetaPathFinder):
    """Finds only modules that a hook waits for, by asking all other finders."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _hooks:
            return None
        # Another hook of this kind asks all finders again, us among them.
        names: set[str] = self._asking.__dict__.setdefault("names", set())
        if name in names:
            return None
        names.add(name)
        try:
            spec = self._find(name, path, target)
        finally:
            names.discard(name)
        if spec is None:
            return None
        if spec.loader is not None and not hasattr(spec.loader, "exec_module"):
            warnings.warn(f"ep_hooks cannot watch {name}: its loader has no exec_module", RuntimeWarning, stacklevel=2)
            return spec
        spec.loader = _Loader(spec)
        return spec

    def _find(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec else None
            if spec is not None:
                return spec
        return None


_finder = _Finder()
