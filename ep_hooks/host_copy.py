"""A number copied from the device in the background, to be read one step later without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopy"]


class HostCopy:
    """Copy of a 0-dim tensor on its way to the host.

    Reading it a step later waits only for work that was queued before it; the device has the step in between to do.
    """

    def __init__(self, value: Tensor) -> None:
        self._event: torch.Event | None = None
        if value.device.type == "cpu":
            self._copy = value.detach().clone()
            return
        self._copy = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._copy.copy_(value.detach(), non_blocking=True)
        self._event = torch.Event(device=value.device)
        self._event.record()

    def read(self) -> float:
        """The number."""
        if self._event is not None:
            self._event.synchronize()
        value: Any = self._copy.tolist()  # unlike item(), no operator that profilers count as a wait for the device
        return float(value)
