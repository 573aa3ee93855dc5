"""Policies: what happens to a step whose gradients are not finite or whose norm is too large."""

from __future__ import annotations

import logging
from enum import StrEnum

from ep_hooks.config import EPHooksConfig
from ep_hooks.errors import NonFiniteGradientError, NormThresholdError
from ep_hooks.norm import Verdict

__all__ = ["Action", "decide"]

logger = logging.getLogger("ep_hooks")


class Action(StrEnum):
    """What to do with the step: ``clip`` it as usual, ``skip`` it, or go on with ``zero`` gradients."""

    CLIP = "clip"
    SKIP = "skip"
    ZERO = "zero"


def decide(verdict: Verdict, config: EPHooksConfig, *, error_if_nonfinite: bool = False) -> Action:
    """The action for a verdict. The verdict is equal on all ranks, and so is the decision.

    ``framework`` without a threshold never looks at the numbers; every other policy reads one from the device.

    Raises:
        NonFiniteGradientError, NormThresholdError: the policy says to raise; on all ranks together.
    """
    action = "raise" if error_if_nonfinite else config.nonfinite.action
    if action != "framework" and bool(verdict.nonfinite):
        bad = [name for name, norm in verdict.domains.items() if not bool(norm.isfinite())]
        text = f"gradients are not finite in domain(s) {', '.join(bad) or 'unknown'}: norm {float(verdict.norm)}"
        if action == "raise":
            raise NonFiniteGradientError(text + "; the decision is the same on all ranks")
        logger.warning("ep_hooks: %s; action: %s", text, action)
        return Action(action)
    limit = config.threshold.norm
    if limit is not None and float(verdict.norm) > limit:
        text = f"gradient norm {float(verdict.norm):g} exceeds the threshold {limit:g}"
        if config.threshold.action == "raise":
            raise NormThresholdError(text)
        logger.warning("ep_hooks: %s; action: %s", text, config.threshold.action)
        if config.threshold.action != "warn":
            return Action(config.threshold.action)
    return Action.CLIP
