"""What becomes of a block one of whose copies failed verification, found by a read, the scrubber or an acquire.

Owns the decision and its consequences. The copy is never served again. Where another tier has a copy, the block lives
on with that one: a bad copy in memory is promoted anew, a bad durable copy is written again from memory. Where none
has, the block is forgotten with the cause CORRUPT, so that a lookup can say why, and what continues it is cut off until
it is put again. A slot of NVMe is quarantined, a slot of DRAM is retired (limbo, if it has readers).
Each bad slot is logged once in `QUIET_S`, however often it is reported. Never reads bytes itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvstore_tiers.base import Slot, Tier
from kvstored.clock import NS_PER_S, Clock
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency
from kvstored.store.transfer.writeback import WriteBack
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
QUIET_S = 3600
MAX_REMEMBERED = 1024
Retire = Callable[[Slot, int], None]


class Damage:
    """`tiers` and `retire` are in the order of the residency's; `retire[position](slot, tenant)` takes slots of a tier
    in memory, a slot of the durable one is quarantined. `writeback()` is None without a durable tier."""

    def __init__(
        self,
        residency: Residency,
        tiers: Sequence[Tier],
        retire: Sequence[Retire],
        clock: Clock,
        counters: Counters,
        writeback: Callable[[], WriteBack | None],
    ) -> None:
        self._residency = residency
        self._tiers = tiers
        self._retire = retire
        self._clock = clock
        self._counters = counters
        self._logged: OrderedDict[tuple[int, int, int], int] = OrderedDict()
        self._writeback = writeback

    def found_of(self, position: int, token: int, reason: str) -> None:
        """`found`, of a block that may have been removed by force meanwhile, or have lost that copy: then nothing."""
        row = self._residency.current(token)
        if row >= 0 and self._residency.has(row, position):
            self.found(position, row, reason)

    def found(self, position: int, row: int, reason: str) -> None:
        """The copy of a block in the tier at `position` is bad. While another read or copy of the block is under way it
        stays where it is, and is found again: what is written fails its checksum."""
        residency, writeback = self._residency, self._writeback()
        is_durable = position == residency.durable
        is_coming = writeback is not None and writeback.is_coming(row)  # it is about to read this copy
        if residency.being_filled(row) or (is_coming and not is_durable):
            return
        key, slot, tenant = residency.key(row).hex(), residency.slot(row, position), residency.tenant_of(row)
        self._counters.add("corrupt_blocks")
        what = f"block {key} is damaged in tier {residency.tiers[position]} ({reason}): "
        others = residency.tier_mask(row) & ~(1 << position)
        if not others:
            self.forget(row, Cause.CORRUPT, reason)
            kept = "quarantined" if is_durable else "dropped"
            self._log(position, slot, f"{what}{kept}, will be recomputed")
            return
        other = residency.tiers[(others & -others).bit_length() - 1]
        residency.detach(row, position)
        self._quarantine_or_retire(position, slot, tenant, reason)
        if is_durable:
            self._log(position, slot, f"{what}{other} has it, it is written again")
            if writeback is not None:
                writeback.write_through(row)
        else:
            self._log(position, slot, f"{what}{other} has it, it is read again")

    def lost(self, position: int, row: int, reason: str) -> None:
        """The tier at `position`, which may forget, has no copy any more. Where no other has one, the block is gone."""
        residency = self._residency
        self._counters.add("forgotten_blocks")
        if residency.tier_mask(row) & ~(1 << position):
            tenant = residency.tenant_of(row)
            self._retire[position](residency.detach(row, position), tenant)
        else:
            self.forget(row, Cause.FORGOTTEN, reason)

    def forget(self, row: int, cause: Cause, reason: str) -> None:
        """Out of the index with its cause; its durable bytes kept aside, its place in memory free once it has no
        reader."""
        residency = self._residency
        orphans, tenant = residency.children(row), residency.tenant_of(row)
        for taken in residency.remove(row, cause, self._clock.monotonic_ns()):
            self._quarantine_or_retire(taken.tier, taken.slot, tenant, reason)
        if orphans:
            self._counters.add("orphaned_blocks", orphans)

    def _quarantine_or_retire(self, position: int, slot: Slot, tenant: int, reason: str) -> None:
        """A slot in memory is retired, an object of a key-addressed tier removed. A durable slot is quarantined, which
        is made durable soon: a crash must not bring the block back."""
        if position != self._residency.durable:
            self._retire[position](slot, tenant)
            return
        self._tiers[position].quarantine(slot, reason)
        writeback = self._writeback()
        if writeback is not None:
            writeback.sync()

    def _log(self, tier: int, slot: Slot, what: str) -> None:
        place = (tier, slot.container, slot.offset)
        now_ns = self._clock.monotonic_ns()
        logged_ns = self._logged.get(place)
        if logged_ns is not None and now_ns - logged_ns < QUIET_S * NS_PER_S:
            return
        self._logged[place] = now_ns
        self._logged.move_to_end(place)
        if len(self._logged) > MAX_REMEMBERED:
            self._logged.popitem(last=False)
        log.error("%s", what)
