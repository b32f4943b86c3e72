"""The steps of a transfer of the GPU tier, before the worker copies and after it did.

Owns the threads that gather and verify, the bounce buffer, the host memory shared with the worker, and which slots were
written whole. `starts` wait for room in the bounce buffer, so they are not the threads that give it back.
Engines of the tenant may import device memory, and read it without this process: where the worker can, it checksums
what a copy has written there before the write is reported. They could also write there: a header that comes back is
believed only if it is the one that was written, and with it the payload's checksum.
Invariants: a range of the bounce buffer is given back once, when the copies that use it have ended; each transfer is
counted and delivered once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

import xxhash

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Segment, Slot
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.bounce import Bounce
from kvstore_tiers.gpu.link import WorkerLink
from kvstore_tiers.gpu.regions import Place, Regions
from kvstore_tiers.image import judge_header
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
from kvstore_tiers.threads import ResidentThreads, deliver, run_transfer

BOUNCE_REGION = 0
_LOG = logging.getLogger(__name__)


class _Written(NamedTuple):
    """What was written to a slot whole."""

    key: bytes
    payload_bytes: int
    checksum: int
    page_digest: int  # of the header page


class GpuTransfers:
    """Transfers over `link` by `threads` threads that start them and as many that end them."""

    def __init__(
        self, link: WorkerLink, bounce_bytes: int, threads: int, counters: TransferCounters, name: str
    ) -> None:
        self._link = link
        self._counters = counters
        self._bounce = Bounce(bounce_bytes)
        self._regions = Regions()
        self._region_numbers = count(BOUNCE_REGION + 1)
        self._written: dict[Slot, _Written] = {}
        self._starts = ResidentThreads(f"{name}-start", threads)
        self._ends = ResidentThreads(f"{name}-end", threads)
        self._under_way = 0
        self._quiet = threading.Condition()
        link.add_region(BOUNCE_REGION, self._bounce.descriptor, bounce_bytes)

    def share(self, descriptor: int, address: int, nbytes: int) -> int:
        number = next(self._region_numbers)
        self._link.add_region(number, descriptor, nbytes)
        self._regions.add(number, address, nbytes)
        return number

    def unshare(self, number: int) -> None:
        self._regions.drop(number)
        self._link.drop_region(number)

    def forget(self, slot: Slot) -> None:
        """The slot holds no block any more."""
        self._written.pop(slot, None)

    # Writing

    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        end = self._begin(self._counters.wrote, done)
        self._start(lambda: self._store(slot, header, segments, end), end)

    def _store(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], end: Completion) -> None:
        places = self._regions.locate(segments) if header.checksum else None
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
            pieces = [wire.Piece(slot.container, slot.offset, BOUNCE_REGION, offset, bounced_bytes)]
            if is_direct and places is not None:
                pieces += _pieces(slot, places)
        except BaseException:
            self._bounce.give_back(offset, bounced_bytes)
            raise

        written = _Written(header.key, header.payload_bytes, checksum, xxhash.xxh3_64_intdigest(page))
        payload = segments if is_direct else [Segment(address + HEADER_BYTES, header.payload_bytes)]

        def finish(outcome: Outcome) -> None:
            if outcome.kind is OutcomeKind.CORRUPT:
                outcome = run_transfer(lambda: _blamed(slot, payload, written))
            self._bounce.give_back(offset, bounced_bytes)
            if outcome.ok:
                self._written[slot] = written
                outcome = Outcome(OutcomeKind.DONE, stamped, header.payload_bytes)
            end(outcome)

        def copied(failure: str) -> None:
            if failure:
                finish(Outcome(OutcomeKind.FAILED, message=failure))
            elif self._link.can_check:
                self._check(slot, written, finish)
            else:
                finish(Outcome(OutcomeKind.DONE))

        self._link.transfer(wire.WRITE, pieces, copied)

    # Reading

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        end = self._begin(self._counters.read, done)
        written = self._written.get(slot)
        if written is None:
            end(_nothing_in(slot))
        elif total_bytes(segments) < written.payload_bytes:
            message = f"{written.payload_bytes} payload bytes do not fit the destination"
            end(Outcome(OutcomeKind.FAILED, message=message))
        else:
            own = list(clipped(segments, written.payload_bytes))
            self._start(lambda: self._fetch(slot, expect_key, own, written, end), end)

    def _fetch(
        self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], written: _Written, end: Completion
    ) -> None:
        payload_bytes = written.payload_bytes
        places = self._regions.locate(segments)
        is_direct = places is not None and len(places) < wire.MAX_PIECES
        bounced_bytes = HEADER_BYTES + (0 if is_direct else payload_bytes)
        offset = self._bounce.take(bounced_bytes)
        pieces = [wire.Piece(slot.container, slot.offset, BOUNCE_REGION, offset, bounced_bytes)]
        if is_direct and places is not None:
            pieces += _pieces(slot, places)

        def verify() -> Outcome:
            address = self._bounce.address + offset
            page = buffer_at(address, HEADER_BYTES).raw
            header = judge_header(page, expect_key, slot.nbytes - HEADER_BYTES, slot.generation)
            if isinstance(header, str):
                return Outcome(OutcomeKind.CORRUPT, message=header)
            if header.payload_bytes != payload_bytes or xxhash.xxh3_64_intdigest(page) != written.page_digest:
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
                end(Outcome(OutcomeKind.FAILED, message=failure))
            else:
                self._ends.post(finish)  # open until nothing is under way

        self._link.transfer(wire.READ, pieces, copied)

    # Checking

    def verify(self, slot: Slot, expect_key: bytes, done: Completion) -> None:
        """Whether the slot still holds the block as it was written: DONE or CORRUPT; FAILED where that cannot be said.
        On the device where the worker can, else by reading the block. Counts as no transfer where nothing is moved."""
        written = self._written.get(slot)
        if written is None:
            done(_nothing_in(slot))
        elif written.key != expect_key:
            done(Outcome(OutcomeKind.CORRUPT, message=f"{slot} holds another block"))
        elif self._link.can_check:
            self._check(slot, written, self._begin(lambda outcome: outcome, done))
        else:
            self.read(slot, expect_key, [AlignedBuffer(written.payload_bytes).segment(written.payload_bytes)], done)

    def _check(self, slot: Slot, written: _Written, checked: Completion) -> None:
        """`checked` is called on a thread of the link's, which is soon done with it."""

        def summed(failure: str, sums: Sequence[int]) -> None:
            if failure:
                outcome = Outcome(OutcomeKind.FAILED, message=failure)
            elif sums[0] != written.page_digest:
                outcome = Outcome(OutcomeKind.CORRUPT, message="the header is not the one that was written")
            elif sums[1] != written.checksum:
                outcome = Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
            else:
                outcome = Outcome(OutcomeKind.DONE)
            checked(outcome)

        payload = slot.offset + HEADER_BYTES
        places = [(slot.container, slot.offset, HEADER_BYTES), (slot.container, payload, written.payload_bytes)]
        self._link.checksums(places, summed)

    # Their ends

    def _begin(self, counted: Callable[[Outcome], Outcome], done: Completion) -> Completion:
        with self._quiet:
            self._under_way += 1

        def end(outcome: Outcome) -> None:
            deliver(counted(outcome), done)
            with self._quiet:
                self._under_way -= 1
                self._quiet.notify_all()

        return end

    def _start(self, job: Callable[[], None], end: Completion) -> None:
        """Run `job`, which ends the transfer by itself unless it raises."""

        def run() -> None:
            def attempt() -> Outcome:
                job()
                return Outcome(OutcomeKind.DONE)

            outcome = run_transfer(attempt)
            if not outcome.ok:
                end(outcome)

        if not self._starts.post(run):
            end(Outcome(OutcomeKind.CANCELLED, message="the tier is closed"))

    def close(self) -> None:
        """Finish what is under way, then end the threads and the worker."""
        self._starts.close()
        with self._quiet:
            self._quiet.wait_for(lambda: not self._under_way)
        self._ends.close()
        self._link.close()
        self._bounce.close()
        self._written.clear()


def _pieces(slot: Slot, places: Sequence[Place]) -> list[wire.Piece]:
    """The payload of a slot, piece by piece, and where each is in host memory."""
    pieces: list[wire.Piece] = []
    at = slot.offset + HEADER_BYTES
    for place in places:
        pieces.append(wire.Piece(slot.container, at, place.region, place.offset, place.nbytes))
        at += place.nbytes
    return pieces


def _nothing_in(slot: Slot) -> Outcome:
    return Outcome(OutcomeKind.CORRUPT, message=f"no block was written to {slot}")


def _blamed(slot: Slot, payload: Sequence[Segment], written: _Written) -> Outcome:
    """Why the device has other bytes than were to be written: the source was damaged, or the way is."""
    if checksum_of(payload, written.payload_bytes) != written.checksum:
        return Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
    message = f"other bytes arrived in {slot} on the device than were sent"
    _LOG.error("%s: block %s", message, written.key.hex())
    return Outcome(OutcomeKind.FAILED, message=message)
