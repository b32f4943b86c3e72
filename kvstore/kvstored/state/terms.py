"""The saving of blocks' later terms (terms that no header has) in the database `pins`, and their return at a start.

The changes of `INTERVAL_S` seconds are one commit; when a put waits, they are committed at once. Each commit is synced,
so a loss of power undoes none. A crash forgets the touches of `INTERVAL_S` and the time of one commit, and no put that
was answered durable. The file `pins` in the state directory has no content: while it is there, a start waits for the
saved terms, because a block must not be served, or removed, by its header's terms alone.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from kvstore_proto.replaced_file import sync_directory
from kvstored.state.process import DEATHS, StateProcess, Transaction
from kvstored.store.later_terms import Entry
from kvstored.store.retention import Retention
from kvstored.unsaved import Unsaved

log = logging.getLogger(__name__)
INTERVAL_S = 5.0
START_S = 30.0  # the longest that a start waits for saved terms
MARK = "pins"
COST = "a restart forgets pins, and what touches changed of expiries and priorities; puts that need it are volatile"


class TermsKeeper:
    """A component that saves the terms (expiry, priority, pins) of blocks which are not in the blocks' own headers,
    through `process`. `retention` sets the terms. `directory` is the state directory."""

    def __init__(self, process: StateProcess, retention: Retention, unsaved: Unsaved, directory: Path) -> None:
        self._process, self._retention, self._later = process, retention, retention.later
        self._unsaved, self._mark = unsaved, directory / MARK
        self._turn = asyncio.Lock()
        self.is_read = False
        self._later.follow()
        process.listeners.append(self._is_new)

    def _is_new(self, _: str) -> None:
        self._later.is_whole = True

    async def restore_before_serving(self) -> None:
        """Give blocks their saved terms before a client is served, if there may be any. If that fails or takes longer
        than `START_S` seconds, log it; until a later try succeeds, blocks have the terms in their headers."""
        if self._mark.exists():
            try:
                async with asyncio.timeout(START_S):
                    await self._restore_patiently()
            except (OSError, TimeoutError) as error:
                why = str(error) or f"it takes more than {START_S:g} s"
                self._later.is_pending = True
                how = "blocks begin with the terms of their headers; what has expired by these is hidden, not removed"
                log.warning("saved terms cannot be read (%s): %s", why, how)
        for _ in self._retention.settle_chains(at_start=True):
            await asyncio.sleep(0)

    async def _restore_patiently(self) -> None:
        """Do `restore`, again while it fails: after some deaths of its process a damaged file is set aside. Raises the
        last OSError."""
        for left in range(DEATHS, -1, -1):
            try:
                return await self.restore()
            except OSError:
                if not left:
                    raise

    async def restore(self) -> None:
        """Give blocks their saved terms (expiry, priority, pins), unless that was done already. Raises OSError."""
        async with self._turn:
            if self.is_read:
                return
            await self._process.open()
            entries = await self._process.read("pins")
            for first in range(0, len(entries), 512):
                self._retention.restore(entries[first : first + 512])
                await asyncio.sleep(0)
            for _ in self._retention.settle_chains(at_start=True):
                await asyncio.sleep(0)
            self.is_read, self._later.is_pending = True, False
            if not entries:
                self._mark.unlink(missing_ok=True)

    async def run(self) -> None:
        """Save changed terms of blocks every `INTERVAL_S` seconds, and at once when a put waits for them, until the
        task is cancelled."""
        waiting: asyncio.Future[bool] | None = None
        loop, until_s = asyncio.get_running_loop(), 0.0  # until then nothing is tried: the last try failed
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._later.wanted.wait()
                waiting = self._later.take_waiting()
                went_well = loop.time() >= until_s and await self.save()
                if not went_well and loop.time() >= until_s:
                    until_s = loop.time() + INTERVAL_S
                if waiting is not None:
                    waiting.set_result(went_well)
                    waiting = None
        finally:
            if waiting is not None:
                waiting.set_result(False)
            self._later.end()

    async def save(self) -> bool:
        """Save the terms of blocks that have changed since the last save. Return False when they could not be saved."""
        try:
            await self.restore()
            async with self._turn:
                if not self._later.are_saved:
                    await self._save()
        except OSError as error:
            self._unsaved.failed(self._mark, error, COST)
            return False
        self._unsaved.saved(self._mark)
        return True

    async def _save(self) -> None:
        later = self._later
        await self._process.open()  # which says what is in it
        is_whole, steps = later.begin_save()
        try:
            async with self._process.transaction(durable=True) as change:
                if is_whole and later.sees_all:
                    await change.keep_only("pins", [])
                for entries, gone in steps:
                    await self._put(change, entries, gone)
                    await asyncio.sleep(0)
        except BaseException:
            later.not_saved()
            raise
        later.saved()
        if later.sees_all and later.are_saved and not later.is_any:
            self._mark.unlink(missing_ok=True)

    async def _put(self, change: Transaction, entries: list[Entry], gone: list[bytes]) -> None:
        if entries and not self._mark.exists():
            self._mark.touch(mode=0o600)
            await asyncio.to_thread(sync_directory, self._mark.parent)
        await change.put("pins", entries)
        await change.remove("pins", gone)
