"""Record commit: makes everything that completed before it durable. docs/ordering.md gives the order and its reasons.

Owns the thread that syncs, and the order: slot images synced, records withdrawn, records published, records synced,
waiters answered. Requests that arrive during a commit share the next one.
Invariant: a waiter is answered DONE only after the records of every block written before its request are on the medium.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from kvstore_tiers import failpoints
from kvstore_tiers.base import Completion, Outcome, OutcomeKind
from kvstore_tiers.nvme.journal import Journal, PendingRecords
from kvstore_tiers.nvme.slab import Slab
from kvstore_tiers.threads import deliver, run_transfer


class RecordCommit:
    """One resident thread that commits the journal when a caller requests it."""

    def __init__(
        self, journal: Journal, watch: Callable[[Outcome], Outcome], make_up: Callable[[], None] = lambda: None
    ) -> None:
        """`make_up` does what has to be on the medium before any change; it raises OSError where it cannot."""
        self._journal = journal
        self._watch = watch
        self._make_up = make_up
        self._waiters: list[Completion] = []
        self._wake = threading.Condition()
        self._closing = False
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

    def close(self) -> bool:
        """Answer waiting requests, commit once more, end the thread; whether all changes are committed. Idempotent."""
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
            outcome = self._watch(run_transfer(self._commit))
            for done in waiters:
                deliver(outcome, done)

    def _commit(self) -> Outcome:
        self._make_up()
        sequence = self._journal.sequence
        batch = self._journal.take()
        if batch:
            try:
                _write(batch, sequence)
            except BaseException:
                self._journal.put_back(batch)
                raise
        return Outcome(OutcomeKind.DONE)


def _write(batch: PendingRecords, sequence: int) -> None:
    failed = {slab: slab.failed_syncs for slab in _touched(batch)}
    failpoints.hit("nvme.sync-start")
    for slab in batch.written:
        slab.sync()
    failpoints.hit("nvme.after-data-sync")
    for slab, freed in batch.freed.items():
        if slab.is_made:
            slab.withdraw(freed, sequence)
    for slab, indices in batch.quarantined.items():
        if slab.is_made:
            slab.publish_quarantine(indices, sequence)
    failpoints.hit("nvme.between-records")
    for slab, blocks in batch.written.items():
        slab.publish(blocks.items(), sequence)
    failpoints.hit("nvme.after-records-write")
    for slab in _touched(batch):
        slab.sync()
        if slab.failed_syncs != failed.get(slab, slab.failed_syncs):
            raise OSError(errno.EIO, "a sync beside this one failed, and the medium may lack its writes")
    failpoints.hit("nvme.after-record-sync")
    for slab, freed in batch.freed.items():
        slab.settle(freed)


def _touched(batch: PendingRecords) -> set[Slab]:
    return {slab for slab in (*batch.written, *batch.freed, *batch.quarantined) if slab.is_made}
