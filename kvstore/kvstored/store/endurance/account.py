"""The account that write-back spends from: the budget, its file, the fair portions, and the writes that wait for more.

Saves allotments in a thread, since the time of a sync is not bounded. Nothing is spent before it is saved: while an
allotment is being saved, the answer is to ask again. With a budget of 0 everything is granted and only counted.
Invariant: what was granted since the first start is at most one day's worth and what was earned since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstored.clock import NS_PER_S, Clock
from kvstored.store.endurance.budget import BurstBudget, Moment, SavedBudget, Verdict
from kvstored.store.endurance.file import BudgetFile, boot_id
from kvstored.store.endurance.shares import FairShares
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
SCARCE_SHARE = 0.5  # of one day's worth: below it tenants get fair portions, and admission wants a second touch
RETRY_SAVE_S = 30.0
TOO_MUCH = -1  # a cost that was not counted to its end: it is more than there is
_POLL_S = 0.05  # between two looks of a write that waits


@dataclass(frozen=True, slots=True)
class EnduranceReport:
    """For an operator. All 0 but `spent_bytes` where there is no budget."""

    bytes_per_day: int
    left_bytes: int
    spent_bytes: int
    scarce: bool
    trouble: str = ""


class EnduranceAccount:
    """`directory` None or `bytes_per_day` 0: no limit, nothing is saved."""

    def __init__(self, directory: Path | None, bytes_per_day: int, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._boot_id = boot_id()
        self._file = BudgetFile(directory) if directory is not None and bytes_per_day else None
        self._budget: BurstBudget | None = None
        self._unlimited_spent_bytes = 0
        self._trouble = ""
        self._retry_ns = 0
        self._allotting: asyncio.Task[None] | None = None
        self._turns: dict[int, asyncio.Lock] = {}  # by tenant: waiting writes are served in order
        self._short: set[int] = set()  # tenants with a write that waits for budget to be earned
        self._was_spent = False
        if self._file is not None:
            self._budget = BurstBudget(bytes_per_day, self._file.load(), self._moment())
            self._shares = FairShares(self._budget.chunk_bytes)

    @property
    def is_scarce(self) -> bool:
        budget = self._budget
        if budget is None:
            return False
        return budget.left_bytes(self._clock.monotonic_ns()) < SCARCE_SHARE * budget.burst_bytes

    def charge(self, tenant: int, nbytes: int, *, waited: bool = False) -> Verdict:
        """Take `nbytes` for a tenant, or say why not. Those who wait come before those who only ask."""
        verdict = self._judge(tenant, nbytes, waited)
        if verdict is Verdict.GRANTED:
            self._counters.add("endurance_bytes", nbytes)
        return verdict

    @property
    def left_bytes(self) -> int | None:
        """What could be granted now; None: no limit."""
        return None if self._budget is None else self._budget.left_bytes(self._clock.monotonic_ns())

    def reject(self, tenant: int) -> Verdict:
        """As `charge` of more than is left, which need not be counted then."""
        now_ns = self._clock.monotonic_ns()
        self._shares.asked(tenant, now_ns)
        if self.is_scarce and self._shares.is_over(tenant, now_ns):
            return Verdict.OVER_SHARE
        self._log_spent(Verdict.SPENT)
        return Verdict.SPENT

    def charge_unasked(self, nbytes: int) -> bool:
        """Take `nbytes` for what has to be written anyway, if the allotment covers it; no tenant's share counts."""
        if self._budget is not None:
            if self._budget.spend(nbytes, self._clock.monotonic_ns()) is not Verdict.GRANTED:
                return False
        else:
            self._unlimited_spent_bytes += nbytes
        self._counters.add("endurance_bytes", nbytes)
        return True

    def refund_unasked(self, nbytes: int) -> None:
        """Nothing of what `charge_unasked` took was written."""
        self._counters.add("endurance_bytes", -nbytes)
        if self._budget is None:
            self._unlimited_spent_bytes -= nbytes
        else:
            self._budget.give_back(nbytes)

    async def charge_in_time(
        self, tenant: int, cost: Callable[[], int | None], timeout_s: float, *, allotment_only: bool = False
    ) -> Verdict:
        """As `charge`, but wait up to `timeout_s` for the budget to earn it, in the order of requests; GRANTED, or the
        last verdict. `cost` is evaluated anew each time (it may be `TOO_MUCH`); None ends the wait. `allotment_only`:
        wait for no more than an allotment.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        verdict = Verdict.SPENT
        try:
            async with asyncio.timeout_at(deadline), self._turns.setdefault(tenant, asyncio.Lock()):
                while (nbytes := cost()) is not None:
                    verdict = self.reject(tenant) if nbytes == TOO_MUCH else self.charge(tenant, nbytes, waited=True)
                    if verdict is Verdict.GRANTED or (allotment_only and verdict is not Verdict.SAVING):
                        break
                    if verdict is Verdict.SAVING:
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
        """Nothing of it was written."""
        self._counters.add("endurance_bytes", -nbytes)
        if self._budget is None:
            self._unlimited_spent_bytes -= nbytes
            return
        self._budget.give_back(nbytes)
        self._shares.used(tenant, -nbytes, self._clock.monotonic_ns())

    def tick(self) -> None:
        """Take an allotment ahead of need; a few times a second is enough."""
        self._allot_ahead(0)

    def report(self) -> EnduranceReport:
        if self._budget is None:
            return EnduranceReport(0, 0, self._unlimited_spent_bytes, False)
        left_bytes = self._budget.left_bytes(self._clock.monotonic_ns())
        return EnduranceReport(
            self._budget.bytes_per_day, left_bytes, self._budget.spent_bytes, self.is_scarce, self._trouble
        )

    async def close(self) -> None:
        """Save what is left. An account that is closed grants nothing any more."""
        if self._allotting is not None:
            await asyncio.wait([self._allotting])
        if self._budget is None or self._file is None:
            return
        state, file, self._file = self._budget.close(self._moment()), self._file, None
        await self._write(file, state)

    # Inside

    def _judge(self, tenant: int, nbytes: int, waited: bool) -> Verdict:
        if self._budget is None:
            self._unlimited_spent_bytes += nbytes
            return Verdict.GRANTED
        now_ns = self._clock.monotonic_ns()
        self._shares.asked(tenant, now_ns)
        if not waited and tenant in self._short:
            return Verdict.SPENT
        if not waited and tenant in self._turns and self._turns[tenant].locked():
            return Verdict.SAVING
        if self.is_scarce and self._shares.is_over(tenant, now_ns):
            return Verdict.OVER_SHARE
        verdict = self._budget.spend(nbytes, now_ns)
        if verdict is Verdict.GRANTED:
            self._shares.used(tenant, nbytes, now_ns)
        self._allot_ahead(0 if verdict is Verdict.GRANTED else nbytes)
        if verdict is Verdict.SAVING and self._allotting is None:
            return Verdict.SPENT  # no allotment can be had: the file cannot be written, or the account is closed
        self._log_spent(verdict)
        return verdict

    def _log_spent(self, verdict: Verdict) -> None:
        """Log once when the budget runs out, and once when half a day's worth is there again."""
        assert self._budget is not None
        if verdict is Verdict.SPENT and not self._was_spent:
            self._was_spent = True
            self._counters.add("endurance_spent_times")
            log.warning(
                "the endurance budget of %d bytes a day is spent: blocks stay volatile until more of it is earned",
                self._budget.bytes_per_day,
            )
        elif verdict is Verdict.GRANTED and self._was_spent and not self.is_scarce:
            self._was_spent = False
            log.info("the endurance budget has recovered")

    def _allot_ahead(self, wanted_bytes: int) -> None:
        now = self._moment()
        if (
            self._budget is None
            or self._file is None
            or self._allotting is not None
            or now.monotonic_ns < self._retry_ns
        ):
            return
        if self._budget.wants_allotment(wanted_bytes, now.monotonic_ns):
            state = self._budget.begin_allotment(wanted_bytes, now)
            self._allotting = asyncio.get_running_loop().create_task(self._allot(self._file, state))

    async def _allot(self, file: BudgetFile, state: SavedBudget) -> None:
        assert self._budget is not None
        saved = False
        try:
            saved = await self._write(file, state)
        finally:
            self._budget.end_allotment(saved=saved)
            self._allotting = None

    async def _write(self, file: BudgetFile, state: SavedBudget) -> bool:
        try:
            await asyncio.get_running_loop().run_in_executor(None, file.save, state)
        except OSError as error:
            trouble = f"{file.path} cannot be written ({error.strerror}): nothing more is written to NVMe until it can"
            if not self._trouble:
                log.error("%s", trouble)
            self._trouble = trouble
            self._retry_ns = self._clock.monotonic_ns() + round(RETRY_SAVE_S * NS_PER_S)
            return False
        if self._trouble:
            log.info("%s can be written again", file.path)
        self._trouble = ""
        return True

    def _moment(self) -> Moment:
        return Moment(self._clock.monotonic_ns(), self._clock.wall_ns(), self._boot_id)
