"""The shared resources of a session's copies to and from its device: a stream, a pinned buffer, registered host memory,
and the budget of the link.

Memory is registered once per process. Pass one `registered` to every `CopyResources` of a process; you own it and close
it last. You also own a `budget` that you pass, and close it first. A `CopyResources` owns the other parts until
`close`. If nothing refers to them any more, they end without it: the buffer is never unmapped while registered. The
module does not decide what is copied. One thread at a time uses stream and buffer: the one that holds `using`. No store
waits for its rate while it holds `using`.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from typing import Any

import numpy as np

from kvstore_client.device.budget import LinkBudget
from kvstore_client.device.crossover import CopyCrossover
from kvstore_client.device.gather import HIGHEST_PRIORITY
from kvstore_client.device.memory import DeviceError, DeviceMemory
from kvstore_client.device.registered import RegisteredMemory
from kvstore_client.device.stores import Stores
from kvstore_client.device.streams import CopyStream
from kvstore_client.errors import invalid
from kvstore_client.memory import Bytes

BUFFER_BYTES = 8 << 20


class CopyResources:
    """The resources that all copies between one session and its device share: a CUDA stream of the given `priority`, a
    pinned host buffer of at least `least_bytes` bytes, the `registered` host memory, and the `budget` that limits the
    rate of copies. If `registered` or `budget` is None, the object makes its own and closes it in `close`. Raises
    DeviceError.
    """

    def __init__(
        self,
        device: DeviceMemory,
        least_bytes: int = 0,
        *,
        registered: RegisteredMemory | None = None,
        budget: LinkBudget | None = None,
        priority: int = HIGHEST_PRIORITY,
    ) -> None:
        self.device = device
        self.crossover = CopyCrossover(device)
        with device.current(), contextlib.ExitStack() as undo:
            self.stream = CopyStream(device, self.crossover.queue_small, priority)
            undo.callback(device.quietly, "cuStreamDestroy", self.stream.handle)
            memory = mmap.mmap(-1, max(BUFFER_BYTES, least_bytes))
            self.buffer: Bytes = np.frombuffer(memory, np.uint8)
            self.buffer_address: int = self.buffer.__array_interface__["data"][0]
            device.register(self.buffer_address, self.buffer.nbytes, for_kernels=True)
            undo.callback(device.forget, self.buffer_address, self.buffer)
            self.registered = registered or RegisteredMemory(device)
            undo.pop_all()
        self._owned = self.registered if registered is None else None
        self._ending = weakref.finalize(self, _end, device, self.stream.handle, self.buffer, self._owned)
        self._ending.atexit = False  # the driver may be gone already then
        self.budget = budget or LinkBudget()
        self._owned_budget = self.budget if budget is None else None
        # For the thread that holds `using`.
        self.stores = Stores(self.stream, self.registered, self.buffer, seen=self.budget.seen)
        self.using = threading.Lock()
        self._is_closed = False

    def decoding(self, is_decoding: bool) -> None:
        """Note, before each step of the engine, whether the step decodes, since copies are limited only then
        (`LinkBudget.decoding`).
        """
        self.budget.decoding(is_decoding)

    def close(self) -> None:
        """Wait for the copies under way, then free the stream, the buffer and the registered memory that belongs to
        this object. A second call does nothing.
        """
        if self._owned_budget is not None:
            self._owned_budget.close()
        with self.using:
            if self._is_closed:
                return
            self._is_closed = True
            self.crossover.close()
            with self.device.current():
                self.stores.settle()
                self.device.quietly("cuStreamSynchronize", self.stream.handle)
                if self._owned is not None:
                    self._owned.close()
                self._ending()

    def check_open(self) -> None:
        """Raise KVStoreError if `close` was called. The caller holds the lock `using`."""
        if self._is_closed:
            raise invalid("these transfers are closed")


def _end(device: DeviceMemory, stream: Any, buffer: Bytes, owned: RegisteredMemory | None) -> None:
    """End the resources. `buffer` stays alive until the device does not know it any more."""
    with contextlib.suppress(DeviceError), device.current():
        device.quietly("cuStreamSynchronize", stream)
        device.quietly("cuStreamDestroy", stream)
    device.forget(buffer.__array_interface__["data"][0], buffer)
    if owned is not None:
        owned.begin_close()
