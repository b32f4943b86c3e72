"""Transfers of one pool, in and out, that do not wait for each other: each way has a stream and a buffer of its own.

Owns both, and what serves both: the registrations of host memory and the budget on the link. Never copies.
"""

from __future__ import annotations

import contextlib

from kvstore_client.device.budget import LinkBudget
from kvstore_client.device.gather import HIGHEST_PRIORITY, LOWEST_PRIORITY
from kvstore_client.device.means import CopyMeans
from kvstore_client.device.memory import DeviceMemory
from kvstore_client.device.pool import DevicePool
from kvstore_client.device.registered import RegisteredMemory
from kvstore_client.device.transfers import DeviceTransfers


class TwoWayTransfers:
    """`loads` copies into pages of `pool`, `stores` out of them: kernels of stores come behind those of the engine.
    `budget` is closed with it. `close` it once all loads have been finished. Raises DeviceError."""

    def __init__(self, device: DeviceMemory, pool: DevicePool, budget: LinkBudget | None = None) -> None:
        self.budget = budget or LinkBudget()
        with contextlib.ExitStack() as undo:
            registered = RegisteredMemory(device)
            undo.callback(registered.close)
            means = []
            for priority in (HIGHEST_PRIORITY, LOWEST_PRIORITY):
                made = CopyMeans(device, pool.block_bytes, registered=registered, budget=self.budget, priority=priority)
                undo.callback(made.close)
                means.append(made)
            undo.callback(self.budget.close)  # comes first: what waits for its rate goes on
            self.loads, self.stores = (DeviceTransfers(device, pool, means=each) for each in means)
            self._ending = undo.pop_all()

    def close(self) -> None:
        """Wait for copies, unregister all memory. Idempotent."""
        self._ending.close()
