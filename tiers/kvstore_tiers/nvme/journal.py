"""Changes since the last record commit: blocks to publish, slots to withdraw, slots to quarantine.

Owns the pending changes of all slabs, and the sequence number of the next commit. Never writes.
Invariants: a batch is taken whole; a batch that could not be committed is put back under what changed meanwhile, so no
change is ever forgotten; a block is noted only when its slot image is whole.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.nvme.slab import Slab


@dataclass
class PendingRecords:
    """Pending changes by slab."""

    written: defaultdict[Slab, dict[int, BlockHeader]] = field(default_factory=lambda: defaultdict(dict))
    freed: defaultdict[Slab, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))  # in which generation
    quarantined: defaultdict[Slab, set[int]] = field(default_factory=lambda: defaultdict(set))

    def __bool__(self) -> bool:
        return bool(self.written or self.freed or self.quarantined)


class Journal:
    """Collects changes from the control thread and the I/O threads; the record commit takes them."""

    def __init__(self, first_sequence: int) -> None:
        self._lock = threading.Lock()
        self._batch = PendingRecords()
        self.sequence = first_sequence  # of the next commit; above every sequence on the medium

    @property
    def is_empty(self) -> bool:
        """Whether everything that changed was committed."""
        with self._lock:
            return not self._batch

    def note_written(self, slab: Slab, index: int, header: BlockHeader) -> None:
        with self._lock:
            self._batch.written[slab][index] = header

    def note_freed(self, slab: Slab, index: int, generation: int) -> None:
        """`generation`: that of the slot's next use."""
        with self._lock:
            self._batch.freed[slab][index] = generation

    def note_quarantined(self, slab: Slab, index: int) -> None:
        with self._lock:
            self._batch.quarantined[slab].add(index)

    def take(self) -> PendingRecords:
        """The changes so far; the next ones go to a new batch and a higher sequence number."""
        with self._lock:
            batch, self._batch = self._batch, PendingRecords()
            self.sequence += 1
            return batch

    def put_back(self, old: PendingRecords) -> None:
        """A commit failed: its changes are pending again, newer ones over them."""
        with self._lock:
            new, self._batch = self._batch, old
            for slab, blocks in new.written.items():
                old.written[slab].update(blocks)
            for slab, indices in new.freed.items():
                old.freed[slab].update(indices)
            for slab, quarantined in new.quarantined.items():
                old.quarantined[slab].update(quarantined)
