"""The saver saves the daemon's small state: each part after it has changed, every few seconds, within a rate of bytes.

`restore` reads all saved state while the daemon serves already, and gives each part its own entries. Until then, and
when the state cannot be read, each part begins empty and saves nothing. Blocks are in the slabs: no block depends on
this state. No request waits for the saver: columns are copied in steps, and another process writes.

A crash forgets what changed since the last turn: `INTERVAL_S` before, or longer when the changed bytes took longer at
the rate. After an order to delete blocks, a rewrite removes every trace of them from the environment, at most
`REWRITE_S` and one turn later; after a start where the process before was killed, there is one too.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvstore_tiers.base import Slot
from kvstore_tiers.heap import trim
from kvstored.clients.tenants import TenantDirectory
from kvstored.clients.tenants.reach import out_of_reach
from kvstored.clock import NS_PER_S
from kvstored.state.databases import SLOT
from kvstored.state.learned import LearnedTables
from kvstored.state.orders import TENANTS, WEIGHTS, Orders
from kvstored.state.process import Interrupted, StateProcess, Transaction
from kvstored.state.removed import RemovedNames
from kvstored.state.step_runner import StepRunner
from kvstored.state.terms import TermsKeeper
from kvstored.store.assembly import Store
from kvstored.store.blocks.usage import UsageRows
from kvstored.unsaved import RETRY_S, Unsaved

log = logging.getLogger(__name__)
INTERVAL_S = 5.0
REWRITE_S = 20.0  # from one rewrite to the next, while blocks are deleted
ASKED_S = 0.1
MOST_FAILED = 3  # turns that were to rewrite and could not, before who waits for it is told
REST = 50  # times as long as collecting took, at least, until the next: 2 % of a core at most
_READ = ("about", "names", "endurance", "scrub", "quarantine", "learned", "removed")
COST = "a restart forgets how blocks were used, what was learned, and why slots are in quarantine"
WHY_BYTES = 200
POSITION, ENDED, IN_ORDER = b"position", b"ended", b"in order"
Entry = tuple[bytes, bytes]


@dataclass
class _Saved:
    """The entries that the environment holds already, as far as this process wrote or read them."""

    names: list[Entry] | None = None
    quarantine: list[Entry] | None = None
    tenants: list[Entry] | None = None
    weights: list[Entry] | None = None
    scrub: bytes | None = None
    activity: tuple[int, ...] = field(default=())


class StateSaver:
    """A component that saves the daemon's small state (all that is kept over a restart and is not a block) through
    `process`, writing at most `rate_bytes` a second in the long run. `terms` is the keeper of blocks' terms, and
    `orders` has what operators ordered. `scrub` is the scrubber's position as JSON, None until it is known."""

    def __init__(
        self, process: StateProcess, store: Store, tenants: TenantDirectory, unsaved: Unsaved, rate_bytes: int,
        terms: TermsKeeper,
    ) -> None:  # fmt: skip
        residency = store.residency
        self.process, self._store, self._tenants, self._unsaved = process, store, tenants, unsaved
        self._rate_bytes = rate_bytes
        self._usage = {"usage-memory": UsageRows(residency, residency.mapped, alone=True)}
        if residency.durable >= 0:
            self._usage["usage"] = UsageRows(residency, residency.durable)
        self._learned = LearnedTables(store)
        self._removed = RemovedNames(residency, store.forgets)
        self.terms, self.orders = terms, Orders(process)
        self._saved = _Saved()
        self._opened_ns = store.clock.monotonic_ns()
        self._learned_from_ns = self._rewritten_ns = 0
        self._rewritten = residency.deletions
        self._failed_rewrites = 0  # in a row
        self.pause_s = INTERVAL_S  # until the next turn
        self.written_bytes = 0  # in the last one
        self._yields = True  # to what is urgent; a turn that did so is repeated and does not
        self._runner = StepRunner()
        self.scrub: bytes | None = None
        self.wrong_rows = 0
        self.is_read = False
        self.was_tried = asyncio.Event()  # to read it, for those who need a part of it to begin
        process.listeners.append(self._is_new)

    # At the start

    async def restore(self) -> bool:
        """Read the saved state and give each part of the daemon its entries. Return True on success, False when the
        state could not be read. Do not call it again after a success."""
        process, store = self.process, self._store
        try:
            await self.terms.restore()
            await self.orders.read()
            read = {name: await process.read(name) for name in _READ}
            usage = {name: await process.read(name) for name in self._usage}
        except OSError as error:
            self._unsaved.failed(process.path, error, COST)
            return False
        finally:
            self.was_tried.set()
        self._unsaved.saved(process.path)
        if not process.is_new and dict(read["about"]).get(ENDED) != IN_ORDER:
            self._rewritten = -1  # who was killed may have owed one
        if process.owes_rewrite:
            self._rewritten = -1
        said = out_of_reach(self._tenants, store.residency)
        self._tenants.know(read["names"])
        for _ in store.boundaries.learn():
            await asyncio.sleep(0)
        for sentence in out_of_reach(self._tenants, store.residency):
            if sentence not in said:
                log.warning("%s", sentence)
        budget = dict(read["endurance"]).get(b"budget")
        store.endurance.begin(self._save_budget, budget, was_lost=process.has_aside)  # also by a daemon before
        self.scrub = self._saved.scrub = dict(read["scrub"]).get(POSITION, self.scrub)
        if store.nvme is not None:
            reasons = {
                Slot(*SLOT.unpack(place)): why.decode(errors="replace")
                for place, why in read["quarantine"] if len(place) == SLOT.size
            }  # fmt: skip
            store.nvme.explain_quarantined(reasons)
        with suppress(OSError):
            async with process.transaction() as change:
                await change.put("about", [(ENDED, b"no")])
        await self._restore_uses(usage, read["learned"], read["removed"])
        trim()
        return True

    async def _restore_uses(self, usage: dict[str, list[Entry]], learned: list[Entry], removed: list[Entry]) -> None:
        """Enter the saved uses into the index, then let the policies and the predictor continue with their saved
        tables."""
        clock = self._store.clock
        known = {name: await self._runner.run_all(rows.known(usage.pop(name))) for name, rows in self._usage.items()}
        tenants = {tenant.index_name for tenant in self._tenants.all()}
        self._removed.read(removed, tenants.union(index.name for index in self._store.residency.tenants))
        self._learned.read([] if self._removed.is_too_much else learned, tenants)
        used = 0
        for name, rows in self._usage.items():  # a block's own place on NVMe has the last word
            self.wrong_rows += known[name].wrong
            now_ns, wall_ns = clock.monotonic_ns(), clock.wall_ns()
            used += await self._runner.run_all(rows.apply(known[name], now_ns, wall_ns, self._opened_ns))
        await self._learned.hand_out(self._runner, renew=used > 0)
        await self._runner.run_all(self._removed.again())
        self.is_read = True  # a stop before this point reads it once more: nothing empty is saved over it
        if not self.process.is_new:
            for rows in self._usage.values():
                rows.saved = await self._runner.run_all(rows.digests(self._opened_ns))

    def _is_new(self, _: str) -> None:
        """Note that the environment is empty."""
        self._saved = _Saved()
        for rows in self._usage.values():
            rows.saved = rows.saved[:0]

    # While it serves

    async def run(self) -> None:
        """Read the state, then save it from time to time, until the task is cancelled."""
        while not self.is_read and not await self.restore():
            self._failed_rewrites += 1
            await asyncio.sleep(RETRY_S)
        noting = asyncio.create_task(self._save_removed())
        try:
            while True:
                await self._pause()
                await self.save()
        finally:
            noting.cancel()

    async def _save_removed(self) -> None:
        """Save the names of blocks that are removed by order, at once."""
        while True:
            await self._removed.noted.wait()
            self._removed.noted.clear()
            try:
                await self._removed.save(self.process)
            except OSError as error:
                self._unsaved.failed(self.process.path, error, COST)
                await asyncio.sleep(RETRY_S)
                self._removed.noted.set()

    async def _pause(self) -> None:
        """Wait for the next turn; return early when a rewrite is due."""
        until_ns = self._store.clock.monotonic_ns() + round(self.pause_s * NS_PER_S)
        while (left_s := (until_ns - self._store.clock.monotonic_ns()) / NS_PER_S) > 0:
            await asyncio.sleep(min(left_s, INTERVAL_S))
            if self._owes_rewrite(is_last=False):
                return

    def _owes_rewrite(self, *, is_last: bool) -> bool:
        """Return whether a rewrite is due: blocks were deleted since the last rewrite, and `REWRITE_S` has passed or
        `is_last` is true."""
        is_due = is_last or self._store.clock.monotonic_ns() - self._rewritten_ns >= REWRITE_S * NS_PER_S
        return is_due and self._store.residency.deletions != self._rewritten

    async def rewrite(self) -> None:
        """Have the state written anew soon, and wait for it: no trace of what was deleted before this call is left.
        Raises OSError when it cannot be written."""
        deletions, self._rewritten_ns = self._store.residency.deletions, -round(REWRITE_S * NS_PER_S)
        self._failed_rewrites = 0
        while self._rewritten < deletions:
            if self._failed_rewrites >= MOST_FAILED:
                raise OSError(errno.EIO, "it cannot be written", str(self.process.path))
            await asyncio.sleep(ASKED_S)

    async def save(self, *, is_last: bool = False) -> None:
        """Save those parts of the state that have changed. With `is_last`, the daemon is stopping: save all of them,
        however long that takes."""
        if not self.is_read and not (is_last and await self.restore()):
            return
        began_ns, deletions = self._store.clock.monotonic_ns(), self._store.residency.deletions
        self._runner.busy_s = 0.0
        is_due = self._owes_rewrite(is_last=is_last)
        # A rewrite copies the saved terms: nothing deleted may be among them.
        are_terms_saved = not (is_due or is_last) or await self.terms.save()
        rewrite = is_due and are_terms_saved
        self._failed_rewrites += is_due  # until it has succeeded
        try:
            await self.process.open()  # which says what is in it
            yields = self._yields and not is_last
            async with self.process.transaction(rewrite=rewrite, yields=yields) as change:
                done = await self._put(change, everything=rewrite, is_last=is_last)
                if is_last and rewrite == is_due:
                    await change.put("about", [(ENDED, IN_ORDER)])
        except Interrupted:
            self._yields, self.pause_s = False, 0.0
            self._failed_rewrites -= is_due
            return
        except OSError as error:
            self._unsaved.failed(self.process.path, error, COST)
            self.pause_s = INTERVAL_S
            return
        self._yields = True
        self._unsaved.saved(self.process.path)
        self.written_bytes = change.written_bytes
        for note in done:
            note()
        if rewrite:
            self._rewritten, self._rewritten_ns, self._failed_rewrites = deletions, began_ns, 0
            self._removed.rewritten(deletions)
        self.pause_s = max(INTERVAL_S, REST * self._runner.busy_s, self.written_bytes / self._rate_bytes)

    async def _put(self, change: Transaction, *, everything: bool, is_last: bool) -> list[Callable[[], None]]:
        """Put the changed entries into `change`. Return functions that note the entries as saved; call them after the
        commit."""
        done: list[Callable[[], None]] = []
        saved = _Saved() if everything else self._saved
        ahead_ns = self._store.clock.wall_ns() - self._store.clock.monotonic_ns()
        for name, rows in self._usage.items():
            if everything:
                rows.saved = rows.saved[:0]
            digests = await self._runner.run_all(rows.digests())
            for part in rows.parts(digests):
                await change.put(name, await self._runner.run_all(rows.entries(part, len(digests), ahead_ns)))
            done.append(partial(setattr, rows, "saved", digests))
        done += await self._put_small(change, saved)
        activity = self._learned.activity()
        now_ns = self._store.clock.monotonic_ns()
        if activity != saved.activity and (everything or is_last or now_ns >= self._learned_from_ns):
            before_s = self._runner.busy_s
            contents = await self._learned.put(change, self._runner)
            rest_s = max(REST * (self._runner.busy_s - before_s), contents.nbytes / self._rate_bytes)
            self._runner.busy_s = before_s  # uses of blocks do not wait for it
            from_ns = now_ns + round(min(rest_s, 60.0) * NS_PER_S)
            done.append(partial(setattr, self, "_learned_from_ns", from_ns))
            done.append(partial(setattr, self._saved, "activity", activity))
        return done

    async def _put_small(self, change: Transaction, saved: _Saved) -> list[Callable[[], None]]:
        done: list[Callable[[], None]] = []
        for name, entries, before in (
            ("names", self._tenants.named_entries(self._store.residency), saved.names),
            ("quarantine", self._quarantine(), saved.quarantine),
            (TENANTS, self.orders.items(TENANTS), saved.tenants),
            (WEIGHTS, self.orders.items(WEIGHTS), saved.weights),
        ):
            if entries != before:
                await change.put(name, entries)
                if self._store.nvme is not None or saved is not self._saved:  # else what is on NVMe is not seen
                    await change.keep_only(name, [key for key, _ in entries])
                done.append(partial(setattr, self._saved, name, entries))
        scrub = self.scrub
        if scrub is not None and scrub != saved.scrub:
            await change.put("scrub", [(POSITION, scrub)])
            done.append(partial(setattr, self._saved, "scrub", scrub))
        return done

    def _quarantine(self) -> list[Entry]:
        if self._store.nvme is None:
            return []
        held = self._store.nvme.quarantined().items()
        return [(SLOT.pack(*place), why.encode(errors="replace")[:WHY_BYTES]) for place, why in held]

    async def _save_budget(self, budget: bytes) -> None:
        """Save the endurance budget so that it survives a loss of power. Raises OSError."""
        async with self.process.transaction(durable=True, is_urgent=True) as change:
            await change.put("endurance", [(b"budget", budget)])
