"""Logical parameter names: the same parameter has the same name whatever wraps the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn

__all__ = ["logical_name", "named_logical_parameters", "shorten"]

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Attribute names that wrapper modules add anywhere in a path: FSDP1, activation checkpointing, torch.compile."""

_WRAPPER_PATTERN = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(_WRAPPERS)})\.")
_LEADING_PATTERN = re.compile(r"^(?:module\.|base_model\.model\.)+")


def logical_name(name: str) -> str:
    """``name`` without wrapper prefixes (DDP's ``module.``, FSDP, torch.compile, PEFT's ``base_model.model.``).

    Local names still lie: every pipeline stage has a ``layers.0`` and every expert-parallel rank an
    ``experts.0``. An adapter that knows the global numbers puts them in; otherwise the holder set of the
    domain keeps such twins apart.
    """
    return _LEADING_PATTERN.sub("", _WRAPPER_PATTERN.sub("", name))


def named_logical_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(logical name, parameter) of every trainable parameter, each once, ties included once."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield logical_name(name), parameter


def shorten(names: Iterable[str], limit: int = 8) -> str:
    """Names for a message, bounded in number and length."""
    names = list(names)
    shown = [name if len(name) <= 120 else name[:117] + "..." for name in names[:limit]]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown) + more
