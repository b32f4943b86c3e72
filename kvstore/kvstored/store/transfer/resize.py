"""A tier's capacity, changed while it serves.

More is there at once. Less takes its time: the ceiling falls, the tier is emptied down to it, and only then is the
capacity the smaller one, so that no figure ever shows more used than there is. What is read or written meanwhile is
tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from kvstored.completions import CompletionQueue
from kvstored.store.transfer.room import Room
from kvstored.store.transfer.shrink import Resizable, shrink_to_ceiling

if TYPE_CHECKING:
    from kvstore_tiers.nvme.tier import NvmeTier  # takes its time to load, and not every daemon has it

log = logging.getLogger(__name__)
audit_log = logging.getLogger("kvstored.audit")
AGAIN_S = 1.0


class TierResize:
    """Of `tier`, called `name` in the log. One change at a time: a new one replaces the one under way."""

    def __init__(self, name: str, tier: Resizable, room: Room, give_back: Callable[[], Awaitable[bool]]) -> None:
        self._name = name
        self._tier = tier
        self._room = room
        self._give_back = give_back
        self._shrinking: asyncio.Task[None] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._shrinking is not None and not self._shrinking.done()

    def resize(self, capacity_bytes: int) -> None:
        """Begin; returns at once."""
        if self._shrinking is not None:
            self._shrinking.cancel()
        if capacity_bytes >= self._tier.used_bytes:
            self._tier.resize(capacity_bytes)
            return
        audit_log.info(
            "%s gives %d MiB back, down to %d MiB",
            self._name, (self._tier.used_bytes - capacity_bytes) >> 20, capacity_bytes >> 20,
        )  # fmt: skip
        self._shrinking = asyncio.get_running_loop().create_task(self._shrink(capacity_bytes))

    async def close(self) -> None:
        if self._shrinking is not None:
            self._shrinking.cancel()
            await asyncio.wait([self._shrinking])

    async def _shrink(self, capacity_bytes: int) -> None:
        self._tier.set_ceiling(min(self._tier.ceiling_bytes, capacity_bytes))
        while not await shrink_to_ceiling(self._tier, self._room, self._give_back):
            await asyncio.sleep(AGAIN_S)
            self._tier.set_ceiling(min(self._tier.ceiling_bytes, capacity_bytes))  # it may have grown again meanwhile
        self._tier.resize(capacity_bytes)
        audit_log.info("%s has its new capacity of %d MiB", self._name, capacity_bytes >> 20)


class SlabsBack:
    """Gives empty slabs of NVMe back to the file system."""

    def __init__(self, nvme: NvmeTier, completions: CompletionQueue) -> None:
        self._nvme = nvme
        self._completions = completions

    async def give_back(self) -> bool:
        """Delete one empty slab; False when there is none or the file system refuses."""
        empty = next((each.container for each in self._nvme.containers() if not each.used_slots), None)
        if empty is None:
            return False
        self._nvme.set_aside(empty)
        outcome = await asyncio.shield(self._completions.outcome_of(partial(self._nvme.discard, empty)))
        if not outcome.ok:
            log.warning("slab %d cannot be given back: %s", empty, outcome.message)
            self._nvme.put_back(empty)
            return False
        self._nvme.discarded(empty)
        return True
