"""ep_hooks: every gradient element counted exactly once, reduced over the right ranks, clipped by one coefficient.

Importing this package changes nothing. Public functions: :func:`attach`, :func:`clip_grad_norm_`, :func:`total_norm`,
:func:`declare`, :func:`explain`.
"""

from __future__ import annotations

from ep_hooks.api import Handle, attach, clip_grad_norm_, explain, total_norm
from ep_hooks.config import EPHooksConfig, load_config
from ep_hooks.declarations import declare
from ep_hooks.domains import REPLICATE, SHARD, Domain, partial
from ep_hooks.errors import EPHooksError
from ep_hooks.topology import Axis, Topology
from ep_hooks.version import __version__

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
    "total_norm",
]
