"""What the I/O threads of an NVMe tier do with a slot: store a block there, load one from there, copy one, lend one.

Owns the order of these steps and the judgement of what was read. Knows no allocation: the caller names slots that are
out. Invariants: a slot's old record is withdrawn, on the medium too, before its bytes are overwritten; a load is DONE
only when magic, key, generation, header checksum and payload checksum hold.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_tiers import failpoints
from kvstore_tiers.base import Completion, FileImage, Load, Outcome, OutcomeKind, Segment, Slot
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.image import judge_header
from kvstore_tiers.nvme.health import TierHealth
from kvstore_tiers.nvme.io import SlotIO
from kvstore_tiers.nvme.journal import Journal
from kvstore_tiers.nvme.slab import Slab, SlotState
from kvstore_tiers.segments import checksum_of, total_bytes
from kvstore_tiers.under_way import UnderWay

_OUR_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # of this process, not of the medium


class Place(NamedTuple):
    """A slot that is out, and its index in its slab."""

    slab: Slab
    slot_index: int
    slot: Slot


class SlotTransfers:
    """Transfers for any thread, counted in `counters`; `journal` and `health` learn how they ended."""

    def __init__(self, journal: Journal, health: TierHealth, counters: TransferCounters) -> None:
        self._io = SlotIO()
        self._lent = UnderWay()
        self._journal = journal
        self._health = health
        self._counters = counters

    def store(self, place: Place, header: BlockHeader, segments: Sequence[Segment]) -> Outcome:
        slab, index, slot = place
        try:
            with self._counters.watch():
                self._ready(slab, index)
                payload = self._io.stable(segments, header.payload_bytes)
                checksum = header.checksum or checksum_of(payload, header.payload_bytes)
                stored = replace(header, generation=slot.generation, checksum=checksum)
                self._io.write_image(slab.file.slot_fd, slot.offset, stored.pack(), payload, header.payload_bytes)
        except OSError as error:
            self._health.watch_write(Outcome(OutcomeKind.FAILED, message=str(error), errno=error.errno or 0))
            raise
        failpoints.hit("nvme.after-slot-write")
        slab.note_written(index, stored)
        self._journal.note_written(slab, index, replace(stored, tokens=b""))
        return self._health.watch_write(self._counters.wrote(Outcome(OutcomeKind.DONE, stored, header.payload_bytes)))

    def load(self, place: Place, expect_key: bytes, segments: Sequence[Segment]) -> Outcome:
        try:
            with self._counters.watch():
                outcome = self._read_verified(place, expect_key, segments)
        except OSError as error:
            self._health.watch_read(Outcome(OutcomeKind.FAILED, message=str(error), errno=error.errno or 0))
            raise
        return self._health.watch_read(self._counters.read(outcome))

    def lend(self, place: Place, load: Load, done: Completion) -> None:
        """See `Tier.lend`. What the other tier is to blame for is no failure of this medium."""
        slab, index, slot = place
        ended = self._lent.begin(done)

        def end(outcome: Outcome) -> None:
            if outcome.kind is not OutcomeKind.FAILED or outcome.errno:
                self._health.watch_read(self._counters.read(outcome))
            ended(outcome)

        if slab.states[index] == SlotState.ALLOCATED:
            end(Outcome(OutcomeKind.CORRUPT, message=f"{slot} was allocated and never written"))
            return
        try:
            failpoints.hit("nvme.read")
            descriptor = slab.file.open_to_read()
        except OSError as error:
            medium = 0 if error.errno in _OUR_LIMITS else error.errno or 0
            end(Outcome(OutcomeKind.FAILED, message=str(error), errno=medium))
            return
        load(FileImage(descriptor, slot.offset, slab.payload_bytes[index], slot.generation), end)

    def copy(self, source: Place, target: Place, expect_key: bytes) -> Outcome:
        pages = [self._io.scratch(source.slab.payload_bytes[source.slot_index])]
        outcome = self.load(source, expect_key, pages)
        if outcome.header is None or not outcome.ok:
            return outcome
        stored = self.store(target, outcome.header, [pages[0].part(0, outcome.header.payload_bytes)])
        failpoints.hit("nvme.after-relocation")
        return stored

    def close(self) -> None:
        """Wait for those that read lent slots."""
        self._lent.wait()

    def _ready(self, slab: Slab, index: int) -> None:
        """Make the slab's file if it is new, and withdraw the record of the slot's former block."""
        was_made = slab.is_made
        slab.make_file()
        if not was_made:
            self._health.note_growth()
        failpoints.hit("nvme.before-slot-write")
        slab.withdraw([index], self._journal.sequence)
        slab.sync_hot(index, self._journal.sequence)
        failpoints.hit("nvme.after-invalidate")

    def _read_verified(self, place: Place, expect_key: bytes, segments: Sequence[Segment]) -> Outcome:
        slab, index, slot = place
        nbytes = slab.payload_bytes[index]
        if slab.states[index] == SlotState.ALLOCATED:
            return Outcome(OutcomeKind.CORRUPT, message=f"{slot} was allocated and never written")
        if total_bytes(segments) < nbytes:
            message = f"{nbytes} payload bytes do not fit {total_bytes(segments)} bytes of segments"
            return Outcome(OutcomeKind.FAILED, message=message)
        failpoints.hit("nvme.read")
        image = self._io.read_image(slab.file.slot_fd, slot.offset, segments, nbytes)
        header = judge_header(image.raw_header, expect_key, slot.nbytes - HEADER_BYTES, slot.generation)
        if isinstance(header, str):
            return Outcome(OutcomeKind.CORRUPT, message=header)
        if header.payload_bytes != nbytes:
            message = f"the header says {header.payload_bytes} payload bytes, the record {nbytes}"
            return Outcome(OutcomeKind.CORRUPT, message=message)
        if image.checksum() != header.checksum:
            return Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
        image.deliver()
        return Outcome(OutcomeKind.DONE, header, nbytes)
