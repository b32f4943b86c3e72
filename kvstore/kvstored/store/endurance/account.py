"""The endurance account, from which write-back spends, so that one-time blocks do not wear the NVMe drive out: the
budget, its file, the fair portions, and the waiting writes.

Saves allotments in a thread, since the time of a sync is not bounded. Nothing is spent before it is saved: while an
allotment is being saved, the answer is to ask again. With a budget of 0 everything is granted and only counted.
Invariant: the bytes granted since the first start are at most one day's worth plus the bytes earned since.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvstore_tiers import failpoints
from kvstore_tiers.replaced_file import replace_file
from kvstored.clock import NS_PER_S, Clock
from kvstored.store.endurance.budget import BurstBudget, FairShares, Moment, SavedBudget, Verdict
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
SCARCE_SHARE = 0.5  # of one day's worth: below it tenants get fair portions, and admission wants a second touch
RETRY_SAVE_S = 30.0
TOO_MUCH = -1  # a cost that was not counted to its end: it is more than there is
_POLL_S = 0.05  # between two looks of a write that waits
FILE_NAME = "endurance.json"
_VERSION = 2
failpoints.declare("endurance.after-rename", "an allotment of the endurance budget is in place, nothing of it is spent")


class BudgetFile:
    """The budget's file: one small JSON object, replaced as a whole and synced, so that a crash leaves the old or the
    new.

    A file that cannot be read, or whose checksum is not its own, counts as an empty bucket: damage must not give budget
    away. `load` and `save` may wait for a device: they are not for the control thread, but at start and stop.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME

    def load(self) -> SavedBudget | None:
        """Return the saved budget; None on a first start."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.error("%s cannot be read (%s): the endurance budget starts empty", self.path, error.strerror)
            return SavedBudget(0, 0, 2**62, "")
        try:
            raw = json.loads(text)
            if raw["version"] != _VERSION:
                raise ValueError(f"version {raw['version']!r}")
            if raw.pop("xxh3") != _checksum(raw):
                raise ValueError("its checksum is wrong")
            return SavedBudget(
                max(0, int(raw["level_bytes"])), int(raw["monotonic_ns"]), int(raw["wall_ns"]), str(raw["boot_id"]),
                max(0, int(raw["spent_bytes"])),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            log.error("%s is damaged (%s): the endurance budget starts empty", self.path, error)
            return SavedBudget(0, 0, 2**62, "")

    def save(self, state: SavedBudget) -> None:
        """Replace the file. Raises OSError if that fails; the file is then the old or the new one, whole."""
        raw: dict[str, int | str] = {
            "version": _VERSION,
            "level_bytes": state.level_bytes,
            "monotonic_ns": state.monotonic_ns,
            "wall_ns": state.wall_ns,
            "boot_id": state.boot_id,
            "spent_bytes": state.spent_bytes,
        }
        raw["xxh3"] = _checksum(raw)
        replace_file(self.path, json.dumps(raw).encode() + b"\n")
        failpoints.hit("endurance.after-rename")


def _checksum(raw: dict[str, int | str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(raw, sort_keys=True).encode())


def _boot_id() -> str:
    """Return the name of this boot of the machine; "" if the kernel does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(frozen=True, slots=True)
class EnduranceReport:
    """The account as an operator sees it. All fields but `spent_bytes` are 0 if there is no budget."""

    bytes_per_day: int
    left_bytes: int
    spent_bytes: int
    scarce: bool
    trouble: str = ""


class EnduranceAccount:
    """The account of one drive. With `directory` None or `bytes_per_day` 0 there is no limit, and nothing is saved."""

    def __init__(self, directory: Path | None, bytes_per_day: int, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._boot_id = _boot_id()
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
        """Take `nbytes` for a tenant, or return why not. Waiting requests come before requests that only ask."""
        verdict = self._judge(tenant, nbytes, waited)
        if verdict is Verdict.GRANTED:
            self._counters.add("endurance_bytes", nbytes)
        return verdict

    @property
    def left_bytes(self) -> int | None:
        """The bytes that could be granted now; None if there is no limit."""
        return None if self._budget is None else self._budget.left_bytes(self._clock.monotonic_ns())

    def reject(self, tenant: int) -> Verdict:
        """Return the answer of `charge` for more bytes than are left, which then need not be counted."""
        now_ns = self._clock.monotonic_ns()
        self._shares.asked(tenant, now_ns)
        if self.is_scarce and self._shares.is_over(tenant, now_ns):
            return Verdict.OVER_SHARE
        self._log_spent(Verdict.SPENT)
        return Verdict.SPENT

    def charge_unasked(self, nbytes: int) -> bool:
        """Take `nbytes` for bytes that must be written in any case, if the allotment covers them; no tenant's share
        counts.
        """
        if self._budget is not None:
            if self._budget.spend(nbytes, self._clock.monotonic_ns()) is not Verdict.GRANTED:
                return False
        else:
            self._unlimited_spent_bytes += nbytes
        self._counters.add("endurance_bytes", nbytes)
        return True

    def refund_unasked(self, nbytes: int) -> None:
        """Give back the bytes of `charge_unasked`: none of them was written."""
        self._counters.add("endurance_bytes", -nbytes)
        if self._budget is None:
            self._unlimited_spent_bytes -= nbytes
        else:
            self._budget.give_back(nbytes)

    async def charge_in_time(
        self, tenant: int, cost: Callable[[], int | None], timeout_s: float, *, allotment_only: bool = False
    ) -> Verdict:
        """Take bytes as `charge` does, but wait up to `timeout_s` for the budget to earn them, in the order of
        requests. Return GRANTED, or the last verdict. `cost` is evaluated anew each time (it may be `TOO_MUCH`);
        None ends the wait. With `allotment_only` wait for no more than an allotment.
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
        """Give back a tenant's charge: none of it was written."""
        self.refund_unasked(nbytes)
        if self._budget is not None:
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
        """Save the rest. A closed account grants nothing any more."""
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
