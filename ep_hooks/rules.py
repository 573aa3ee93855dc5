"""Rules: domains declared by a pattern over logical names."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from ep_hooks.domains import Domain

__all__ = ["Rule"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A domain declared for all parameters whose logical name matches a glob.

    Attributes:
        match: glob over the whole logical name; ``*`` crosses dots.
        domain: the declared domain.
        id: logical id to use instead of the name: ties parameters that have different names on different ranks.
    """

    match: str
    domain: Domain
    id: str | None = None

    def matches(self, name: str) -> bool:
        """Whether the rule applies to the parameter with this logical name."""
        return fnmatch.fnmatchcase(name, self.match)
