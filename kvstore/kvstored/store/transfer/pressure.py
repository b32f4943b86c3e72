"""Memory pressure: the host tier gives arenas back before the kernel kills a process, and grows again afterwards.

Owns the ceiling of the host tier below its configured capacity. When less than `min_free_bytes` is left, the ceiling
falls by what is missing, the emptiest arenas are emptied (blocks that NVMe has are dropped, others written there or
evicted, as always) and their memory is given to the system, in a thread. When there has been room for a while the
ceiling rises in steps. Staging and blocks under a lease are kept.
Invariants: the ceiling never exceeds the configured capacity; one shrinking at a time; growth waits longer than
shrinking, so that the two do not chase each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore_tiers.host import HostTier
from kvstored.clock import NS_PER_S, Clock
from kvstored.store.degraded.memory import MemoryReading
from kvstored.store.degraded.modes import DegradedModes, Mode
from kvstored.store.transfer.room import Room
from kvstored.store.transfer.shrink import shrink_to_ceiling
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
PART = "host"
LOOK_S = 0.5
CALM_S = 10.0  # without pressure before it grows
GROW_SHARE = 4  # one step is at most this part of what is free beyond the margin
STALLED_PERCENT = 10.0


class HostSizer:
    """`read` is `MemoryWatch.read`. `tick` belongs into a timer that runs a few times a second."""

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
        self._shrinking: asyncio.Task[None] | None = None

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
        """Tasks wait for memory although some is left: reclaim does not keep up."""
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
        self._shrinking = asyncio.get_running_loop().create_task(self._empty_arenas())

    async def give_back(self) -> bool:
        """Give the memory of an empty arena to the system; False when there is none."""
        before_bytes = self._host.used_bytes
        release = self._host.take_empty()
        if release is None:
            return False
        self._counters.add("host_shrunk_bytes", before_bytes - self._host.used_bytes)
        await asyncio.get_running_loop().run_in_executor(None, release)
        return True

    async def _empty_arenas(self) -> None:
        await shrink_to_ceiling(self._host, self._room, self.give_back)  # what is left, the next look tries again

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
