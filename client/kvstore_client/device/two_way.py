"""Transfers of one pool, in and out, that do not wait for each other: each way has a stream and a buffer of its own.

Owns both, and the registrations of host memory, which serve both. Never copies.
"""

from __future__ import annotations

import contextlib

from kvstore_client.device.means import CopyMeans
from kvstore_client.device.memory import DeviceMemory
from kvstore_client.device.pool import DevicePool
from kvstore_client.device.registered import RegisteredMemory
from kvstore_client.device.transfers import DeviceTransfers


class TwoWayTransfers:
    """`loads` copies into pages of `pool`, `stores` out of them. `close` it once all loads have been finished. Raises
    DeviceError."""

    def __init__(self, device: DeviceMemory, pool: DevicePool) -> None:
        with contextlib.ExitStack() as undo:
            registered = RegisteredMemory(device)
            undo.callback(registered.close)
            means = []
            for _ in range(2):
                means.append(CopyMeans(device, pool.block_bytes, registered=registered))
                undo.callback(means[-1].close)
            self.loads, self.stores = (DeviceTransfers(device, pool, means=each) for each in means)
            self._ending = undo.pop_all()

    def close(self) -> None:
        """Wait for copies, unregister all memory. Idempotent."""
        self._ending.close()
