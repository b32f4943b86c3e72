"""Record commit: makes everything that completed before it durable. docs/ordering.md gives the order and its reasons.

Owns the pending changes of all slabs, the sequence number of the next commit, the thread that syncs, and the order:
slot images synced, records withdrawn, records published, records synced, waiters answered. Requests that arrive during
a commit share the next one.
Invariants: a waiter is answered DONE only after the records of every block written before its request are on the
medium; a batch that could not be committed is put back under what changed meanwhile, so no change is ever forgotten; a
block is noted only when its slot image is whole.
"""

from __future__ import annotations

import errno
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore_proto.arena import BlockHeader
from kvstore_tiers import failpoints
from kvstore_tiers.base import Completion, Outcome, OutcomeKind
from kvstore_tiers.nvme.slab import Slab
from kvstore_tiers.threads import deliver, run_transfer


@dataclass
class PendingRecords:
    """The changes of slots whose records are not on the medium yet, for each slab and by slot number: the headers of
    written blocks, the next generations of freed slots, and the quarantined slots.
    """

    written: defaultdict[Slab, dict[int, BlockHeader]] = field(default_factory=lambda: defaultdict(dict))
    freed: defaultdict[Slab, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))  # in which generation
    quarantined: defaultdict[Slab, set[int]] = field(default_factory=lambda: defaultdict(set))

    def __bool__(self) -> bool:
        return bool(self.written or self.freed or self.quarantined)


class Journal:
    """A list of the changes to slots (written, freed, quarantined) since the last commit, which makes them durable. Any
    thread may add to it. `sequence` is the number of the next commit.
    """

    def __init__(self, first_sequence: int) -> None:
        self._lock = threading.Lock()
        self._batch = PendingRecords()
        self.sequence = first_sequence  # of the next commit; above every sequence on the medium

    @property
    def is_empty(self) -> bool:
        """True if no change waits for a commit."""
        with self._lock:
            return not self._batch

    def note_written(self, slab: Slab, index: int, header: BlockHeader) -> None:
        with self._lock:
            self._batch.written[slab][index] = header

    def note_freed(self, slab: Slab, index: int, generation: int) -> None:
        """Add the change that slot number `index` of `slab` was freed. Its next use will have the generation
        `generation`.
        """
        with self._lock:
            self._batch.freed[slab][index] = generation

    def note_quarantined(self, slab: Slab, index: int) -> None:
        with self._lock:
            self._batch.quarantined[slab].add(index)

    def take(self) -> PendingRecords:
        """Return all changes in the list and empty it, for a commit. Later changes belong to the commit after it."""
        with self._lock:
            batch, self._batch = self._batch, PendingRecords()
            self.sequence += 1
            return batch

    def put_back(self, old: PendingRecords) -> None:
        """Put the changes `old` of a failed commit into the list again. Where a slot has changed since, the newer
        change is kept.
        """
        with self._lock:
            new, self._batch = self._batch, old
            for slab, blocks in new.written.items():
                old.written[slab].update(blocks)
            for slab, indices in new.freed.items():
                old.freed[slab].update(indices)
            for slab, quarantined in new.quarantined.items():
                old.quarantined[slab].update(quarantined)


class RecordCommit:
    """A thread that makes the changes in `journal` durable when a caller requests it. `watch` is called with each
    commit's outcome.
    """

    def __init__(
        self, journal: Journal, watch: Callable[[Outcome], Outcome], make_up: Callable[[], None] = lambda: None
    ) -> None:
        """Start the thread. `make_up` is called before each commit and writes what must be on the medium first; it
        raises OSError if that fails.
        """
        self._journal = journal
        self._watch = watch
        self._make_up = make_up
        self._waiters: list[Completion] = []
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="nvme-commit", daemon=True)
        self._thread.start()

    def request(self, done: Completion) -> None:
        """Make every change before this call durable. `done` is then called, with FAILED if the commit failed. After
        `close` it gets CANCELLED at once.
        """
        with self._wake:
            if not self._closing:
                self._waiters.append(done)
                self._wake.notify()
                return
        done(Outcome(OutcomeKind.CANCELLED, message="the tier is closed"))

    def close(self) -> bool:
        """Answer the waiting requests, commit a last time and end the thread. Return True if all changes are durable. A
        second call does nothing.
        """
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
