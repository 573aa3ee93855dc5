"""Adapters are found by entry point, validated when they are loaded, and import no framework."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from ep_hooks import registry
from ep_hooks.errors import AdapterError
from ep_hooks.registry import (
    GROUP,
    DuplicateAdapterError,
    InvalidAdapterError,
    RegisteredAdapter,
    UnknownAdapterError,
    is_tested,
)


def adapter_module(**changes: Any) -> ModuleType:
    module = ModuleType("some_adapter")
    members: dict[str, Any] = {
        "HOST_MODULES": ("some_host.trainer",),
        "TESTED_VERSIONS": {"some-host": ("1.0", "1.2")},
        "install": lambda config=None: None,
        "uninstall": lambda: None,
    }
    vars(module).update({name: value for name, value in {**members, **changes}.items() if value is not None})
    return module


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    points: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in points if p.group == group])
    return points


def test_valid_module() -> None:
    found = RegisteredAdapter.from_module("some", adapter_module())
    assert found.name == "some"
    assert found.host_modules == ("some_host.trainer",)
    assert found.tested_versions == {"some-host": ("1.0", "1.2")}


@pytest.mark.parametrize("name", ["install", "uninstall", "HOST_MODULES", "TESTED_VERSIONS"])
def test_missing_member_is_named(name: str) -> None:
    with pytest.raises(InvalidAdapterError, match=name):
        RegisteredAdapter.from_module("some", adapter_module(**{name: None}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("install", "not callable"),
        ("HOST_MODULES", "some_host"),
        ("HOST_MODULES", ()),
        ("HOST_MODULES", ("some-host",)),
        ("HOST_MODULES", (1,)),
        ("TESTED_VERSIONS", {}),
        ("TESTED_VERSIONS", ("1.0", "1.2")),
        ("TESTED_VERSIONS", {"some-host": "1.0"}),
        ("TESTED_VERSIONS", {"some-host": ("1.2", "1.0")}),
        ("TESTED_VERSIONS", {"some-host": ("old", "new")}),
    ],
)
def test_malformed_member_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidAdapterError, match=name):
        RegisteredAdapter.from_module("some", adapter_module(**{name: value}))


def test_all_faults_in_one_message() -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        RegisteredAdapter.from_module("some", ModuleType("empty"))
    assert all(name in str(caught.value) for name in ("install", "uninstall", "HOST_MODULES", "TESTED_VERSIONS"))


def test_names_are_sorted_and_load_nothing(offered: list[EntryPoint]) -> None:
    offered += [EntryPoint(name, f"absent_{name}", GROUP) for name in "bca"]
    offered.append(EntryPoint("d", "absent_d", "another.group"))
    assert registry.adapter_names() == ("a", "b", "c")


def test_unknown_name_lists_the_known(offered: list[EntryPoint]) -> None:
    offered.append(EntryPoint("known", "absent", GROUP))
    with pytest.raises(UnknownAdapterError, match="known"):
        registry.adapter("other")


def test_nothing_installed_says_how(offered: list[EntryPoint]) -> None:
    assert registry.adapters() == ()
    with pytest.raises(UnknownAdapterError, match="pip install"):
        registry.adapter("accelerate")


def test_same_entry_point_twice_is_one(offered: list[EntryPoint]) -> None:
    offered += [EntryPoint("a", "absent_a", GROUP)] * 2
    assert registry.adapter_names() == ("a",)


def test_one_name_for_two_modules(offered: list[EntryPoint]) -> None:
    offered += [EntryPoint("a", "one", GROUP), EntryPoint("a", "two", GROUP)]
    with pytest.raises(DuplicateAdapterError, match="one and as two"):
        registry.adapter_names()


def test_module_that_cannot_be_imported(offered: list[EntryPoint]) -> None:
    offered.append(EntryPoint("a", "module_that_is_absent", GROUP))
    with pytest.raises(InvalidAdapterError, match="module_that_is_absent") as caught:
        registry.adapters()
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_errors_are_adapter_errors() -> None:
    assert all(issubclass(e, AdapterError) for e in (UnknownAdapterError, DuplicateAdapterError, InvalidAdapterError))


@pytest.mark.parametrize(
    ("found", "tested", "expected"),
    [
        ("1.15.0", ("1.10", "1.15"), True),
        ("1.15", ("1.15.0", "1.15.0"), True),
        ("1.9.3", ("1.10", "1.15"), False),
        ("1.15.1", ("1.10", "1.15.0"), False),
        ("2.13.0+cpu", ("2.13.0", "2.13.0"), True),
        ("5.24.0.dev0", ("5.24.0", "5.24.0"), False),
        ("5.24.0rc1", ("5.22", "5.24.0"), True),
        ("10.0", ("9.0", "11"), True),
        ("5.24.0.post1", ("5.24.0", "5.24.0"), True),
    ],
)
def test_is_tested(found: str, tested: tuple[str, str], expected: bool) -> None:
    assert is_tested(found, tested) is expected


def test_installed_version() -> None:
    assert registry.installed_version("pytest") == pytest.__version__
    assert registry.installed_version("no-such-distribution") is None


def test_the_projects_own_adapters_import_no_framework() -> None:
    code = (
        "import sys; from ep_hooks import registry\n"
        "print(*(adapter.name for adapter in registry.adapters()))\n"
        "print(*sorted({'accelerate', 'transformers', 'peft', 'deepspeed', 'megatron'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, frameworks = result.stdout.split("\n")[:2]
    assert {"accelerate", "fsdp2", "transformers"} <= set(names.split())
    assert not frameworks
