"""The steps of a transfer of the GPU tier, before the worker copies and after it did.

The slots' shadows (`chunks`) say which were written whole: a header page is put there when the copies have ended, and
the device has checked them if it can (`steps.check`). An engine could also write to device memory: a header that comes
back is believed only if it is the one that was written, and with it the payload's checksum. A block that goes from slot
to slot is copied unchanged on the device, so that neighbours are one run. Then the target's own header page comes by
the bounce buffer, since it names another generation: no byte of the payload is in host memory. That is not used if the
device computes no checksums: nothing here could verify the payload. Invariant: a range of the bounce buffer is given
back once, when the copies that use it have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Segment, Slot
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.link import GpuWorkerLink
from kvstore_tiers.gpu.regions import RegionPart, Regions
from kvstore_tiers.gpu.transfer_threads import TransferThreads, WrittenBlock, blamed, block_in, check
from kvstore_tiers.image import aligned_up, erase_header
from kvstore_tiers.segments import (
    AlignedBuffer,
    buffer_at,
    checksum_at,
    checksum_of,
    clipped,
    gather_and_checksum,
    put_bytes,
    scatter,
    total_bytes,
)
from kvstore_tiers.threads import run_transfer


class GpuTransfers:
    """A maker of the writes, reads and checks of a GPU tier's slots. The worker behind `link` does them, and `counters`
    counts them. `regions` lists the host memory that the device can copy directly.
    """

    def __init__(
        self, link: GpuWorkerLink, steps: TransferThreads, counters: TransferCounters, regions: Regions
    ) -> None:
        self._link = link
        self._counters = counters
        self._steps = steps
        self._bounce = steps.bounce
        self._regions = regions

    # Writing

    def write(
        self, slot: Slot, shadow: Segment, header: BlockHeader, segments: Sequence[Segment], done: Completion
    ) -> None:
        erase_header(shadow.address)  # until the copies have ended
        end = self._steps.expect(self._counters.wrote, done)
        self._steps.begin(lambda: self._store(slot, shadow, header, segments, end), end)

    def _store(
        self, slot: Slot, shadow: Segment, header: BlockHeader, segments: Sequence[Segment], end: Completion,
        *, in_place: bool = True,
    ) -> None:  # fmt: skip
        places = self._regions.locate(segments, to_write=False) if in_place and header.checksum else None
        is_direct = places is not None and len(places) < wire.MAX_PIECES
        bounced_bytes = HEADER_BYTES + (0 if is_direct else header.payload_bytes)
        offset = self._bounce.take(bounced_bytes)
        try:
            address = self._bounce.address + offset
            checksum = header.checksum
            if not is_direct:
                hashed = 0 if header.checksum else header.payload_bytes
                found = gather_and_checksum(address + HEADER_BYTES, segments, hashed)
                checksum = header.checksum or found
            stamped = header.stamped(slot.generation, checksum)
            page = stamped.pack()
            put_bytes(address, page)
            pieces = [wire.RegionPiece(slot.container, slot.offset, wire.BOUNCE_REGION, offset, bounced_bytes)]
            if is_direct and places is not None:
                pieces += _pieces(slot, places)
        except BaseException:
            self._bounce.give_back(offset, bounced_bytes)
            raise

        written = WrittenBlock.of(stamped, page)
        payload = segments if is_direct else [Segment(address + HEADER_BYTES, header.payload_bytes)]

        def finish(outcome: Outcome) -> None:
            if outcome.kind is OutcomeKind.CORRUPT:
                outcome = run_transfer(lambda: blamed(slot, payload, written))
            self._bounce.give_back(offset, bounced_bytes)
            if outcome.ok:
                put_bytes(shadow.address, page)
                outcome = Outcome(OutcomeKind.DONE, stamped, header.payload_bytes)
            end(outcome)

        def copied(failure: str) -> None:
            if failure == wire.UNREGISTERED and is_direct:  # another worker has not registered it yet
                self._bounce.give_back(offset, bounced_bytes)
                self._steps.begin(lambda: self._store(slot, shadow, header, segments, end, in_place=False), end)
            elif failure:
                finish(Outcome(OutcomeKind.FAILED, message=failure))
            elif self._link.can_check:
                check(self._link, slot, written, finish)
            else:
                finish(Outcome(OutcomeKind.DONE))

        self._link.transfer(wire.WRITE, pieces, copied)

    # Reading

    def read(
        self, slot: Slot, shadow: Segment, expect_key: bytes, segments: Sequence[Segment], done: Completion
    ) -> None:
        end = self._steps.expect(self._counters.read, done)
        found = block_in(slot, shadow, expect_key)
        if isinstance(found, Outcome):
            end(found)
            return
        header, written = found
        if total_bytes(segments) < header.payload_bytes:
            end(Outcome(OutcomeKind.FAILED, message=f"{header.payload_bytes} payload bytes do not fit the destination"))
            return
        own = list(clipped(segments, header.payload_bytes))
        self._steps.begin(lambda: self._fetch(slot, own, header, written, end), end)

    def _fetch(
        self, slot: Slot, segments: Sequence[Segment], header: BlockHeader, written: bytes, end: Completion,
        *, in_place: bool = True,
    ) -> None:  # fmt: skip
        payload_bytes = header.payload_bytes
        places = self._regions.locate(segments, to_write=True) if in_place else None
        is_direct = places is not None and len(places) < wire.MAX_PIECES
        bounced_bytes = HEADER_BYTES + (0 if is_direct else payload_bytes)
        offset = self._bounce.take(bounced_bytes)
        pieces = [wire.RegionPiece(slot.container, slot.offset, wire.BOUNCE_REGION, offset, bounced_bytes)]
        if is_direct and places is not None:
            pieces += _pieces(slot, places)

        def verify() -> Outcome:
            address = self._bounce.address + offset
            if buffer_at(address, HEADER_BYTES).raw != written:
                return Outcome(OutcomeKind.CORRUPT, message="the header is not the one that was written")
            payload = address + HEADER_BYTES
            found = checksum_of(segments, payload_bytes) if is_direct else checksum_at(payload, payload_bytes)
            if found != header.checksum:
                return Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
            if not is_direct:
                scatter(payload, payload_bytes, segments)
            return Outcome(OutcomeKind.DONE, header, payload_bytes)

        def finish() -> None:
            outcome = run_transfer(verify)
            self._bounce.give_back(offset, bounced_bytes)
            end(outcome)

        def copied(failure: str) -> None:
            if failure:
                self._bounce.give_back(offset, bounced_bytes)
            if failure == wire.UNREGISTERED and is_direct:
                self._steps.begin(lambda: self._fetch(slot, segments, header, written, end, in_place=False), end)
            elif failure:
                end(Outcome(OutcomeKind.FAILED, message=failure))
            else:
                self._steps.finish(finish)

        self._link.transfer(wire.READ, pieces, copied)

    # Between slots

    def relocate(
        self, source: Slot, source_shadow: Segment, target: Slot, shadow: Segment, expect_key: bytes, done: Completion
    ) -> None:
        """Copy the block with the key `expect_key` on the device from the slot `source` to the slot `target`, as
        `Tier.relocate` describes. `source_shadow` and `shadow` are the two slots' header pages in DRAM.
        """
        erase_header(shadow.address)  # until the block was verified
        end = self._steps.expect(self._counters.wrote, done)
        found = block_in(source, source_shadow, expect_key)
        if isinstance(found, Outcome):
            end(found)
            return
        header, page = found
        if HEADER_BYTES + header.payload_bytes > target.nbytes:
            end(Outcome(OutcomeKind.FAILED, message=f"{header.payload_bytes} payload bytes do not fit {target}"))
            return
        own = header.stamped(target.generation, header.checksum)
        move = _Move(
            self._link, self._steps, source, WrittenBlock.of(header, page), target, shadow, own, own.pack(), end
        )
        self._steps.begin(move.begin, end)

    # Checking

    def verify(self, slot: Slot, shadow: Segment, expect_key: bytes, done: Completion) -> None:
        """Check that `slot` still contains the block with the key `expect_key`; `shadow` is the slot's header page in
        DRAM. `done` gets DONE, CORRUPT, or FAILED if that cannot be known. If the device cannot compute checksums, the
        block is read, which counts as a read.
        """
        found = block_in(slot, shadow, expect_key)
        if isinstance(found, Outcome):
            done(found)
            return
        header, page = found
        if self._link.can_check:
            check(self._link, slot, WrittenBlock.of(header, page), self._steps.expect(lambda outcome: outcome, done))
        else:
            whole = AlignedBuffer(header.payload_bytes).segment(header.payload_bytes)
            self.read(slot, shadow, expect_key, [whole], done)

    # For a start

    def header_pages(self, slots: Sequence[Slot]) -> list[bytes]:
        """Read the header page at the beginning of each of `slots` from the device, and return their bytes. It waits
        for the device, and is meant for the start of a tier, when no other transfer is under way. Raises OSError.
        """
        pages: list[bytes] = []
        batch = min(wire.MAX_PIECES, self._bounce.nbytes // HEADER_BYTES)
        for first in range(0, len(slots), batch):
            part = slots[first : first + batch]
            nbytes = len(part) * HEADER_BYTES
            offset = self._bounce.take(nbytes)
            try:
                pieces = [
                    wire.RegionPiece(
                        slot.container, slot.offset, wire.BOUNCE_REGION, offset + at * HEADER_BYTES, HEADER_BYTES
                    )
                    for at, slot in enumerate(part)
                ]
                copied: Future[str] = Future()
                self._link.transfer(wire.READ, pieces, copied.set_result)
                if failure := copied.result():
                    raise OSError(failure)
                raw = buffer_at(self._bounce.address + offset, nbytes).raw
                pages += [raw[at : at + HEADER_BYTES] for at in range(0, nbytes, HEADER_BYTES)]
            finally:
                self._bounce.give_back(offset, nbytes)
        return pages


def _pieces(slot: Slot, places: Sequence[RegionPart]) -> list[wire.RegionPiece]:
    """Return the payload of a slot, piece by piece, and the place of each in host memory."""
    pieces: list[wire.RegionPiece] = []
    at = slot.offset + HEADER_BYTES
    for place in places:
        pieces.append(wire.RegionPiece(slot.container, at, place.region, place.offset, place.nbytes))
        at += place.nbytes
    return pieces


_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Move:
    """One relocation; each step begins the next. `header` and `page` are the target's."""

    link: GpuWorkerLink
    steps: TransferThreads
    source: Slot
    written: WrittenBlock
    target: Slot
    shadow: Segment
    header: BlockHeader
    page: bytes
    end: Completion
    offset: int = -1  # of the page in the bounce buffer

    def begin(self) -> None:
        source, target = self.source, self.target
        image_bytes = aligned_up(HEADER_BYTES + self.header.payload_bytes)
        move = wire.ChunkMove(source.container, source.offset, target.container, target.offset, image_bytes)
        self.offset = self.steps.bounce.take(HEADER_BYTES)
        put_bytes(self.steps.bounce.address + self.offset, self.page)
        self.link.transfer(wire.MOVE, [move], self._stamp)

    def _stamp(self, failure: str) -> None:
        if failure:
            self._copied(failure)
            return
        page = wire.RegionPiece(
            self.target.container, self.target.offset, wire.BOUNCE_REGION, self.offset, HEADER_BYTES
        )
        self.link.transfer(wire.WRITE, [page], self._copied)

    def _copied(self, failure: str) -> None:
        self.steps.bounce.give_back(self.offset, HEADER_BYTES)
        if failure:
            self.end(Outcome(OutcomeKind.FAILED, message=failure))
            return
        source_page = self.source, self.written.page_digest
        check(self.link, self.target, WrittenBlock.of(self.header, self.page), self._checked, pages=[source_page])

    def _checked(self, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.CORRUPT:
            check(self.link, self.source, self.written, self._blamed)
        elif outcome.ok:
            put_bytes(self.shadow.address, self.page)
            self.end(Outcome(OutcomeKind.DONE, self.header, self.header.payload_bytes))
        else:
            self.end(outcome)

    def _blamed(self, source: Outcome) -> None:
        """End the transfer by the part at fault: the source was damaged, or the way is."""
        if source.ok:
            message = f"other bytes arrived in {self.target} on the device than are in {self.source}"
            _LOG.error("%s: block %s", message, self.written.key.hex())
            source = Outcome(OutcomeKind.FAILED, message=message)
        self.end(source)
