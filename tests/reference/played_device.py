"""A CUDA device whose driver the test plays: by `call`, or by a library of its own."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from kvstore_client.device import DeviceError
from kvstore_client.device.memory import HostMappings
from kvstore_cuda.copies import CopyQueue
from kvstore_cuda.device import CudaDevice


class PlayedDevice(CudaDevice):
    """Device 0, without a context. `driver`: in place of the library, whose batches of copies are not played."""

    def __init__(self, driver: Any = None) -> None:
        self.index = self.handle = self.context = 0
        self.mappings = HostMappings()
        self.driver = driver or SimpleNamespace(
            CUdevice_attribute=int, CUstream=int, cuDriverGetVersion=lambda: (0, 12040)
        )
        self._copies = CopyQueue(self.driver)

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def quietly(self, name: str, *arguments: Any) -> None:
        with contextlib.suppress(DeviceError):
            self.call(name, *arguments)

    def forget(self, address: int, memory: object) -> None:
        self.quietly("cuMemHostUnregister", address)
