"""A stream of this process for copies: small ones by a kernel where that is faster, the others in a batch.

Owns the stream until its user destroys it. Never decides what is copied, or when it must have ended.
The device's context has to be current (`DeviceMemory.current`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore_client.device.gather import HIGHEST_PRIORITY
from kvstore_client.device.memory import DeviceError, DeviceMemory
from kvstore_cuda.copies import CopyQueue, Runs, Way

_NON_BLOCKING = 1
Small = Callable[[Runs, Way, Any], Runs]


class CopyStream:
    """`queue_small` queues what the kernel shall copy and returns the others (`Crossover`). The stream's kernels come
    before those of streams of less `priority`, such as an engine's: few as they are, they would wait for a whole
    prefill. Raises DeviceError."""

    def __init__(self, device: DeviceMemory, queue_small: Small, priority: int = HIGHEST_PRIORITY) -> None:
        self._device, self._queue_small = device, queue_small
        self._copies = CopyQueue(device.driver)
        self.handle: Any = device.call("cuStreamCreateWithPriority", _NON_BLOCKING, priority)

    def queue(self, runs: Runs, way: Way) -> None:
        """Queue copies, in no order among them."""
        if len(runs):
            self._copies.add(self._queue_small(runs, way, self.handle), way, self.handle)

    def wait(self, event: int) -> None:
        """What is queued from now on runs after this event (a CUevent's address) has passed."""
        self._device.call("cuStreamWaitEvent", self.handle, self._device.driver.CUevent(event), 0)

    def synchronize(self) -> None:
        """Wait until all that is queued has ended, also where a call says that something failed: its memory is used
        anew then."""
        try:
            self._device.call("cuStreamSynchronize", self.handle)
        except DeviceError:
            self._device.quietly("cuStreamSynchronize", self.handle)
            raise
