"""Finds the DistributedDataParallel wrapper that is put around a model after it was attached.

The wrapper knows whether the last backward was synchronised, but a wrapped module does not know its wrapper. While a
model is attached, ``DistributedDataParallel.__init__`` (torch) also notes the new instance.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ep_hooks.patching import PatchSet

__all__ = ["start_watching", "stop_watching", "wrappers_of"]

_WRAPPERS: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_patches = PatchSet()
_watchers = 0


def start_watching() -> None:
    """Note wrappers from now on; counted, so that several attached models share one patch."""
    global _watchers
    _watchers += 1
    if _watchers == 1:
        _patches.replace(DistributedDataParallel, "__init__", _init)


def stop_watching() -> None:
    """Undo one :func:`start_watching`; the class is restored with the last one."""
    global _watchers
    _watchers -= 1
    if _watchers == 0:
        _patches.restore()


def wrappers_of(module: nn.Module) -> list[DistributedDataParallel]:
    """Live wrappers whose module is ``module``."""
    return [wrapper for wrapper in _WRAPPERS if wrapper.module is module]


def _init(original: Any, wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    original(wrapper, *args, **kwargs)
    _WRAPPERS.add(wrapper)
