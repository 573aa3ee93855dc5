"""Adapters by name, found through the entry-point group ``ep_hooks.adapters``.

An entry point's name is the adapter's, its value a module with ``HOST_MODULES``, ``TESTED_VERSIONS``, ``install`` and
``uninstall``. The module must not import its framework when it is imported itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ep_hooks.errors import AdapterError

if TYPE_CHECKING:
    from ep_hooks.adapter import Adapter

__all__ = [
    "GROUP",
    "DuplicateAdapterError",
    "InvalidAdapterError",
    "RegisteredAdapter",
    "UnknownAdapterError",
    "adapter",
    "adapter_names",
    "adapters",
    "installed_version",
    "is_tested",
]

GROUP = "ep_hooks.adapters"


class UnknownAdapterError(AdapterError):
    """No installed distribution offers an adapter of this name."""


class DuplicateAdapterError(AdapterError):
    """Two distributions offer different adapters of one name."""


class InvalidAdapterError(AdapterError):
    """An adapter's module cannot be imported or lacks what it must have."""


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """A validated adapter module.

    Attributes:
        name: name of the entry point.
        host_modules: modules of the framework; the launcher installs the adapter once one of them is imported.
        tested_versions: distribution -> lowest and highest version that the tests run against, both included.
        install: ``install(config)``, idempotent.
        uninstall: ``uninstall()``, idempotent.
        make_adapter: builds an :class:`ep_hooks.adapter.Adapter`; ``None`` where the module only installs.
    """

    name: str
    host_modules: tuple[str, ...]
    tested_versions: Mapping[str, tuple[str, str]]
    install: Callable[..., Any]
    uninstall: Callable[[], Any]
    make_adapter: Callable[..., Adapter] | None = None

    @classmethod
    def from_module(cls, name: str, module: ModuleType) -> RegisteredAdapter:
        """Validate ``module``.

        Raises:
            InvalidAdapterError: names everything that is missing or malformed.
        """
        wrong = [f"no function {f!r}" for f in ("install", "uninstall") if not callable(getattr(module, f, None))]
        hosts = getattr(module, "HOST_MODULES", None)
        if not isinstance(hosts, tuple) or not hosts or not all(_is_module_name(host) for host in hosts):
            wrong.append(f"HOST_MODULES must be a tuple of module names, got {hosts!r}")
        tested = getattr(module, "TESTED_VERSIONS", None)
        if not isinstance(tested, Mapping) or not tested or not all(map(_is_range, tested.values())):
            wrong.append(f"TESTED_VERSIONS must map a distribution to (lowest, highest) version, got {tested!r}")
        if wrong:
            raise InvalidAdapterError(f"adapter {name!r} ({module.__name__}): " + "; ".join(wrong))
        make = getattr(module, "make_adapter", None)
        return cls(name, hosts, dict(tested), module.install, module.uninstall, make)  # type: ignore[arg-type]  # checked above


def adapter_names() -> tuple[str, ...]:
    """Names of the installed adapters, sorted. Imports none of them.

    Raises:
        DuplicateAdapterError: one name stands for two modules.
    """
    return tuple(_found())


def adapter(name: str) -> RegisteredAdapter:
    """The adapter called ``name``; imports its module, not its framework.

    Raises:
        UnknownAdapterError: there is none; names those that there are.
        InvalidAdapterError: its module cannot be used.
    """
    found = _found()
    if name not in found:
        known = ", ".join(found) or "none: is ep-hooks installed (pip install ep-hooks), or only on sys.path?"
        raise UnknownAdapterError(f"no adapter {name!r}; installed are {known}")
    try:
        module = found[name].load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidAdapterError(f"adapter {name!r} ({found[name].value}) cannot be imported: {reason}") from error
    return RegisteredAdapter.from_module(name, module)


def adapters() -> tuple[RegisteredAdapter, ...]:
    """All installed adapters, sorted by name.

    Raises:
        InvalidAdapterError: one of them cannot be used.
    """
    return tuple(adapter(name) for name in adapter_names())


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, without importing it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def is_tested(found: str, tested: tuple[str, str]) -> bool:
    """Whether version ``found`` lies within ``tested``, ends included. A pre-release comes before its release."""
    lowest, highest = tested
    return _order(lowest) <= _order(found) <= _order(highest)


def _found() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise DuplicateAdapterError(
                f"adapter {point.name!r} is offered twice, as {other.value} and as {point.value}; uninstall one of them"
            )
    return found


def _is_module_name(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


def _is_range(tested: object) -> bool:
    return (
        isinstance(tested, tuple)
        and len(tested) == 2
        and all(isinstance(end, str) and re.match(r"\d", end) for end in tested)
        and _order(tested[0]) <= _order(tested[1])
    )


def _order(text: str) -> tuple[tuple[int, ...], bool]:
    """Sort key of a version: its release numbers without trailing zeros, and whether it is a final release.

    The local part (``+cpu``) and post-releases make no difference here.
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    numbers = [int(part) for part in match[1].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    final = not re.search(r"(a|b|rc|dev|alpha|beta)\.?\d*", text.split("+")[0][match.end() if match else 0 :])
    return tuple(numbers), final
