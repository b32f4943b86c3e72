"""The endurance budget as a token bucket that no crash refills. Pure: times are arguments, nothing is written here.

The bucket earns `bytes_per_day` evenly and holds one day's worth; what is earned beyond that is lost. Bytes are spent
from a *allotment*: a chunk that was taken out of the bucket, and whose taking was saved, before the first byte of it is
spent. A process that dies loses the rest of its allotment, so a crash costs budget and never gives any back.

Invariants: level + allotment + what is being saved never exceed the burst; over any time, through any number of crashes
and restarts, no more is spent than the burst and what was earned meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvstored.clock import NS_PER_S

DAY_S = 86_400
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 << 10, 4 << 30
CHUNKS_A_DAY = 256  # so that a crash costs about six minutes' worth of budget


class Verdict(Enum):
    GRANTED = "granted"
    SAVING = "saving"  # there is budget, but an allotment of it has to be saved first: ask again when it is
    SPENT = "spent"
    OVER_SHARE = "over-share"  # the budget is scarce, and this tenant has had its fair portion of it


@dataclass(frozen=True, slots=True)
class SavedBudget:
    """What outlives the process. `monotonic_ns` counts for the same `boot_id` alone; else the wall clock says how
    long no process ran."""

    level_bytes: int
    monotonic_ns: int
    wall_ns: int
    boot_id: str
    spent_bytes: int = 0  # since the first start, for people


@dataclass(frozen=True, slots=True)
class Moment:
    """Now, by every clock there is."""

    monotonic_ns: int
    wall_ns: int
    boot_id: str

    def since_ns(self, saved: SavedBudget) -> int:
        """Time that went by; never negative, whichever way the wall clock was set."""
        if saved.boot_id and saved.boot_id == self.boot_id:
            return max(0, self.monotonic_ns - saved.monotonic_ns)
        return max(0, self.wall_ns - saved.wall_ns)


class BurstBudget:
    """The bucket of one tier. `saved` None: a first start, with a full bucket."""

    def __init__(self, bytes_per_day: int, saved: SavedBudget | None, now: Moment) -> None:
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
        """What could be written now, allotments included."""
        self._refill(now_ns)
        return int(self._level_bytes) + self._allotted_bytes + self._saving_bytes

    def spend(self, nbytes: int, now_ns: int) -> Verdict:
        """Take `nbytes` from the allotment, all or nothing."""
        if nbytes <= self._allotted_bytes:
            self._allotted_bytes -= nbytes
            self.spent_bytes += nbytes
            return Verdict.GRANTED
        return Verdict.SAVING if nbytes <= self.left_bytes(now_ns) else Verdict.SPENT

    def give_back(self, nbytes: int) -> None:
        """Undo a `spend`: nothing was written after all."""
        self._allotted_bytes = min(self._allotted_bytes + nbytes, self.burst_bytes - self._saving_bytes)
        self.spent_bytes -= nbytes

    # Allotments

    def wants_allotment(self, wanted_bytes: int, now_ns: int) -> bool:
        """Whether to take a new chunk: before the old one is quite spent, so that no write waits for it."""
        if self._saving_bytes:
            return False
        self._refill(now_ns)
        return self._level_bytes >= 1 and self._allotted_bytes < max(wanted_bytes, self.chunk_bytes // 2)

    def begin_allotment(self, wanted_bytes: int, now: Moment) -> SavedBudget:
        """Take a chunk, or as much as is wanted, out of the bucket. Save the answer, then `end_allotment`."""
        self._refill(now.monotonic_ns)
        needed = max(self.chunk_bytes, wanted_bytes - self._allotted_bytes)
        self._saving_bytes = min(int(self._level_bytes), needed)
        self._level_bytes -= self._saving_bytes
        return self._saved(int(self._level_bytes), now)

    def end_allotment(self, *, saved: bool) -> None:
        """The allotment is on the medium and may be spent; or it could not be saved, and the bucket has it back."""
        if saved:
            self._allotted_bytes += self._saving_bytes
        else:
            self._level_bytes += self._saving_bytes
        self._saving_bytes = 0

    def close(self, now: Moment) -> SavedBudget:
        """What to save at an orderly end: the unspent allotment goes back. Nothing can be spent after this."""
        self._refill(now.monotonic_ns)
        left_bytes = int(self._level_bytes) + self._allotted_bytes + self._saving_bytes
        self._level_bytes, self._allotted_bytes, self._saving_bytes = 0.0, 0, 0
        return self._saved(left_bytes, now)

    def _saved(self, level_bytes: int, now: Moment) -> SavedBudget:
        return SavedBudget(level_bytes, now.monotonic_ns, now.wall_ns, now.boot_id, self.spent_bytes)

    def _refill(self, now_ns: int) -> None:
        earned = max(0, now_ns - self._at_ns) * self.bytes_per_day / (DAY_S * NS_PER_S)
        room = self.burst_bytes - self._allotted_bytes - self._saving_bytes
        self._level_bytes = max(0.0, min(float(room), self._level_bytes + earned))
        self._at_ns = max(self._at_ns, now_ns)
