"""A tier's capacity, changed while it serves: by order, and by the host tier itself under memory pressure.

More is there at once. Less takes its time: the ceiling falls, the tier is emptied down to it (empty containers first,
then the one with the fewest bytes, and so on; blocks that NVMe has are dropped, others written there or evicted, as
always), and only then is the capacity the smaller one, so that no figure ever shows more used than there is. What is
read or written meanwhile is tried again. Staging and blocks under a lease are kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from kvstore_tiers.host import HostTier
from kvstored.clock import NS_PER_S, Clock
from kvstored.completions import CompletionQueue
from kvstored.store.degraded.memory import MemoryReading
from kvstored.store.degraded.modes import DegradedModes, Mode
from kvstored.store.transfer.room import Room
from kvstored.telemetry import Counters

if TYPE_CHECKING:
    from kvstore_tiers.nvme.tier import NvmeTier  # takes its time to load, and not every daemon has it

log = logging.getLogger(__name__)
audit_log = logging.getLogger("kvstored.audit")
AGAIN_S = 1.0
PART = "host"
LOOK_S = 0.5
CALM_S = 10.0  # without pressure before it grows
GROW_SHARE = 4  # one step is at most this part of what is free beyond the margin
STALLED_PERCENT = 10.0


async def shrink_to_ceiling(tier: HostTier | NvmeTier, room: Room, give_back: Callable[[], Awaitable[bool]]) -> bool:
    """Empty containers of `tier` and give them back until it uses no more than its ceiling. `give_back` removes one
    empty container, and returns False when there is none. Return False when what is left is being read, written or
    pinned.
    """
    tried: set[int] = set()
    while tier.used_bytes > tier.ceiling_bytes:
        if await give_back():
            continue
        left = [each for each in tier.containers() if each.container not in tried]
        if not left:
            return False
        emptiest = min(left, key=lambda each: each.used_slots * each.slot_bytes)
        tried.add(emptiest.container)  # whether or not it works: slots in limbo keep a container
        await room.vacate(emptiest.container)
        await asyncio.sleep(0)
    return True


class TierResize:
    """A component that changes a tier's capacity while the tier is in use. `name` stands for the tier in the log. A new
    change replaces the one under way."""

    def __init__(
        self, name: str, tier: HostTier | NvmeTier, room: Room, give_back: Callable[[], Awaitable[bool]]
    ) -> None:
        self._name = name
        self._tier = tier
        self._room = room
        self._give_back = give_back
        self._shrinking: asyncio.Task[None] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._shrinking is not None and not self._shrinking.done()

    def resize(self, capacity_bytes: int) -> None:
        """Begin to change the tier's capacity to `capacity_bytes`, and return at once. A smaller capacity takes effect
        when enough blocks have been evicted."""
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
    """A component that deletes empty slabs (files of the NVMe tier), which gives their space back to the file
    system."""

    def __init__(self, nvme: NvmeTier, completions: CompletionQueue) -> None:
        self._nvme = nvme
        self._completions = completions

    async def give_back(self) -> bool:
        """Delete one empty slab. Return False when there is none, or the file system refuses."""
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


class HostSizer:
    """A controller that lowers the ceiling of the DRAM tier (the bytes that it may use) below the configured capacity
    while the machine is short of memory.

    When less than `min_free_bytes` is free, the ceiling falls by the missing bytes, and the memory of emptied arenas is
    given to the system, in a thread. When memory has been free for a while, the ceiling rises in steps, up to the
    configured capacity. `read` is `MemoryWatch.read`; call `tick` from a timer a few times a second. Growth waits
    longer than shrinking, so that the two do not chase each other."""

    def __init__(
        self,
        host: HostTier,
        room: Room,
        read: Callable[[], MemoryReading],
        modes: DegradedModes,
        clock: Clock,
        counters: Counters,
        *,
        min_free_bytes: int,
        arena_bytes: int,
    ) -> None:
        self._host = host
        self._room = room
        self._read = read
        self._modes = modes
        self._clock = clock
        self._counters = counters
        self._min_free_bytes = min_free_bytes
        self._arena_bytes = arena_bytes
        self._look_ns = 0
        self._calm_since_ns = clock.monotonic_ns()
        self._shrinking: asyncio.Task[bool] | None = None

    def tick(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if not self._min_free_bytes or now_ns < self._look_ns:
            return
        self._look_ns = now_ns + round(LOOK_S * NS_PER_S)
        reading = self._read()
        missing_bytes = self._min_free_bytes - reading.free_bytes
        if missing_bytes <= 0 and self._is_stalled(reading):
            missing_bytes = self._arena_bytes
        if missing_bytes > 0:
            self._calm_since_ns = now_ns
            self._shrink(missing_bytes, reading)
        elif self._host.ceiling_bytes < self._host.capacity_bytes:
            self._grow(-missing_bytes, now_ns)

    async def close(self) -> None:
        if self._shrinking is not None:
            self._shrinking.cancel()
            await asyncio.wait([self._shrinking])

    def _is_stalled(self, reading: MemoryReading) -> bool:
        """Say whether tasks wait for memory although some is left: reclaim does not keep up."""
        return reading.stalled_percent >= STALLED_PERCENT and reading.free_bytes < 2 * self._min_free_bytes

    def _shrink(self, missing_bytes: int, reading: MemoryReading) -> None:
        if self._shrinking is not None and not self._shrinking.done():
            return  # what was given back is not seen yet
        floor_bytes = self._host.charged_bytes + self._arena_bytes
        ceiling_bytes = max(floor_bytes, min(self._host.ceiling_bytes, self._host.used_bytes - missing_bytes))
        if ceiling_bytes >= self._host.ceiling_bytes and self._host.used_bytes <= self._host.ceiling_bytes:
            return  # it is as small as it gets
        self._host.set_ceiling(min(ceiling_bytes, self._host.ceiling_bytes))
        reason = (
            f"{reading.free_bytes >> 20} MiB left in {reading.where}, host.min_free is {self._min_free_bytes >> 20} MiB"
        )
        self._modes.enter(PART, Mode.SHRUNK, reason)
        # What is left of it, the next look tries again.
        emptying = shrink_to_ceiling(self._host, self._room, self.give_back)
        self._shrinking = asyncio.get_running_loop().create_task(emptying)

    async def give_back(self) -> bool:
        """Give the memory of one empty arena to the system. Return False when no arena is empty."""
        before_bytes = self._host.used_bytes
        release = self._host.take_empty()
        if release is None:
            return False
        self._counters.add("host_shrunk_bytes", before_bytes - self._host.used_bytes)
        await asyncio.get_running_loop().run_in_executor(None, release)
        return True

    def _grow(self, spare_bytes: int, now_ns: int) -> None:
        if now_ns - self._calm_since_ns < CALM_S * NS_PER_S:
            return
        margin_bytes = self._min_free_bytes // 2
        step_bytes = (spare_bytes - margin_bytes) // GROW_SHARE
        if step_bytes < self._arena_bytes:
            return
        self._calm_since_ns = now_ns - round((CALM_S - 1) * NS_PER_S)  # the next step after a second
        self._host.set_ceiling(min(self._host.capacity_bytes, self._host.ceiling_bytes + step_bytes))
        if self._host.ceiling_bytes == self._host.capacity_bytes:
            self._modes.enter(PART, Mode.OK, "")
