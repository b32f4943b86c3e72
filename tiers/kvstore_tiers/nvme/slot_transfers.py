"""Steps of the I/O threads of an NVMe tier: store a block in a slot, load one, copy one, lend one. A block of a tenant
with a key is sealed on its way to the medium (`seals.py`).

Owns the order of these steps, and the judgement of what was read. Knows no allocation: the caller names slots that are
out.
Invariants: a slot's old record is withdrawn, on the medium too, before its bytes are overwritten; a load is DONE only
when magic, key, generation, header checksum and payload checksum hold.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstore_proto.arena import HEADER_BYTES, SEALED, BlockHeader, read_header
from kvstore_tiers import failpoints
from kvstore_tiers.base import Completion, FileImage, Load, Outcome, OutcomeKind, Slot
from kvstore_tiers.codec_rates import CodecRates
from kvstore_tiers.codecs import codec_name
from kvstore_tiers.codecs.images import decode_image
from kvstore_tiers.codecs.scratch import Scratch
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.image import (
    aligned_up,
    false_checksum,
    image_header,
    judge_header,
    require_fits,
    stamp_header,
)
from kvstore_tiers.nvme.commit import Journal
from kvstore_tiers.nvme.data_keys import DataKeys
from kvstore_tiers.nvme.health import TierHealth
from kvstore_tiers.nvme.layout import key_number
from kvstore_tiers.nvme.slab import Slab, SlotState
from kvstore_tiers.nvme.slot_io import SlotIO
from kvstore_tiers.segments import (
    AlignedBuffer,
    Segment,
    buffer_at,
    checksum_of,
    total_bytes,
)
from kvstore_tiers.threads import UnderWay

if TYPE_CHECKING:
    from kvstore_tiers.nvme.seals import DataKey


Read = Callable[["SlotPlace", bytes, Sequence[Segment]], Outcome]
MEASURED_BYTES, MEASURED_PIECE_BYTES = 16 << 20, 1 << 20
_OUR_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # of this process, not of the medium


class SlotPlace(NamedTuple):
    """An allocated slot, with the slab that contains it and its number in that slab."""

    slab: Slab
    slot_index: int
    slot: Slot


class SlotTransfers:
    """A maker of the reads, writes and copies of an NVMe tier's slots, on the calling thread. `journal`, `health` and
    `counters` are notified of each outcome; `scratch` gives memory for encrypting and decoding. Without `keys` nothing
    is encrypted, and no encrypted block can be read.
    """

    def __init__(
        self,
        journal: Journal,
        health: TierHealth,
        counters: TransferCounters,
        scratch: Scratch,
        rates: CodecRates,
        keys: DataKeys | None = None,
    ) -> None:
        self._io = SlotIO()
        self._keys = keys
        self._scratch, self._rates = scratch, rates  # for bytes of a codec
        self._lent = UnderWay()
        self._journal = journal
        self._health = health
        self._counters = counters

    def store(self, place: SlotPlace, header: BlockHeader, segments: Sequence[Segment]) -> Outcome:
        slab, index, slot = place
        try:
            key = self._keys.of_tenant(header.tenant) if self._keys is not None else None
        except OSError as error:  # where keys are kept, no block is: EBUSY says that the medium is not to be judged
            message = f"the tenant's new key cannot be saved: {error.strerror}"
            return Outcome(OutcomeKind.FAILED, message=message, errno=errno.EBUSY)
        try:
            with self._counters.watch():
                self._ready(slab, index)
                nbytes = header.stored_bytes
                stored = header.stamped(slot.generation, header.checksum or checksum_of(segments, nbytes))
                written = self._write(place, stored, segments, key)
        except OSError as error:
            self._health.watch_write(Outcome(OutcomeKind.FAILED, message=str(error), errno=error.errno or 0))
            raise
        failpoints.hit("nvme.after-slot-write")
        slab.note_written(index, written)
        self._journal.note_written(slab, index, written.without_tokens())
        return self._health.watch_write(self._counters.wrote(Outcome(OutcomeKind.DONE, stored, nbytes)))

    def store_image(self, place: SlotPlace, source: Segment, expect_key: bytes) -> Outcome:
        """Store the slot image `source`, which must be of the block `expect_key`."""
        header = image_header(source, expect_key)
        if isinstance(header, str):
            return Outcome(OutcomeKind.CORRUPT, message=header)
        segments = [source.part(HEADER_BYTES, header.stored_bytes)]
        require_fits(place.slot, header, segments)
        return self.store(place, header, segments)

    def load_image(self, place: SlotPlace, destination: Segment, expect_key: bytes) -> Outcome:
        """Fill the slot image `destination`, the header last."""
        outcome = self.load(place, expect_key, [destination.part(HEADER_BYTES, destination.nbytes - HEADER_BYTES)])
        if outcome.header is not None and outcome.ok:
            stamp_header(destination, outcome.header)
        return outcome

    def name_again(self, place: SlotPlace) -> Outcome:
        """Let the next commit write the record of an encrypted block anew, as its slot's header says."""
        slab, index, slot = place
        header = read_header(self._io.read_image(slab.file.slot_fd, slot.offset, (), 0).raw_header)
        if isinstance(header, str) or header.generation != slot.generation:
            return Outcome(OutcomeKind.CORRUPT, message=f"{slot} has another header")
        self._journal.note_written(slab, index, header.without_tokens())
        return Outcome(OutcomeKind.DONE)

    def load(self, place: SlotPlace, expect_key: bytes, segments: Sequence[Segment]) -> Outcome:
        """Read the block with the key `expect_key` from the slot at `place`, check it, and fill `segments` with its
        payload, decoded if a codec encoded it.
        """
        return self._watched(self._read_payload, place, expect_key, segments)

    def _watched(self, read: Read, place: SlotPlace, expect_key: bytes, segments: Sequence[Segment]) -> Outcome:
        try:
            with self._counters.watch():
                outcome = read(place, expect_key, segments)
        except OSError as error:
            self._health.watch_read(Outcome(OutcomeKind.FAILED, message=str(error), errno=error.errno or 0))
            raise
        return self._health.watch_read(self._counters.read(outcome))

    def lend(self, place: SlotPlace, load: Load, done: Completion) -> None:
        """Open the file of the slot at `place` and give it to `load`, a function of another tier, as `Tier.lend`
        describes. `done` gets the outcome. A failure of the other tier does not count against this medium.
        """
        slab, index, slot = place
        ended = self._lent.begin(done)

        def end(outcome: Outcome) -> None:
            if outcome.kind is not OutcomeKind.FAILED or outcome.errno:
                self._health.watch_read(self._counters.read(outcome))
            ended(outcome)

        if slab.states[index] == SlotState.ALLOCATED:
            end(Outcome(OutcomeKind.CORRUPT, message=f"{slot} was allocated and never written"))
            return
        nbytes, codec = slab.stored(index)
        if codec:
            message = f"its bytes are in {codec_name(codec)}, which no device reads"
            end(Outcome(OutcomeKind.FAILED, message=message))
            return
        try:
            failpoints.hit("nvme.read")
            descriptor = slab.file.open_to_read()
        except OSError as error:
            medium = 0 if error.errno in _OUR_LIMITS else error.errno or 0
            end(Outcome(OutcomeKind.FAILED, message=str(error), errno=medium))
            return
        load(FileImage(descriptor, slot.offset, nbytes, slot.generation), end)

    def copy(self, source: SlotPlace, target: SlotPlace, expect_key: bytes) -> Outcome:
        pages = [self._io.scratch(source.slab.stored(source.slot_index)[0])]
        outcome = self._watched(self._read_verified, source, expect_key, pages)
        if outcome.header is None or not outcome.ok:
            return outcome
        stored = self.store(target, outcome.header, [pages[0].part(0, outcome.header.stored_bytes)])
        failpoints.hit("nvme.after-relocation")
        return stored

    def measure(self, slab: Slab) -> Outcome:
        """Read some of a slab, for the rate of the medium."""
        piece = AlignedBuffer(MEASURED_PIECE_BYTES)
        into, geometry = [buffer_at(piece.address, piece.nbytes)], slab.superblock
        end = min(geometry.file_bytes - piece.nbytes, geometry.slots_offset + MEASURED_BYTES)
        for offset in range(geometry.slots_offset, end, piece.nbytes):
            with self._rates.medium.work(piece.nbytes):
                os.preadv(slab.file.slot_fd, into, offset)
        return Outcome(OutcomeKind.DONE)

    def close(self) -> None:
        """Wait until no other tier reads from a slot that `lend` gave to it."""
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

    def _write(
        self, place: SlotPlace, header: BlockHeader, segments: Sequence[Segment], key: DataKey | None
    ) -> BlockHeader:
        """Write a whole image, encrypted if its tenant has the `key`. Return the header that is on the medium."""
        fd, offset, nbytes = place.slab.file.slot_fd, place.slot.offset, header.stored_bytes
        if key is None:
            self._io.write_image(fd, offset, header.pack(), self._io.stable(segments, nbytes), nbytes)
            return header
        with self._scratch.take(aligned_up(nbytes)) as room:
            sealed = key.seal(header, segments, room)
            self._io.write_image(fd, offset, sealed.pack(), [room.part(0, nbytes)], nbytes)
        return sealed

    def _read_payload(self, place: SlotPlace, expect_key: bytes, segments: Sequence[Segment]) -> Outcome:
        codec, nbytes = place.slab.stored(place.slot_index)[1] & ~SEALED, total_bytes(segments)
        served, core, done_bytes = self._rates.served[codec], self._rates.read_core[0], 0
        began = served.begin()
        try:
            if codec:
                outcome = self._read_coded(place, expect_key, segments)
            else:
                core_began = core.begin()
                outcome = self._read_verified(place, expect_key, segments)
                core.end(core_began, nbytes if outcome.ok else 0)
            done_bytes = nbytes if outcome.ok else 0
            return outcome
        finally:
            served.end(began, done_bytes)

    def _read_coded(self, place: SlotPlace, expect_key: bytes, segments: Sequence[Segment]) -> Outcome:
        nbytes, codec = place.slab.stored(place.slot_index)
        with self._scratch.take(aligned_up(nbytes)) as pages:
            outcome = self._read_verified(place, expect_key, [pages])
            if outcome.header is None or not outcome.ok or outcome.header.coded is None:
                return outcome
            header, core = outcome.header, self._rates.read_core[codec & ~SEALED]
            began = core.begin()
            outcome = decode_image(header, pages.part(0, header.stored_bytes), segments)
            core.end(began, header.payload_bytes if outcome.ok else 0)
            return outcome

    def _read_verified(self, place: SlotPlace, expect_key: bytes, segments: Sequence[Segment]) -> Outcome:
        """Read what is stored, of any codec."""
        slab, index, slot = place
        nbytes, codec = slab.stored(index)
        if slab.states[index] == SlotState.ALLOCATED:
            return Outcome(OutcomeKind.CORRUPT, message=f"{slot} was allocated and never written")
        if total_bytes(segments) < nbytes:
            message = f"{nbytes} stored bytes do not fit {total_bytes(segments)} bytes of segments"
            return Outcome(OutcomeKind.FAILED, message=message)
        failpoints.hit("nvme.read")
        with self._rates.medium.work(nbytes):
            image = self._io.read_image(slab.file.slot_fd, slot.offset, segments, nbytes)
        key, named = None, expect_key
        if codec & SEALED:
            sealed = read_header(image.raw_header)
            if isinstance(sealed, str):
                return Outcome(OutcomeKind.CORRUPT, message=sealed)
            key = self._keys.numbered(key_number(sealed)) if self._keys is not None else None
            if key is None:
                return Outcome(OutcomeKind.UNREADABLE, message="it is encrypted, and its tenant's key is not here")
            named = key.veil(expect_key)
        header = judge_header(image.raw_header, named, slot.nbytes - HEADER_BYTES, slot.generation)
        if isinstance(header, str):
            return Outcome(OutcomeKind.CORRUPT, message=header)
        if header.stored_bytes != nbytes or header.codec != codec:
            message = f"the header says {header.stored_bytes} stored bytes, the record {nbytes}, or another codec"
            return Outcome(OutcomeKind.CORRUPT, message=message)
        if key is not None:
            opened = key.open(header, expect_key, image.payload)
            if isinstance(opened, str):
                return Outcome(OutcomeKind.CORRUPT, message=opened)
            header = opened
        if checksum_of(image.payload, nbytes) != header.stored_checksum:
            return Outcome(OutcomeKind.CORRUPT, message=false_checksum(header))
        image.deliver()
        return Outcome(OutcomeKind.DONE, header, nbytes)
