"""Exceptions of ep_hooks. Each message says what was expected, what was found, on which ranks, and what to do."""

from __future__ import annotations

__all__ = [
    "AdapterError",
    "AgreementError",
    "AlreadyReducedError",
    "ConfigError",
    "DomainError",
    "EPHooksError",
    "MeasuredFaultError",
    "NonFiniteGradientError",
    "NormThresholdError",
    "TooLateError",
    "TopologyError",
    "UndeclaredParameterError",
    "UnfinishedGradientError",
    "UnsupportedError",
]


class EPHooksError(Exception):
    """Base class of every error that ep_hooks raises on purpose."""


class ConfigError(EPHooksError, ValueError):
    """A configuration value, key, rule or environment variable cannot be used."""


class TopologyError(EPHooksError, ValueError):
    """Axes, meshes or process groups contradict each other or lack a named axis."""


class DomainError(EPHooksError, ValueError):
    """A parameter's reduction domain is contradictory or cannot be resolved."""


class UndeclaredParameterError(DomainError):
    """A parameter has no evidence that says which ranks hold the same gradient."""


class AgreementError(EPHooksError, RuntimeError):
    """Ranks disagree about parameters, domains, schedule, configuration or versions."""


class UnfinishedGradientError(EPHooksError, RuntimeError):
    """The framework has not reduced the gradients yet, so they have no norm."""


class AlreadyReducedError(EPHooksError, RuntimeError):
    """The inputs of a pending SUM are equal on all ranks: somebody has reduced them before."""


class NonFiniteGradientError(EPHooksError, RuntimeError):
    """A gradient holds NaN or inf and the policy says to raise."""


class NormThresholdError(EPHooksError, RuntimeError):
    """The gradient norm exceeds the configured threshold and the policy says to raise."""


class TooLateError(EPHooksError, RuntimeError):
    """A repair came after the framework had read the value it repairs."""


class UnsupportedError(EPHooksError, NotImplementedError):
    """A framework mode that no test covers; refused by name rather than half-served."""


class MeasuredFaultError(EPHooksError, RuntimeError):
    """Probe or audit has measured a fault and the configuration says to raise."""


class AdapterError(EPHooksError, RuntimeError):
    """An adapter is missing, malformed or cannot be installed."""
