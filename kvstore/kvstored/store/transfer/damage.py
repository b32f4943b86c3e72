"""Decides about a block one of whose copies failed verification in a read, in the scrubber or in an acquire.

Owns the decision and its consequences. The copy is never served again. Where another tier has a copy, the block lives
on with that one: a bad copy in memory is promoted anew, a bad durable copy is written again from memory. Where none
has, the block is forgotten with the cause CORRUPT, so that a lookup can say why, and what continues it is cut off until
it is put again. A slot of NVMe is quarantined, a slot of DRAM is retired (limbo, if it has readers). Each bad slot is
logged once in `QUIET_S`, however often it is reported. Never reads bytes itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvstore_tiers.base import Outcome, OutcomeKind, Slot, Tier
from kvstored.clock import NS_PER_S, Clock
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency
from kvstored.store.transfer.group_commit import GroupCommit
from kvstored.store.transfer.moves import BlockMove, Unmoved
from kvstored.telemetry import Counters
from kvstored.tier_set import TIER_SETS

log = logging.getLogger(__name__)
QUIET_S = 3600
MAX_REMEMBERED = 1024
Retire = Callable[[Slot, int], None]


class Damage:
    """The handler of copies whose bytes turned out damaged, lost or unreadable. `tiers` and `retire` are in the order
    of the index's tiers. `retire[position](slot, tenant)` frees a slot of a tier in memory; a slot of the durable tier
    is quarantined (kept out of use). `commit` is None without a durable tier. `to_write_again` has the tokens of blocks
    whose durable copy was bad and must be written again."""

    def __init__(
        self,
        residency: Residency,
        tiers: Sequence[Tier],
        retire: Sequence[Retire],
        clock: Clock,
        counters: Counters,
        commit: GroupCommit | None,
    ) -> None:
        self._residency = residency
        self._tiers = tiers
        self._retire = retire
        self._clock = clock
        self._counters = counters
        self._logged: OrderedDict[tuple[int, int, int], int] = OrderedDict()
        self._commit = commit
        self.to_write_again: list[int] = []

    def is_copied(self, move: BlockMove, outcome: Outcome | Unmoved) -> bool:
        """Return whether the copying of a block by `move` succeeded. If `outcome` says that the copy from which it read
        was damaged or unreadable, take that copy out of service, unless it is gone already."""
        if isinstance(outcome, Unmoved):
            return False
        if outcome.kind in (OutcomeKind.CORRUPT, OutcomeKind.UNREADABLE):
            row, source = self._residency.current(move.token), move.link.source
            if row >= 0 and self._residency.has(row, source):
                judge = self.found if outcome.kind is OutcomeKind.CORRUPT else self.unreadable
                judge(source, row, outcome.message)
        return outcome.ok

    def found(self, position: int, row: int, reason: str) -> None:
        """Take the damaged copy of the block at `row` in the tier at `position` out of service. `reason` goes to the
        log. While another read or copy of the block is under way, the copy stays until the next read finds it damaged
        again."""
        residency = self._residency
        is_durable = position == residency.durable
        # A write that is coming is about to read this copy.
        is_coming = self._commit is not None and residency.token(row) in self._commit.backlog
        if residency.being_filled(row) or (is_coming and not is_durable):
            return
        key, slot, tenant = residency.key(row).hex(), residency.slot(row, position), residency.tenant_of(row)
        self._counters.add("corrupt_blocks")
        what = f"block {key} is damaged in tier {residency.tiers[position]} ({reason}): "
        others = TIER_SETS[residency.tier_mask(row)].without(position)
        if not others:
            self.forget(row, Cause.CORRUPT, reason)
            kept = "quarantined" if is_durable else "dropped"
            self._log(position, slot, f"{what}{kept}, will be recomputed")
            return
        other = residency.tiers[others.first]
        residency.detach(row, position)
        self._quarantine_or_retire(position, slot, tenant, reason)
        if is_durable:
            self._log(position, slot, f"{what}{other} has it, it is written again")
            self.to_write_again.append(residency.token(row))
        else:
            self._log(position, slot, f"{what}{other} has it, it is read again")

    def lost(self, position: int, row: int, reason: str) -> None:
        """Note that the tier at `position`, which may lose blocks, has lost the copy of the block at `row`. If no other
        tier has a copy, the block is removed.
        """
        residency = self._residency
        self._counters.add("forgotten_blocks")
        if TIER_SETS[residency.tier_mask(row)].without(position):
            tenant = residency.tenant_of(row)
            self._retire[position](residency.detach(row, position), tenant)
        else:
            self.forget(row, Cause.FORGOTTEN, reason)

    def unreadable(self, position: int, row: int, reason: str) -> None:
        """Drop the copy of the block at `row` in the tier at `position`, which is undamaged, but in a form that this
        version cannot decode. If no other tier has a copy, the block is removed, so that it can be put again."""
        residency = self._residency
        if residency.being_filled(row):
            return
        slot, tenant, tier = residency.slot(row, position), residency.tenant_of(row), residency.tiers[position]
        self._counters.add("unreadable_blocks")
        others = TIER_SETS[residency.tier_mask(row)].without(position)
        self._log(position, slot, f"block {residency.key(row).hex()} is not readable here in tier {tier}: {reason}")
        if others:
            residency.detach(row, position)
            self._quarantine_or_retire(position, slot, tenant, reason)
        else:
            self.forget(row, Cause.READ_FAILED, reason)

    def forget(self, row: int, cause: Cause, reason: str) -> None:
        """Remove the block at `row` from the index, with `cause`. Its durable slot is quarantined with `reason`; its
        slot in memory is freed once it has no reader.
        """
        residency = self._residency
        orphans, tenant = residency.dependents(row), residency.tenant_of(row)
        for taken in residency.remove(row, cause, self._clock.monotonic_ns()):
            self._quarantine_or_retire(taken.tier, taken.slot, tenant, reason)
        if orphans:
            self._counters.add("orphaned_blocks", orphans)

    def _quarantine_or_retire(self, position: int, slot: Slot, tenant: int, reason: str) -> None:
        """Retire a slot in memory, remove an object of a key-addressed tier, and quarantine a durable slot, which is
        made durable soon: a crash must not bring the block back."""
        if position != self._residency.durable:
            self._retire[position](slot, tenant)
            return
        self._tiers[position].quarantine(slot, reason)
        if self._commit is not None:
            self._commit.sync()

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
