"""Passes over device memory that clients may import: the device checksums block by block, and a damaged copy is
dropped, so that no further lease is given on it.

Clients read these copies without the daemon, and CUDA cannot forbid an importer to write: no other check would find the
damage. The module owns the pass, not the check (`DeviceCheck`). No payload is moved: a tier whose device computes no
checksums is left out.
"""

from __future__ import annotations

import asyncio

import numpy as np

from kvstore_tiers.base import OutcomeKind
from kvstored.store.assembly import Store
from kvstored.tier_set import holding

SLICE_ROWS = 4096  # looked through in one piece


class DeviceScrubber:
    """A scrubber of GPU memory that clients may import: it verifies the checksums of all block copies there from time
    to time. Run `run` as a task."""

    def __init__(self, store: Store) -> None:
        self._settings = store.config.scrub
        self._residency = store.residency
        self._check = store.device_check
        self._counters = store.counters

    async def run(self) -> None:
        await asyncio.sleep(self._settings.start_s)
        while True:
            await self.scrub()
            await asyncio.sleep(self._settings.interval_s)

    async def scrub(self) -> None:
        """Verify all copies in device memory once, at the scrubber's rate."""
        for position, tier in self._check.tiers.items():
            for first in range(0, len(self._residency.rows.mask), SLICE_ROWS):
                mask = np.frombuffer(bytes(self._residency.rows.mask[first : first + SLICE_ROWS]), np.uint8)
                for row in (first + np.flatnonzero(holding(mask, position))).tolist():
                    if tier.verifies and self._residency.has(row, position):
                        await self._judge(position, row)
                await asyncio.sleep(0)

    async def _judge(self, position: int, row: int) -> None:
        nbytes = self._residency.slot(row, position).nbytes
        kind, is_damaged = await self._check.check(position, row)
        if kind is not OutcomeKind.FAILED:
            self._counters.add("scrubbed_bytes", nbytes)
        self._counters.add("scrub_corrupt", int(is_damaged))
        await asyncio.sleep(nbytes / self._settings.rate_bytes)
