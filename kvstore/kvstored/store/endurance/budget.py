"""The endurance budget as a token bucket that no crash refills, the fair portions of it, and what a write costs. Pure:
times are arguments, nothing is written here.

The bucket earns `bytes_per_day` evenly and holds one day's worth; what is earned beyond that is lost. Bytes are spent
from a *allotment*: a chunk that was taken out of the bucket, and whose taking was saved, before the first byte of it is
spent. A process that dies loses the rest of its allotment, so a crash costs budget and never gives any back.

Invariants: level + allotment + what is being saved never exceed the burst; over any time, through any number of crashes
and restarts, no more is spent than the burst and what was earned meanwhile.

A write's cost is counted from above. A slot is the header page and the payload, rounded to pages. A record has 256
bytes but is written through a page of 4096, once to publish the block and once to withdraw it when its slot is freed. A
group commit adds the file system's journal; with 33 KiB, measured on ext4 when an index was written too, it is not
counted too low. What the drive itself writes more (garbage collection) is in the maker's figures already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvstore_proto.arena import ALIGNMENT_BYTES
from kvstored.clock import NS_PER_S

DAY_S = 86_400
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 << 10, 4 << 30
CHUNKS_A_DAY = 256  # so that a crash costs about six minutes' worth of budget
OVERHEAD_BYTES = 2 * ALIGNMENT_BYTES  # of records
COMMIT_BYTES = 8 * ALIGNMENT_BYTES
ACTIVE_S = 600.0  # a tenant that asked within this time counts among those that share
MEMORY_S = 21_600.0  # what was written longer ago counts less and less
_DECAY_STEP_S = 60.0


def medium_bytes(slot_bytes: int) -> int:
    """Return how many bytes are written to the medium, over its whole life, for a block in a slot of `slot_bytes`;
    syncs are not included."""
    return slot_bytes + OVERHEAD_BYTES


class WriteVerdict(Enum):
    """The answer to a request to write: GRANTED, or the reason why not."""

    GRANTED = "granted"
    SAVING = "saving"  # there is budget, but an allotment of it has to be saved first: ask again when it is
    SPENT = "spent"
    OVER_SHARE = "over-share"  # the budget is scarce, and this tenant has had its fair portion of it


@dataclass(frozen=True, slots=True)
class SavedBudget:
    """The saved form of the endurance budget. `monotonic_ns` is compared only on the same boot of the machine
    (`boot_id`); otherwise `wall_ns` says how long no process ran."""

    level_bytes: int
    monotonic_ns: int
    wall_ns: int
    boot_id: str
    spent_bytes: int = 0  # since the first start, for people


class ClockReading(NamedTuple):
    """A reading of all clocks at one moment, with the name of the machine's boot."""

    monotonic_ns: int
    wall_ns: int
    boot_id: str

    def since_ns(self, saved: SavedBudget) -> int:
        """Return the nanoseconds from the saved reading `saved` to this one; never negative, even if the wall clock was
        set back."""
        if saved.boot_id and saved.boot_id == self.boot_id:
            return max(0, self.monotonic_ns - saved.monotonic_ns)
        return max(0, self.wall_ns - saved.wall_ns)


class BurstBudget:
    """A token bucket of bytes that may be written, which holds at most one day's bytes. An allotment is taken out of it
    and saved before its bytes may be spent, so that a crash gives none away twice. `saved` is the budget of an earlier
    process; None on a first start, with a full bucket."""

    def __init__(self, bytes_per_day: int, saved: SavedBudget | None, now: ClockReading) -> None:
        self.bytes_per_day = bytes_per_day
        self.burst_bytes = bytes_per_day
        self.chunk_bytes = min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, bytes_per_day // CHUNKS_A_DAY))
        self.spent_bytes = saved.spent_bytes if saved is not None else 0
        self._level_bytes = float(self.burst_bytes)
        if saved is not None:
            earned = now.since_ns(saved) * bytes_per_day / (DAY_S * NS_PER_S)
            self._level_bytes = min(float(self.burst_bytes), max(0.0, float(saved.level_bytes)) + earned)
        self._at_ns = now.monotonic_ns
        self._allotted_bytes = 0
        self._saving_bytes = 0

    def left_bytes(self, now_ns: int) -> int:
        """Return the bytes that could be written now, allotments included."""
        self._refill(now_ns)
        return int(self._level_bytes) + self._allotted_bytes + self._saving_bytes

    def spend(self, nbytes: int, now_ns: int) -> WriteVerdict:
        """Take `nbytes` from the allotment (the part of the budget that may be spent now). Return GRANTED; SAVING when
        a new allotment would cover them; or SPENT."""
        if nbytes <= self._allotted_bytes:
            self._allotted_bytes -= nbytes
            self.spent_bytes += nbytes
            return WriteVerdict.GRANTED
        return WriteVerdict.SAVING if nbytes <= self.left_bytes(now_ns) else WriteVerdict.SPENT

    def give_back(self, nbytes: int) -> None:
        """Undo a `spend` of `nbytes`, since nothing was written."""
        self._allotted_bytes = min(self._allotted_bytes + nbytes, self.burst_bytes - self._saving_bytes)
        self.spent_bytes -= nbytes

    # Allotments

    def wants_allotment(self, wanted_bytes: int, now_ns: int) -> bool:
        """Return whether to take a new allotment out of the budget now. `wanted_bytes` is the size of a write that
        waits, 0 for none."""
        if self._saving_bytes:
            return False
        self._refill(now_ns)
        return self._level_bytes >= 1 and self._allotted_bytes < max(wanted_bytes, self.chunk_bytes // 2)

    def begin_allotment(self, wanted_bytes: int, now: ClockReading) -> SavedBudget:
        """Take an allotment (a part that may be spent) out of the bucket, and return the budget to save before it may
        be spent. Call `end_allotment` next. `wanted_bytes` is the size of a write that waits."""
        self._refill(now.monotonic_ns)
        needed = max(self.chunk_bytes, wanted_bytes - self._allotted_bytes)
        self._saving_bytes = min(int(self._level_bytes), needed)
        self._level_bytes -= self._saving_bytes
        return self._saved(int(self._level_bytes), now)

    def end_allotment(self, *, saved: bool) -> None:
        """End `begin_allotment`. If the budget was `saved`, the allotment may be spent; otherwise it goes back to the
        bucket.
        """
        if saved:
            self._allotted_bytes += self._saving_bytes
        else:
            self._level_bytes += self._saving_bytes
        self._saving_bytes = 0

    def close(self, now: ClockReading) -> SavedBudget:
        """Return the budget to save when the daemon stops in order, which includes the bytes not spent. Nothing can be
        spent afterwards."""
        self._refill(now.monotonic_ns)
        left_bytes = int(self._level_bytes) + self._allotted_bytes + self._saving_bytes
        self._level_bytes, self._allotted_bytes, self._saving_bytes = 0.0, 0, 0
        return self._saved(left_bytes, now)

    def _saved(self, level_bytes: int, now: ClockReading) -> SavedBudget:
        return SavedBudget(level_bytes, now.monotonic_ns, now.wall_ns, now.boot_id, self.spent_bytes)

    def _refill(self, now_ns: int) -> None:
        earned = max(0, now_ns - self._at_ns) * self.bytes_per_day / (DAY_S * NS_PER_S)
        room = self.burst_bytes - self._allotted_bytes - self._saving_bytes
        self._level_bytes = max(0.0, min(float(room), self._level_bytes + earned))
        self._at_ns = max(self._at_ns, now_ns)


class FairShares:
    """A rule that divides a scarce budget of writes fairly: a tenant that has written more than its part has to wait.

    While more than half a day's bytes are left, the first to ask is served: budget that no other tenant wants should
    not be held back. Below that, a tenant that has written more than its part of the recent writes of all active
    tenants waits for the others to catch up, or for the bucket to fill again. So one tenant can use up half the bucket,
    never the half that is kept for the others. A tenant may be ahead by `slack_bytes`, so that single blocks do not
    decide."""

    def __init__(self, slack_bytes: int) -> None:
        self._slack_bytes = slack_bytes
        self._used: dict[int, float] = {}
        self._asked_ns: dict[int, int] = {}
        self._decayed_ns: int | None = None

    def asked(self, tenant: int, now_ns: int) -> None:
        self._asked_ns[tenant] = now_ns

    def used(self, tenant: int, nbytes: int, now_ns: int) -> None:
        self._decay(now_ns)
        self._used[tenant] = max(0.0, self._used.get(tenant, 0.0) + nbytes)

    def is_over(self, tenant: int, now_ns: int) -> bool:
        """Return whether `tenant` has written more than its fair portion of the recent writes of all active tenants."""
        self._decay(now_ns)
        horizon_ns = now_ns - round(ACTIVE_S * NS_PER_S)
        active = {number for number, at_ns in self._asked_ns.items() if at_ns >= horizon_ns} | {tenant}
        if len(active) == 1:
            return False
        fair = sum(self._used.get(number, 0.0) for number in active) / len(active)
        return self._used.get(tenant, 0.0) > fair + self._slack_bytes

    def _decay(self, now_ns: int) -> None:
        if self._decayed_ns is None:
            self._decayed_ns = now_ns
        elapsed_s = (now_ns - self._decayed_ns) / NS_PER_S
        if elapsed_s < _DECAY_STEP_S:
            return
        keep = math.exp(-elapsed_s / MEMORY_S)
        self._used = {tenant: used * keep for tenant, used in self._used.items() if used * keep >= 1}
        horizon_ns = now_ns - round(ACTIVE_S * NS_PER_S)
        self._asked_ns = {tenant: at_ns for tenant, at_ns in self._asked_ns.items() if at_ns >= horizon_ns}
        self._decayed_ns = now_ns
