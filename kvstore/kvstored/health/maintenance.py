"""Periodic work: expired leases and blocks, prefaulting of arenas, the watchdog of systemd, samples for the history.

One tick a tenth of a second, whose parts are bounded; requests have their turn between them once a tick takes long.
Prefaulting runs in a thread of its own without the GIL. Invariant: a failure in a part does not end the ticks, which
leases and the service manager's watchdog depend on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstored.lifetime.notify import notify, watchdog_interval_s
from kvstored.store.assembly import Store

log = logging.getLogger(__name__)
TICK_S = 0.1
SOONER_S = 0.005  # while more blocks have expired
AT_ONCE_S = 0.001  # for parts of a tick; then requests that wait have their turn
PREFAULT_SLICE_BYTES = 8 << 20


class Maintenance:
    """The daemon's periodic work. Run `run` and `prefault` as tasks. `watches` are functions that are called at each
    tick (a few times a second); they check media, memory and files, and take samples of figures."""

    def __init__(self, store: Store, watches: Sequence[Callable[[], None]]) -> None:
        """`watches` are called each tick: looks at media, memory and files, and samples."""
        self._store = store
        self._watches = watches
        self._has_more = False  # blocks to remove that have expired
        self._failed: set[str] = set()  # what was logged already
        self.prefaulted = (0, 0)  # bytes done, bytes in all

    async def tick(self) -> None:
        """Do the periodic work once, and let others have the loop in between. If one part of it fails, the others are
        still done."""
        now_s = asyncio.get_running_loop().time
        pause_s = now_s() + AT_ONCE_S
        for part in (self._expire_leases, self._expire_blocks, *self._watches):
            if now_s() >= pause_s:
                await asyncio.sleep(0)
                pause_s = now_s() + AT_ONCE_S
            self._do(part)

    def _do(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:  # a mistake of ours; it may come again each tick, so it is logged once
            failure = f"{type(error).__name__} in {getattr(part, '__qualname__', part)}"
            if failure not in self._failed:
                self._failed.add(failure)
                log.exception("maintenance failed (%s); it goes on", failure)

    def _expire_leases(self) -> None:
        store = self._store
        store.counters.add("expired_leases", store.leases.expire(store.clock.monotonic_ns()))

    def _expire_blocks(self) -> None:
        self._has_more = self._store.retention.tick()

    async def run(self) -> None:
        interval_s = watchdog_interval_s()
        next_ping_s = 0.0
        loop = asyncio.get_running_loop()
        while True:
            await self.tick()
            if interval_s is not None and loop.time() >= next_ping_s:
                notify("WATCHDOG=1")
                next_ping_s = loop.time() + interval_s
            next_tick_s = loop.time() + TICK_S
            while self._has_more and loop.time() < next_tick_s:
                await asyncio.sleep(SOONER_S)
                self._do(self._expire_blocks)
            await asyncio.sleep(max(0.0, next_tick_s - loop.time()))

    async def prefault(self, still_wanted: Callable[[], bool]) -> None:
        """Touch the memory pages of arenas before puts need them, in slices, while `still_wanted()` is True."""
        loop, host = asyncio.get_running_loop(), self._store.host
        with ThreadPoolExecutor(1, thread_name_prefix="prefault") as thread, contextlib.suppress(RuntimeError):
            while still_wanted():
                before = self.prefaulted
                if not host.is_prefaulted:  # else no thread needs to wake up
                    self.prefaulted = await loop.run_in_executor(thread, host.prefault_slice, PREFAULT_SLICE_BYTES)
                await asyncio.sleep(TICK_S if self.prefaulted == before else 0)
