"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import ranks


@pytest.fixture(scope="session", autouse=True)
def _rank_pools() -> Iterator[None]:
    """End the worker processes of :mod:`tests.support.ranks` with the session."""
    yield
    ranks.shutdown()
