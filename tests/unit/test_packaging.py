"""pyproject.toml against the tree: automatic discovery does not follow package-dir, so the lists are kept by hand."""

from __future__ import annotations

import tomllib
from pathlib import Path

import ep_hooks
from ep_hooks.registry import GROUP

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_below(folder: str, name: str) -> set[str]:
    found = (init.parent.relative_to(ROOT / folder).parts for init in (ROOT / folder).rglob("__init__.py"))
    return {".".join((name, *parts)) for parts in found}


def test_every_package_is_listed() -> None:
    expected = packages_below("ep_hooks", "ep_hooks") | packages_below("integrations", "ep_hooks.integrations")
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == expected


def test_every_entry_point_has_its_module() -> None:
    for name, module in PROJECT["project"]["entry-points"][GROUP].items():
        assert module == f"ep_hooks.integrations.{name}"
        assert (ROOT / "integrations" / f"{name}.py").is_file() or (ROOT / "integrations" / name).is_dir()


def test_version_is_a_release() -> None:
    assert ep_hooks.__version__.count(".") == 2


def test_core_dependencies_name_no_framework() -> None:
    names = {entry.split(">")[0] for entry in PROJECT["project"]["dependencies"]}
    assert names == {"torch", "pydantic", "pyyaml", "rich", "typer"}
