"""``ep_hooks.declare``: what the owner of a parameter says about its reduction domain."""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ep_hooks.domains import Domain
from ep_hooks.errors import DomainError

__all__ = ["declaration_of", "declare"]

_DECLARED = WeakTensorKeyDictionary()


def declare(parameter: Tensor, domain: str | Domain) -> Tensor:
    """Declare the reduction domain of ``parameter``.

    Declare before ``ep_hooks.attach`` or the first ``clip_grad_norm_``, and after the framework has replaced the
    parameter (``fully_shard`` makes new ones). Changes nothing on the tensor itself.

    Args:
        parameter: the parameter, as it stands in the optimizer.
        domain: ``"dense"``, ``"expert"``, ``"ep_sum"`` or a :class:`ep_hooks.Domain`.

    Returns:
        ``parameter``.

    Raises:
        DomainError: no such built-in domain.
        TypeError: ``parameter`` is no tensor.
    """
    if not isinstance(parameter, Tensor):
        raise TypeError(f"declare() takes a parameter, got {type(parameter).__name__}")
    if not isinstance(domain, str | Domain):
        raise DomainError(f"declare() takes the name of a domain or a Domain, got {domain!r}")
    _DECLARED[parameter] = Domain.named(domain) if isinstance(domain, str) else domain
    return parameter


def declaration_of(parameter: Tensor) -> Domain | None:
    """What was declared for ``parameter``, if anything."""
    found: Domain | None = _DECLARED.get(parameter)
    return found
