"""A stream of this process for copies, merged and batched.

Owns the stream until its user destroys it. Never decides what is copied, or when it must have ended.
The device's context has to be current (`DeviceMemory.current`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore_client.device.memory import DeviceMemory
from kvstore_proto.cuda_copies import Run, Way, has_batches, merged, queue_copies

_NON_BLOCKING = 1


class CopyStream:
    """Raises DeviceError."""

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        self._is_batched = has_batches(device.driver)
        self.handle: Any = device.call("cuStreamCreate", _NON_BLOCKING)

    def queue(self, runs: Sequence[Run], way: Way) -> None:
        """Queue copies, in no order among them, neighbours as one."""
        queue_copies(self._device.driver, merged(runs), way, self.handle, is_batched=self._is_batched)

    def wait(self, event: int) -> None:
        """What is queued from now on runs after this event (a CUevent's address) has passed."""
        self._device.call("cuStreamWaitEvent", self.handle, self._device.driver.CUevent(event), 0)

    def synchronize(self) -> None:
        """Wait until all that is queued has ended."""
        self._device.call("cuStreamSynchronize", self.handle)
