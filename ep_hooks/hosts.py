"""Host versions: outside the tested range ``enforce`` becomes ``observe``, and says so."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ep_hooks.config import EPHooksConfig
from ep_hooks.groups import distributed_rank
from ep_hooks.modes import Mode
from ep_hooks.registry import installed_version, is_tested

__all__ = ["mode_on_host", "version_facts"]


def mode_on_host(mode: Mode, tested: Mapping[str, tuple[str, str]], config: EPHooksConfig) -> Mode:
    """``mode``, or ``observe`` instead of ``repair`` and ``enforce`` on a host version that no test has seen.

    Prints one line on rank 0 when it falls back. ``allow_untested_host`` in the config keeps the mode.

    Args:
        tested: distribution -> lowest and highest tested version.
    """
    if mode in (Mode.OFF, Mode.OBSERVE) or config.allow_untested_host:
        return mode
    for host, (lowest, highest) in tested.items():
        found = installed_version(host)
        if found is not None and not is_tested(found, (lowest, highest)):
            if distributed_rank() == 0:
                print(
                    f"ep_hooks: {host} {found} is outside the tested range {lowest} to {highest}: mode observe instead "
                    f"of {mode}. Set allow_untested_host: true to {mode} all the same.",
                    file=sys.stderr,
                    flush=True,
                )
            return Mode.OBSERVE
    return mode


def version_facts(tested: Mapping[str, tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """(label, version) of the installed hosts, for the banner and for the agreement of the ranks."""
    return tuple((f"{host} version", found) for host in tested if (found := installed_version(host)) is not None)
