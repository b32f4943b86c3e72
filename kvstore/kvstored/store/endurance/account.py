"""The endurance account that write-back spends from, so that one-time blocks do not wear the NVMe drive out: the
budget, what is saved of it, the fair portions, and the writes that wait for more.

Others save allotments, and the time of a sync is not bounded. Nothing is spent before it is saved: while an
allotment is being saved, the answer is to ask again. With a budget of 0 everything is granted and only counted.
Invariant: the bytes granted since the first start are at most one day's worth plus the bytes earned since.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore_tiers import failpoints
from kvstored.clock import NS_PER_S, Clock
from kvstored.store.endurance.budget import BurstBudget, ClockReading, FairShares, SavedBudget, WriteVerdict
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
SCARCE_SHARE = 0.5  # of one day's worth: below it tenants get fair portions, and admission wants a second touch
RETRY_SAVE_S = 30.0
TOO_MUCH = -1  # a cost that was not counted to its end: it is more than there is
_POLL_S = 0.05  # between two looks of a write that waits
_VERSION = 3
EMPTY = SavedBudget(0, 0, 2**62, "")
Save = Callable[[bytes], Awaitable[None]]
failpoints.declare("endurance.saved", "an allotment of the endurance budget is in place, nothing of it is spent")


def packed(state: SavedBudget) -> bytes:
    """Return the budget `state` as bytes to save (JSON)."""
    return json.dumps({"version": _VERSION, **asdict(state)}).encode()


def unpacked(raw: bytes) -> SavedBudget:
    """Return the budget saved as `raw`. Damaged bytes give an empty budget, since damage must not give any away."""
    try:
        found = json.loads(raw)
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']!r}")
        return SavedBudget(
            max(0, int(found["level_bytes"])), int(found["monotonic_ns"]), int(found["wall_ns"]), str(found["boot_id"]),
            max(0, int(found["spent_bytes"])),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        log.error("the endurance budget is damaged (%s): it starts empty", error)
        return EMPTY


def _boot_id() -> str:
    """Return the name of this boot of the machine; "" if the kernel does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(frozen=True, slots=True)
class EnduranceReport:
    """A report on the endurance account (the bytes that may be written to the drive), for an operator. If writes have
    no limit, all fields but `spent_bytes` are 0. `trouble` says why the budget cannot be read or saved."""

    bytes_per_day: int
    left_bytes: int
    spent_bytes: int
    scarce: bool
    trouble: str = ""


class EnduranceAccount:
    """The account of the bytes that may be written to one NVMe drive. With `bytes_per_day` 0 there is no limit, and
    nothing is saved. Otherwise no write is granted before `begin`."""

    def __init__(self, bytes_per_day: int, clock: Clock, counters: Counters) -> None:
        self._bytes_per_day = bytes_per_day
        self._clock = clock
        self._counters = counters
        self._boot_id = _boot_id()
        self._save: Save | None = None
        self._budget: BurstBudget | None = None
        self._unlimited_spent_bytes = 0
        self._trouble = ""
        self._retry_ns = 0
        self._allotting: asyncio.Task[None] | None = None
        self._turns: dict[int, asyncio.Lock] = {}  # by tenant: waiting writes are served in order
        self._short: set[int] = set()  # tenants with a write that waits for budget to be earned
        self._was_spent = False

    def begin(self, save: Save, saved: bytes | None, *, was_lost: bool = False) -> None:
        """Start to grant writes. `save` makes a budget durable, or raises OSError. `saved` is the budget that was saved
        last; None means a first start, with the bytes of a full day. With `was_lost` the saved budget is damaged, so
        the account starts empty."""
        if self._bytes_per_day:
            self._save = save
            left = unpacked(saved) if saved is not None else EMPTY if was_lost else None
            self._budget = BurstBudget(self._bytes_per_day, left, self._moment())
            self._shares = FairShares(self._budget.chunk_bytes)

    @property
    def _is_waiting(self) -> bool:
        """Return whether it is not known yet what is left."""
        return self._budget is None and self._bytes_per_day > 0

    @property
    def is_scarce(self) -> bool:
        budget = self._budget
        if budget is None:
            return False
        return budget.left_bytes(self._clock.monotonic_ns()) < SCARCE_SHARE * budget.burst_bytes

    def charge(self, tenant: int, nbytes: int, *, waited: bool = False) -> WriteVerdict:
        """Take `nbytes` to be written for `tenant` from the account. Return GRANTED, or the reason why they may not be
        written now. A caller that waits in a queue sets `waited`; it comes before others of its tenant."""
        verdict = self._judge(tenant, nbytes, waited)
        if verdict is WriteVerdict.GRANTED:
            self._counters.add("endurance_bytes", nbytes)
        return verdict

    @property
    def left_bytes(self) -> int | None:
        """The number of bytes that could be granted now, None if writes have no limit."""
        if self._is_waiting:
            return 0
        return None if self._budget is None else self._budget.left_bytes(self._clock.monotonic_ns())

    def reject(self, tenant: int) -> WriteVerdict:
        """Return the reason why a write of `tenant` for which too few bytes are left is refused."""
        if self._is_waiting:
            return WriteVerdict.SAVING
        now_ns = self._clock.monotonic_ns()
        self._shares.asked(tenant, now_ns)
        if self.is_scarce and self._shares.is_over(tenant, now_ns):
            return WriteVerdict.OVER_SHARE
        self._log_spent(WriteVerdict.SPENT)
        return WriteVerdict.SPENT

    def charge_unasked(self, nbytes: int) -> bool:
        """Take `nbytes` for a write that no tenant asked for. Return False, having taken nothing, when the allotment
        (the part of the budget that may be spent now) has less."""
        if self._is_waiting:
            return False
        if self._budget is not None:
            if self._budget.spend(nbytes, self._clock.monotonic_ns()) is not WriteVerdict.GRANTED:
                return False
        else:
            self._unlimited_spent_bytes += nbytes
        self._counters.add("endurance_bytes", nbytes)
        return True

    def refund_unasked(self, nbytes: int) -> None:
        """Give back `nbytes` taken by `charge_unasked`, since they were not written."""
        self._counters.add("endurance_bytes", -nbytes)
        if self._budget is None:
            self._unlimited_spent_bytes -= nbytes
        else:
            self._budget.give_back(nbytes)

    async def charge_in_time(
        self, tenant: int, cost: Callable[[], int | None], timeout_s: float, *, allotment_only: bool = False
    ) -> WriteVerdict:
        """Take bytes for `tenant` as `charge` does, waiting up to `timeout_s` seconds until the budget has earned them,
        in the order of calls. Return GRANTED, or the last reason why not. `cost()` is called before each try and
        returns the bytes to take, `TOO_MUCH`, or None to stop waiting. With `allotment_only` wait only while an
        allotment (the part of the budget that may be spent) is being saved."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        verdict = WriteVerdict.SPENT
        try:
            async with asyncio.timeout_at(deadline), self._turns.setdefault(tenant, asyncio.Lock()):
                while (nbytes := cost()) is not None:
                    verdict = self.reject(tenant) if nbytes == TOO_MUCH else self.charge(tenant, nbytes, waited=True)
                    if verdict is WriteVerdict.GRANTED or (allotment_only and verdict is not WriteVerdict.SAVING):
                        break
                    if verdict is WriteVerdict.SAVING:
                        self._short.discard(tenant)
                    else:
                        self._short.add(tenant)
                    if self._allotting is not None:
                        await asyncio.wait([self._allotting], timeout=_POLL_S)
                    else:
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            pass
        finally:
            self._short.discard(tenant)
        return verdict

    def refund(self, tenant: int, nbytes: int) -> None:
        """Give back to the budget `nbytes` that `tenant` was charged, since they were not written."""
        self.refund_unasked(nbytes)
        if self._budget is not None:
            self._shares.used(tenant, -nbytes, self._clock.monotonic_ns())

    def tick(self) -> None:
        """Move a new allotment of bytes out of the saved budget before the old one is spent. Call it a few times a
        second."""
        self._allot_ahead(0)

    def report(self) -> EnduranceReport:
        if self._is_waiting:
            return EnduranceReport(self._bytes_per_day, 0, 0, False, "it is not read yet what is left")
        if self._budget is None:
            return EnduranceReport(0, 0, self._unlimited_spent_bytes, False)
        left_bytes = self._budget.left_bytes(self._clock.monotonic_ns())
        return EnduranceReport(
            self._budget.bytes_per_day, left_bytes, self._budget.spent_bytes, self.is_scarce, self._trouble
        )

    async def close(self) -> None:
        """Save the bytes that were not spent for the next process. A closed account grants nothing any more."""
        if self._allotting is not None:
            await asyncio.wait([self._allotting])
        if self._budget is None or self._save is None:
            return
        state, save, self._save = self._budget.close(self._moment()), self._save, None
        await self._write(save, state)

    # Inside

    def _judge(self, tenant: int, nbytes: int, waited: bool) -> WriteVerdict:
        if self._is_waiting:
            return WriteVerdict.SAVING
        if self._budget is None:
            self._unlimited_spent_bytes += nbytes
            return WriteVerdict.GRANTED
        now_ns = self._clock.monotonic_ns()
        self._shares.asked(tenant, now_ns)
        if not waited and tenant in self._short:
            return WriteVerdict.SPENT
        if not waited and tenant in self._turns and self._turns[tenant].locked():
            return WriteVerdict.SAVING
        if self.is_scarce and self._shares.is_over(tenant, now_ns):
            return WriteVerdict.OVER_SHARE
        verdict = self._budget.spend(nbytes, now_ns)
        if verdict is WriteVerdict.GRANTED:
            self._shares.used(tenant, nbytes, now_ns)
        self._allot_ahead(0 if verdict is WriteVerdict.GRANTED else nbytes)
        if verdict is WriteVerdict.SAVING and self._allotting is None:
            return WriteVerdict.SPENT  # no allotment can be had: it cannot be saved, or the account is closed
        self._log_spent(verdict)
        return verdict

    def _log_spent(self, verdict: WriteVerdict) -> None:
        """Log once when the budget runs out, and once when half a day's worth is there again."""
        assert self._budget is not None
        if verdict is WriteVerdict.SPENT and not self._was_spent:
            self._was_spent = True
            self._counters.add("endurance_spent_times")
            log.warning(
                "the endurance budget of %d bytes a day is spent: blocks stay volatile until more of it is earned",
                self._budget.bytes_per_day,
            )
        elif verdict is WriteVerdict.GRANTED and self._was_spent and not self.is_scarce:
            self._was_spent = False
            log.info("the endurance budget has recovered")

    def _allot_ahead(self, wanted_bytes: int) -> None:
        now = self._moment()
        if (
            self._budget is None
            or self._save is None
            or self._allotting is not None
            or now.monotonic_ns < self._retry_ns
        ):
            return
        if self._budget.wants_allotment(wanted_bytes, now.monotonic_ns):
            state = self._budget.begin_allotment(wanted_bytes, now)
            self._allotting = asyncio.get_running_loop().create_task(self._allot(self._save, state))

    async def _allot(self, save: Save, state: SavedBudget) -> None:
        assert self._budget is not None
        saved = False
        try:
            saved = await self._write(save, state)
        finally:
            self._budget.end_allotment(saved=saved)
            self._allotting = None

    async def _write(self, save: Save, state: SavedBudget) -> bool:
        try:
            await save(packed(state))
            failpoints.hit("endurance.saved")
        except OSError as error:
            path = error.filename or "the endurance budget"
            trouble = f"{path} cannot be written ({error.strerror}): nothing more is written to NVMe until it can"
            if not self._trouble:
                log.error("%s", trouble)
            self._trouble = trouble
            self._retry_ns = self._clock.monotonic_ns() + round(RETRY_SAVE_S * NS_PER_S)
            return False
        if self._trouble:
            log.info("the endurance budget can be saved again")
        self._trouble = ""
        return True

    def _moment(self) -> ClockReading:
        return ClockReading(self._clock.monotonic_ns(), self._clock.wall_ns(), self._boot_id)
