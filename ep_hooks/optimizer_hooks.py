"""What runs around ``optimizer.step``: the step's norm once for all optimizers of a model, and skipped steps."""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ep_hooks.modes import Mode
from ep_hooks.session import Session

__all__ = ["OptimizerHooks", "unwrap_optimizer"]


def unwrap_optimizer(optimizer: Any) -> Any:
    """The innermost optimizer; Accelerate and others wrap it in objects that cannot carry hooks."""
    while not isinstance(optimizer, Optimizer) or (
        isinstance(getattr(optimizer, "optimizer", None), Optimizer)
        and not hasattr(optimizer, "_optimizer_step_pre_hooks")
    ):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise TypeError(f"expected a torch optimizer, got {type(optimizer).__name__}")
        optimizer = inner
    return optimizer


class OptimizerHooks:
    """Hooks of one session on its optimizers.

    Several optimizers over one model (Muon and AdamW) share one norm: the first one to step in a round measures and
    clips, the others find it done. A round ends when an optimizer steps for the second time.
    """

    def __init__(self, session: Session, optimizers: Sequence[Optimizer]) -> None:
        self.session, self.optimizers = session, tuple(optimizers)
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._prepared: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._done = False
        self._found: dict[int, Tensor] = {}
        self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self.optimizers]
        self._handles += [optimizer.register_load_state_dict_post_hook(self._loaded) for optimizer in self.optimizers]
        self._skippers: list[tuple[Optimizer, Any, Any]] = []
        if "skip" in (session.config.nonfinite.action, session.config.threshold.action):
            for optimizer in self.optimizers:
                self._make_skippable(optimizer)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        for optimizer, ours, before in self._skippers:
            if optimizer.__dict__.get("step") is ours:
                del optimizer.__dict__["step"]
                if before is not None:
                    optimizer.__dict__["step"] = before
        self._skippers.clear()

    def clipped(self) -> None:
        """The caller has measured and clipped this round's gradients itself."""
        self._done = True
        self._stepped.clear()

    def prepare(self, optimizer: Optimizer) -> Tensor | None:
        """Measure now, before a scaler decides whether to step; returns the agreed non-finite flag."""
        self._round(optimizer)
        self._prepared.add(optimizer)
        return self.session.last.nonfinite if self.session.last is not None and self._acts() else None

    def stepped(self, optimizer: Optimizer) -> None:
        """The scaler has finished with ``optimizer``, stepped or skipped."""
        self._prepared.discard(optimizer)

    def found_inf(self, optimizer: Optimizer, flags: Sequence[Tensor]) -> None:
        """A scaler has unscaled the gradients of ``optimizer``; ``flags`` are its 0-dim results by device."""
        if flags:
            device = flags[0].device
            self._found[id(optimizer)] = torch.stack([flag.detach().to(device) for flag in flags]).amax()
        found = list(self._found.values())
        self.session.found_inf = torch.stack([flag.to(found[0].device) for flag in found]).amax() if found else None

    def forget_found_inf(self) -> None:
        """The scaler has updated its scale: its findings are spent."""
        self._found.clear()
        self.session.found_inf = None

    def _acts(self) -> bool:
        return self.session.mode in (Mode.REPAIR, Mode.ENFORCE)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._prepared and self._needed():
            self._round(optimizer)
        if self.session.auditor is not None:
            self.session.auditor.before_step()

    def _loaded(self, optimizer: Optimizer) -> None:
        if self.session.auditor is not None:
            self.session.auditor.loaded = True

    def _needed(self) -> bool:
        """Whether a step in which the caller did not clip needs anything from us; the same on every rank."""
        config = self.session.config
        return (
            config.clip.max_norm is not None
            or bool(self.session.agreed.reductions)
            or config.nonfinite.action != "framework"
            or config.threshold.norm is not None
        )

    def _round(self, optimizer: Optimizer) -> None:
        if self._done and optimizer not in self._stepped:
            self._stepped.add(optimizer)
            return
        self._stepped.clear()
        self._stepped.add(optimizer)
        self._done = True
        self.session.skip_step = False
        clip = self.session.config.clip
        # Where nobody asked for a clip, pending sums and policies still apply.
        self.session.clip(math.inf if clip.max_norm is None else clip.max_norm, clip.norm_type)

    def _make_skippable(self, optimizer: Optimizer) -> None:
        before = optimizer.__dict__.get("step")  # a learning-rate scheduler may have wrapped it
        inner = before if before is not None else type(optimizer).step.__get__(optimizer)

        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            prepared = self in hooks._prepared
            if not prepared:
                hooks._round(self)
                hooks._prepared.add(self)  # the pre-hook inside `inner` finds it done
            try:
                return None if hooks.session.skip_step else inner(*args, **kwargs)
            finally:
                if not prepared:
                    hooks._prepared.discard(self)

        hooks = self
        ours = types.MethodType(step, optimizer)  # a bound method: schedulers look for __func__
        optimizer.__dict__["step"] = ours
        self._skippers.append((optimizer, ours, before))
