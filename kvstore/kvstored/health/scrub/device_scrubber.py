"""Passes over device memory that clients may import: the device checksums block by block, and what does not hold is
dropped, so that no further lease is given on it.

Clients read such a copy without the daemon, and CUDA cannot forbid an importer to write: nothing else would find that.
Owns the pass. No payload is moved: a tier whose device computes no checksums is left out.
Invariants: a pass pins nothing, so that no delete and no eviction waits for the device; an answer counts only where the
block still has the slot that was checked, in the same generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvstore_tiers.base import Outcome, OutcomeKind
from kvstored.completions import CompletionQueue
from kvstored.config.schema import ScrubSection
from kvstored.store.blocks import Residency
from kvstored.store.transfer.damage import Damage
from kvstored.telemetry import Counters

if TYPE_CHECKING:
    from kvstore_tiers.gpu import GpuTier

SLICE_ROWS = 4096  # looked through in one piece


class DeviceScrubber:
    """`tiers`: those whose memory clients import, by position. `run` is a task until it is cancelled."""

    def __init__(
        self,
        settings: ScrubSection,
        residency: Residency,
        tiers: Mapping[int, GpuTier],
        completions: CompletionQueue,
        damage: Damage,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._residency = residency
        self._tiers = tiers
        self._completions = completions
        self._damage = damage
        self._counters = counters

    async def run(self) -> None:
        await asyncio.sleep(self._settings.start_s)
        while True:
            await self.scrub()
            await asyncio.sleep(self._settings.interval_s)

    async def scrub(self) -> None:
        """One pass, at the scrubber's rate."""
        for position, tier in self._tiers.items():
            for first in range(0, len(self._residency.rows.mask), SLICE_ROWS):
                mask = np.frombuffer(bytes(self._residency.rows.mask[first : first + SLICE_ROWS]), np.uint8)
                for row in (first + np.flatnonzero(mask >> position & 1)).tolist():
                    if tier.verifies and self._residency.has(row, position):
                        await self._judge(position, tier, row)
                await asyncio.sleep(0)

    async def _judge(self, position: int, tier: GpuTier, row: int) -> None:
        residency = self._residency
        slot, key, token = residency.slot(row, position), residency.key(row), residency.token(row)
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        tier.verify(slot, key, self._completions.to_loop(ended.set_result))
        outcome = await asyncio.shield(ended)
        if outcome.kind is not OutcomeKind.FAILED:
            self._counters.add("scrubbed_bytes", slot.nbytes)
        is_there = residency.current(token) == row and residency.has(row, position)
        if outcome.kind is OutcomeKind.CORRUPT and is_there and residency.slot(row, position) == slot:
            self._counters.add("scrub_corrupt")
            self._damage.found(position, row, outcome.message)
        await asyncio.sleep(slot.nbytes / self._settings.rate_bytes)
