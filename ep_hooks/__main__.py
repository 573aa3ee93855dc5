"""``python -m ep_hooks``: see :mod:`ep_hooks.launcher`."""

from __future__ import annotations

from ep_hooks.launcher import main

# The launcher hands this module's namespace to the script, so nothing may follow.
main()
