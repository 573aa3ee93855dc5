"""What ep_hooks may do to a run: nothing, watch, repair flags and sums, or enforce norm and clip as well."""

from __future__ import annotations

import os
from enum import StrEnum

from ep_hooks.errors import ConfigError

__all__ = ["ENVIRONMENT_VARIABLE", "PROBE_ONLY", "Mode", "resolve_mode"]

ENVIRONMENT_VARIABLE = "EP_HOOKS"
PROBE_ONLY = "EP_HOOKS_PROBE"
"""Environment variable; ``1``: probe in the first step that is measured, show the table, and end the run."""


class Mode(StrEnum):
    """How far ep_hooks goes; each mode includes the ones before it.

    ``off``: not active. ``observe``: compute, compare and log, change no bit of the run. ``repair``: set what the
    framework reads and run pending reductions. ``enforce``: norm and clip too.
    """

    OFF = "off"
    OBSERVE = "observe"
    REPAIR = "repair"
    ENFORCE = "enforce"


def resolve_mode(configured: str | None = None, argument: str | None = None) -> Mode:
    """The mode in force: environment over configuration over argument, ``enforce`` if none says.

    The environment variable ``EP_HOOKS`` takes a mode's name, ``0`` (off) or ``1`` (no opinion).

    Raises:
        ConfigError: a value that is no mode.
    """
    environment = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower()
    if environment == "0":
        return Mode.OFF
    for value, origin in (
        ("" if environment == "1" else environment, f"environment variable {ENVIRONMENT_VARIABLE}"),
        (configured, "config `mode`"),
        (argument, "argument `mode`"),
    ):
        if value is not None and value != "":
            try:
                return Mode(value)
            except ValueError:
                valid = ", ".join(Mode)
                raise ConfigError(f"{origin} is {value!r}, which is no mode; valid are {valid}, 0 and 1") from None
    return Mode.ENFORCE
