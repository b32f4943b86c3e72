"""What becomes of a block one of whose copies failed verification, whoever found it: a read, the scrubber, an acquire.

Owns the decision and its consequences. The copy is never served again. Where another tier has a copy, the block lives
on with that one: a bad DRAM copy is promoted anew from NVMe, a bad NVMe copy is written again from DRAM. Where none
has, the block is forgotten with the cause CORRUPT, so that a lookup can say why, and what continues it is cut off until
it is put again. A slot of NVMe goes to quarantine, a slot of DRAM is retired (limbo, if it has readers).
Each bad slot is logged once in `QUIET_S`, however often it is reported. Never reads bytes itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from kvstore_tiers.base import Slot, Tier
from kvstored.clock import NS_PER_S, Clock
from kvstored.lifecycle import Cause
from kvstored.residency import Residency
from kvstored.telemetry import Counters
from kvstored.tiering import HOST, NVME

log = logging.getLogger(__name__)
QUIET_S = 3600
MAX_REMEMBERED = 1024
Retire = Callable[[Slot, int], None]


class Damage:
    """`retire_host(slot, tenant)` takes slots of DRAM; `rewrite(row)`, if there is one, writes a row to NVMe again."""

    def __init__(
        self, residency: Residency, nvme: Tier | None, retire_host: Retire, clock: Clock, counters: Counters
    ) -> None:
        self._residency = residency
        self._nvme = nvme
        self._retire_host = retire_host
        self._clock = clock
        self._counters = counters
        self._told: OrderedDict[tuple[int, int, int], int] = OrderedDict()
        self.rewrite: Callable[[int], object] | None = None
        self.is_coming: Callable[[int], bool] = lambda row: False  # whether write-back is about to read its DRAM copy
        self.make_durable: Callable[[], object] = lambda: None  # what NVMe was told of its slots

    def on_nvme(self, row: int, reason: str) -> None:
        """The NVMe copy of a block is bad."""
        assert self._nvme is not None
        residency = self._residency
        key, slot = residency.key(row), residency.slot(row, NVME)
        self._counters.add("corrupt_blocks")
        if residency.has(row, HOST):
            residency.detach(row, NVME)
            self._put_aside(slot, reason)
            self._tell(NVME, slot, f"block {key.hex()} is damaged on NVMe ({reason}): DRAM has it, it is written again")
            if self.rewrite is not None:
                self.rewrite(row)
            return
        self._forget(row, reason)
        self._tell(NVME, slot, f"block {key.hex()} is damaged on NVMe ({reason}): quarantined, will be recomputed")

    def on_host(self, row: int, reason: str) -> None:
        """The DRAM copy of a block is bad. While it waits or is on its way to NVMe it stays where it is, and is found
        again: what is written fails its checksum."""
        residency = self._residency
        if residency.being_filled(row) or self.is_coming(row):
            return
        key, slot, tenant = residency.key(row), residency.slot(row, HOST), residency.tenant_of(row)
        self._counters.add("corrupt_blocks")
        if residency.tier_mask(row) & ~(1 << HOST):
            residency.detach(row, HOST)
            self._retire_host(slot, tenant)
            self._tell(HOST, slot, f"block {key.hex()} is damaged in DRAM ({reason}): NVMe has it, it is read again")
            return
        self._forget(row, reason)
        self._tell(HOST, slot, f"block {key.hex()} is damaged in DRAM ({reason}): dropped, will be recomputed")

    def _forget(self, row: int, reason: str) -> None:
        """Out of the index with its cause; its bytes on NVMe kept aside, its place in DRAM free once nobody reads."""
        residency = self._residency
        orphans, tenant = residency.children(row), residency.tenant_of(row)
        for taken in residency.remove(row, Cause.CORRUPT, self._clock.monotonic_ns()):
            if taken.tier == HOST:
                self._retire_host(taken.slot, tenant)
            else:
                self._put_aside(taken.slot, reason)
        if orphans:
            self._counters.add("orphaned_blocks", orphans)

    def _put_aside(self, slot: Slot, reason: str) -> None:
        """Quarantine, and have that made durable soon: a crash must not bring the block back."""
        assert self._nvme is not None
        self._nvme.quarantine(slot, reason)
        self.make_durable()

    def _tell(self, tier: int, slot: Slot, what: str) -> None:
        place = (tier, slot.container, slot.offset)
        now_ns = self._clock.monotonic_ns()
        told_ns = self._told.get(place)
        if told_ns is not None and now_ns - told_ns < QUIET_S * NS_PER_S:
            return
        self._told[place] = now_ns
        self._told.move_to_end(place)
        if len(self._told) > MAX_REMEMBERED:
            self._told.popitem(last=False)
        log.error("%s", what)
