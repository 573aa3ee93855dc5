"""ep_hooks: every gradient element counted exactly once, reduced over the right ranks, clipped by one coefficient.

Importing this package changes nothing, and loads torch only when one of the public names is used: the launcher runs
before the user's script and must not import what the script may want to import first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ep_hooks.version import __version__

if TYPE_CHECKING:
    from ep_hooks.api import Handle, attach, clip_grad_norm_, explain, probe, total_norm
    from ep_hooks.config import EPHooksConfig, load_config
    from ep_hooks.declarations import declare
    from ep_hooks.domains import REPLICATE, SHARD, Domain, partial
    from ep_hooks.errors import EPHooksError
    from ep_hooks.topology import Axis, Topology

__all__ = [
    "REPLICATE",
    "SHARD",
    "Axis",
    "Domain",
    "EPHooksConfig",
    "EPHooksError",
    "Handle",
    "Topology",
    "__version__",
    "attach",
    "clip_grad_norm_",
    "declare",
    "explain",
    "load_config",
    "partial",
    "probe",
    "total_norm",
]

_HOMES = {
    "api": ("Handle", "attach", "clip_grad_norm_", "explain", "probe", "total_norm"),
    "config": ("EPHooksConfig", "load_config"),
    "declarations": ("declare",),
    "domains": ("REPLICATE", "SHARD", "Domain", "partial"),
    "errors": ("EPHooksError",),
    "topology": ("Axis", "Topology"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ep_hooks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ep_hooks.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
