"""Writes docs/configuration.md from the configuration model, so that the page cannot lie.

python docs/generate_configuration.py [--check]
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from ep_hooks.config import EPHooksConfig

PAGE = Path(__file__).parent / "configuration.md"
HEAD = """# Configuration

Written by `docs/generate_configuration.py` from `ep_hooks/config.py`. The same keys work in YAML, JSON and a dict;
unknown keys are errors. `ep-hooks check FILE` validates a file and prints it with all defaults.

The mode in force is the environment variable `EP_HOOKS` (`0`, `off`, `observe`, `repair`, `enforce`; `1` has no
opinion), then the config's `mode`, then the argument of `attach`, then `enforce`.
"""


def page() -> str:
    """The whole page."""
    seen: list[type[BaseModel]] = []
    sections = [HEAD]
    queue: list[type[BaseModel]] = [EPHooksConfig]
    while queue:
        model = queue.pop(0)
        if model in seen:
            continue
        seen.append(model)
        lines = [f"\n## {model.__name__}\n", f"{(model.__doc__ or '').strip().splitlines()[0]}\n"]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            value = None if field.is_required() else field.get_default(call_default_factory=True)
            default = "required" if field.is_required() else "null" if value is None else repr(value)
            inner = _models(field.annotation)
            queue += inner
            if not field.is_required() and inner and field.default_factory:
                default = "see below" if default.endswith(")") else default
            cells = (f"`{name}`", _type(field.annotation), default, field.description or "")
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        sections.append("\n".join(lines))
    return "\n".join(sections) + "\n"


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(inner) for inner in get_args(annotation))
    if origin is not None and str(origin).endswith("Literal"):
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin is not None and hasattr(annotation, "__metadata__"):
        return _type(get_args(annotation)[0])
    if origin is not None:
        inner = ", ".join(_type(each) for each in get_args(annotation) if each is not Ellipsis)
        return f"{'list' if origin is tuple else origin.__name__} of {inner}"
    return "null" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
