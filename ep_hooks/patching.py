"""Reversible replacement of functions on classes, modules and instances.

Frameworks and other plugins patch the same functions, and not always in the order in which they take them back
(ms-swift replaces ``Accelerator.clip_grad_norm_`` for the length of one ``train()``). Restoring blindly would throw
their patch away, so a patch that is no longer on top is made inert and left where it is.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ep_hooks.errors import AdapterError

__all__ = ["Patch", "PatchSet"]

logger = logging.getLogger("ep_hooks")

_MISSING = object()


class Patch:
    """One replaced function.

    The attribute becomes a wrapper that calls ``replacement(original, *args, **kwargs)`` while the patch is active and
    ``original(*args, **kwargs)`` otherwise. For a method patched on its class ``original`` is the plain function and
    ``args[0]`` the instance; for a class method, and for a method patched on one instance, it is bound.

    Attributes:
        owner: class, module or instance that holds the attribute.
        name: the attribute.
        active: whether calls reach the replacement.
    """

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self.owner = owner
        self.name = name
        self.active = False
        self._replacement = replacement
        self._token: object = None
        self._installed: Any = _MISSING
        self._before: Any = _MISSING
        """What the owner's own ``__dict__`` held; missing if the attribute was inherited."""

    def apply(self) -> None:
        """Install the wrapper. Does nothing while the patch is active.

        Raises:
            AdapterError: there is no such attribute, or it is no function (a property, a slot, plain data).
        """
        if self.active:
            return
        # A wrapper left under somebody else's patch is used again; a second one would run the replacement twice.
        if not self._is_reachable():
            before = self._own()
            wrapper = self._wrap()
            try:
                setattr(self.owner, self.name, wrapper)
            except (AttributeError, TypeError) as error:
                raise AdapterError(f"cannot replace {self}: {error}") from error
            self._before, self._installed = before, wrapper
        self.active = True

    def restore(self) -> bool:
        """Take the wrapper back and leave the owner's ``__dict__`` as it was found.

        Returns:
            ``False`` if somebody has patched on top of it: the wrapper stays and only calls through. Else ``True``.
        """
        if self._installed is _MISSING:
            return True
        self.active = False
        found = self._own()
        if found is not self._installed and found is not self._before:
            logger.debug("%s was replaced again by somebody else; our wrapper stays below, inert", self)
            return False
        if found is self._before:  # somebody has put it back already
            pass
        elif self._before is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._before)
        self._installed = self._before = _MISSING
        return True

    def __str__(self) -> str:
        owner = getattr(self.owner, "__qualname__", None) or getattr(self.owner, "__name__", None)
        return f"{owner or type(self.owner).__qualname__}.{self.name}"

    def _own(self) -> Any:
        return getattr(self.owner, "__dict__", {}).get(self.name, _MISSING)

    def _is_reachable(self) -> bool:
        """Whether a call still comes by our wrapper, as far as ``functools.wraps``, closures and methods show it."""
        if self._installed is _MISSING:
            return False
        target = _function(self._installed)
        pending, seen = [self._own()], set[int]()
        while pending and len(seen) < 64:
            item = _function(pending.pop())
            if item is target:
                return True
            if id(item) in seen or not callable(item):
                continue
            seen.add(id(item))
            pending.append(getattr(item, "__wrapped__", None))
            pending.extend(getattr(item, "__defaults__", None) or ())
            if isinstance(item, functools.partial):
                pending += [item.func, *item.args]
            for cell in getattr(item, "__closure__", None) or ():
                try:
                    pending.append(cell.cell_contents)
                except ValueError:  # a variable that is not assigned yet
                    continue
        return False

    def _wrap(self) -> Any:
        """The wrapper for what the attribute is now, as the kind of descriptor that it was."""
        raw = inspect.getattr_static(self.owner, self.name, _MISSING)
        if raw is _MISSING and not hasattr(self.owner, self.name):
            raise AdapterError(f"{self} does not exist; this version of the framework is not supported")
        if not isinstance(self.owner, type):
            if raw is not self._own() and inspect.isdatadescriptor(raw):
                raise AdapterError(f"{self} is a property, and only functions can be replaced")
            return self._wrapper(getattr(self.owner, self.name))
        if isinstance(raw, staticmethod):
            return staticmethod(self._wrapper(raw.__func__))
        if isinstance(raw, classmethod):
            return classmethod(self._wrapper(raw.__func__, bind=True))
        if callable(raw) and not hasattr(type(raw), "__get__"):
            return staticmethod(self._wrapper(raw))
        return self._wrapper(raw)

    def _wrapper(self, original: Any, *, bind: bool = False) -> Callable[..., Any]:
        if not callable(original):
            raise AdapterError(f"{self} is {type(original).__name__}, and only functions can be replaced")
        replacement = self._replacement
        # An older wrapper that nobody can find any more may still be called; only the newest one acts.
        token = self._token = object()

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.active or token is not self._token:
                return original(*args, **kwargs)
            if bind:
                return replacement(functools.partial(original, args[0]), *args[1:], **kwargs)
            return replacement(original, *args, **kwargs)

        return wrapper


class PatchSet:
    """Several patches that are taken back together, the last one first.

    True while it holds an applied patch; a context manager that restores at its end.
    """

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._left: list[Patch] = []
        """Restored but still below somebody else's patch; used again if the same thing is replaced again."""

    def replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> Patch:
        """Replace ``owner.name``; see :class:`Patch`. The same replacement of the same thing is applied once.

        Raises:
            AdapterError: it cannot be replaced. What the set replaced before stays replaced.
        """
        for patch in self._patches + self._left:
            if patch.owner is owner and patch.name == name and patch._replacement is replacement:
                patch.apply()
                break
        else:
            patch = Patch(owner, name, replacement)
            patch.apply()
        if patch in self._left:
            self._left.remove(patch)
        if patch not in self._patches:
            self._patches.append(patch)
        return patch

    def restore(self) -> bool:
        """Restore all; ``False`` if a wrapper had to be left in place, inert. May be called again."""
        while self._patches:
            patch = self._patches.pop()
            if not patch.restore():
                self._left.append(patch)
        self._left = [patch for patch in self._left if not patch.restore()]
        return not self._left

    def __len__(self) -> int:
        return len(self._patches)

    def __enter__(self) -> PatchSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def _function(item: Any) -> Any:
    """The plain function inside a method or a static or class method."""
    return getattr(item, "__func__", item)
