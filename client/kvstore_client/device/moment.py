"""An event behind what an engine has queued on a stream: copies wait for it, and it says when that was done."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from kvstore_client.device.memory import DeviceError, DeviceMemory

_BLOCKING = 1  # a thread that waits for the event sleeps


class DeviceMoment:
    """Behind what is queued on a stream (a CUstream's address) now. Raises DeviceError."""

    def __init__(self, device: DeviceMemory, stream: int) -> None:
        self._device = device
        with device.current():
            self._event = device.call("cuEventCreate", _BLOCKING)
            weakref.finalize(self, _destroy, device, self._event).atexit = False
            device.call("cuEventRecord", self._event, device.driver.CUstream(stream))

    @property
    def event(self) -> int:
        """The CUevent's address; good as long as the moment is kept."""
        return int(self._event)

    def wait(self) -> None:
        with self._device.current():
            self._device.call("cuEventSynchronize", self._event)

    def seconds_since(self, earlier: DeviceMoment) -> float | None:
        """None until both have come."""
        with contextlib.suppress(DeviceError), self._device.current():  # CUDA_ERROR_NOT_READY until then
            return float(self._device.call("cuEventElapsedTime", earlier._event, self._event)) / 1e3
        return None


def _destroy(device: DeviceMemory, event: Any) -> None:
    with contextlib.suppress(DeviceError), device.current():
        device.quietly("cuEventDestroy", event)
