"""The pytest plugin: one fixture. Imports nothing heavy until it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["ep_hooks_ranks"]


@pytest.fixture
def ep_hooks_ranks() -> Callable[..., list[Any]]:
    """Runs a function on N gloo ranks; see :func:`ep_hooks.testing.run_on_ranks`."""
    from ep_hooks.testing import run_on_ranks

    return run_on_ranks
