"""A stream of this process for copies, small ones by a kernel if that is faster, the others in a batch; and an event
behind the work that an engine has queued on a stream of its own.

The user of the stream destroys it. The module does not decide what is copied, or when it must have ended. The device's
context has to be current (`DeviceMemory.current`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from kvstore_client.device.gather import HIGHEST_PRIORITY
from kvstore_client.device.memory import DeviceError, DeviceMemory
from kvstore_cuda.copies import Runs, Way

Small = Callable[[Runs, Way, Any], Runs]


class CopyStream:
    """A CUDA stream for copies. `queue_small` first queues the small pieces by a kernel, and returns the other pieces,
    which the driver copies in one batch. A stream of higher `priority` (a lower number) runs its kernels before the
    engine's kernels. The caller destroys `handle`. Raises DeviceError.
    """

    def __init__(self, device: DeviceMemory, queue_small: Small, priority: int = HIGHEST_PRIORITY) -> None:
        self._device, self._queue_small = device, queue_small
        self.handle: Any = device.stream(priority)

    def queue(self, runs: Runs, way: Way) -> None:
        """Queue the copies of `runs` on this stream; they may run in any order. `way` is their direction: "to device",
        "to host" or "on device".
        """
        if len(runs):
            self._device.copy(self._queue_small(runs, way, self.handle), way, self.handle)

    def wait(self, event: int) -> None:
        """Make the work that is queued on this stream from now on wait for a CUDA event. `event` is the address of the
        CUevent.
        """
        self._device.call("cuStreamWaitEvent", self.handle, self._device.driver.CUevent(event), 0)

    def synchronize(self) -> None:
        """Wait until all work queued on this stream has ended, even if the driver reports a failure. Raises that
        failure, a DeviceError, afterwards.
        """
        try:
            self._device.synchronize(self.handle)
        except DeviceError:
            self._device.quietly("cuStreamSynchronize", self.handle)
            raise


_BLOCKING = 1  # a thread that waits for the event sleeps


class DeviceMoment:
    """The moment when all work that is queued on a CUDA stream now has ended. `stream` is the address of the CUstream.
    Raises DeviceError.
    """

    def __init__(self, device: DeviceMemory, stream: int) -> None:
        self._device = device
        with device.current():
            self._event = device.call("cuEventCreate", _BLOCKING)
            weakref.finalize(self, _destroy, device, self._event).atexit = False
            device.record(self._event, device.driver.CUstream(stream))

    @property
    def event(self) -> int:
        """The address of the CUevent that stands for this moment. It is valid as long as this object exists."""
        return int(self._event)

    def wait(self) -> None:
        with self._device.current():
            self._device.wait(self._event)

    def seconds_since(self, earlier: DeviceMoment) -> float | None:
        """Return the seconds from the moment `earlier` to this one, or None while the device has not reached both."""
        with contextlib.suppress(DeviceError), self._device.current():  # CUDA_ERROR_NOT_READY until then
            return float(self._device.call("cuEventElapsedTime", earlier._event, self._event)) / 1e3
        return None


def _destroy(device: DeviceMemory, event: Any) -> None:
    with contextlib.suppress(DeviceError), device.current():
        device.quietly("cuEventDestroy", event)
