"""Group commit: makes everything that completed before it durable. docs/ordering.md gives the order and its reasons.

Owns the thread that syncs, and the order: slot images synced, records withdrawn, records published, records synced,
waiters answered, index changed. Requests that arrive while a commit runs share the next one.
Invariant: a waiter is answered DONE only after the records of every block written before its request are on the medium.
The index comes behind the answer: it can be rebuilt from the records, so it may fail and lag without taking that away.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvstore_tiers import failpoints
from kvstore_tiers.base import Completion, Outcome, OutcomeKind
from kvstore_tiers.nvme.index import KeyIndex
from kvstore_tiers.nvme.journal import Batch, Journal
from kvstore_tiers.nvme.slab import Slab, Withdrawn
from kvstore_tiers.threads import deliver, run_transfer


class _Changes(NamedTuple):
    """Of the index, by one commit."""

    published: Withdrawn
    withdrawn: Withdrawn
    reasons: dict[tuple[int, int], str]
    sequence: int


class GroupCommit:
    """One resident thread that commits the journal whenever somebody asked."""

    def __init__(
        self,
        journal: Journal,
        index: KeyIndex,
        watch: Callable[[Outcome], Outcome],
        index_budget: Callable[[], int],
    ) -> None:
        self._journal = journal
        self._index = index
        self._watch = watch
        self._index_budget = index_budget
        self._waiters: list[Completion] = []
        self._wake = threading.Condition()
        self._closing = False
        self._is_behind = False  # the index lacks what a commit has made durable
        self._thread = threading.Thread(target=self._serve, name="nvme-commit", daemon=True)
        self._thread.start()

    def request(self, done: Completion) -> None:
        """Call `done` once everything that completed before this call is durable."""
        with self._wake:
            if not self._closing:
                self._waiters.append(done)
                self._wake.notify()
                return
        done(Outcome(OutcomeKind.CANCELLED, message="the tier is closed"))

    def wait_indexed(self) -> None:
        """Until the index has what the commits that were answered made durable."""
        with self._wake:
            self._wake.wait_for(lambda: not self._is_behind)

    def close(self) -> bool:
        """Answer who waits, commit once more, end the thread; whether nothing waits to be committed. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        return self._journal.is_empty

    def _serve(self) -> None:
        closing = False
        while not closing:
            with self._wake:
                self._wake.wait_for(lambda: self._waiters or self._closing)
                waiters, self._waiters, closing = self._waiters, [], self._closing
                self._is_behind = True
            changes: list[_Changes] = []
            outcome = self._watch(run_transfer(partial(self._commit, changes)))
            for done in waiters:
                deliver(outcome, done)
            for change in changes:
                run_transfer(partial(self._change_index, change))
            with self._wake:
                self._is_behind = False
                self._wake.notify_all()

    def _commit(self, changes: list[_Changes]) -> Outcome:
        """Append what the index is to be changed by."""
        sequence = self._journal.sequence
        batch = self._journal.take()
        if batch:
            try:
                changes.append(self._write(batch, sequence))
            except BaseException:
                self._journal.put_back(batch)
                raise
        return Outcome(OutcomeKind.DONE)

    def _write(self, batch: Batch, sequence: int) -> _Changes:
        failed = {slab: slab.failed_syncs for slab in _touched(batch)}
        failpoints.hit("nvme.sync-start")
        for slab in batch.written:
            slab.sync()
        failpoints.hit("nvme.after-data-sync")
        for slab, indices in batch.freed.items():
            if slab.is_made:
                batch.withdrawn += slab.withdraw(indices, sequence)
        for slab, by_slot in batch.quarantined.items():
            if slab.is_made:
                batch.withdrawn += slab.publish_quarantine(by_slot, sequence)
        failpoints.hit("nvme.between-records")
        published: Withdrawn = []
        for slab, blocks in batch.written.items():
            published += slab.publish(blocks.items(), sequence)
        failpoints.hit("nvme.after-records-write")
        for slab in _touched(batch):
            slab.sync()
            if slab.failed_syncs != failed.get(slab, slab.failed_syncs):
                raise OSError(errno.EIO, "a sync beside this one failed, and the medium may lack what it was to take")
        failpoints.hit("nvme.after-record-sync")
        for slab, freed in batch.freed.items():
            slab.settle(freed)
        reasons = {
            (slab.number, slot): reason
            for slab, by_slot in batch.quarantined.items()
            for slot, reason in by_slot.items()
        }
        return _Changes(published, batch.withdrawn, reasons, sequence)

    def _change_index(self, changes: _Changes) -> Outcome:
        self._index.resize(self._index_budget())
        self._index.apply(changes.published, changes.withdrawn, changes.reasons, changes.sequence)
        failpoints.hit("nvme.after-index-commit")
        return Outcome(OutcomeKind.DONE)


def _touched(batch: Batch) -> set[Slab]:
    return {slab for slab in (*batch.written, *batch.freed, *batch.quarantined) if slab.is_made}
