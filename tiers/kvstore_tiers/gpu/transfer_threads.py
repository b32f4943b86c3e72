"""Common parts of the GPU tier's transfers: threads that begin them and threads that end them, the bounce buffer
between this process and the worker, and the check of bytes written to the device.

The module owns the threads, the buffer and the count of transfers under way. `begin` jobs wait for room in the bounce
buffer, so they are not on the threads that give it back. Engines of the tenant may import device memory, and read it
without this process: if the worker can, it checksums the copied bytes there before the write is reported. Invariants:
each transfer is counted and delivered once; ranges of the buffer that are taken do not overlap.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Segment, Slot
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.link import GpuWorkerLink
from kvstore_tiers.image import aligned_up, judge_header
from kvstore_tiers.range_allocator import RangeAllocator
from kvstore_tiers.segments import buffer_at, checksum_of
from kvstore_tiers.threads import ResidentThreads, UnderWay


class Bounce:
    """The bounce buffer: host memory of `nbytes`, which this process and the worker map and the device copies from and
    to, on behalf of memory that it does not know.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("kvstore-bounce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.descriptor, 0o600)
        os.ftruncate(self.descriptor, nbytes)
        self._mapping = mmap.mmap(self.descriptor, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._parts = RangeAllocator(0, nbytes)

    def take(self, nbytes: int) -> int:
        """Wait for a free range, and return its offset. Raises ValueError for one that can never be free."""
        if aligned_up(nbytes) > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit a bounce buffer of {self.nbytes}")
        return self._parts.take(nbytes)[0]

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free a range again."""
        self._parts.give_back((offset, aligned_up(nbytes)))

    def close(self) -> None:
        os.close(self.descriptor)


_LOG = logging.getLogger(__name__)


class WrittenBlock(NamedTuple):
    """A block as it was written to a slot, whole."""

    key: bytes
    payload_bytes: int
    checksum: int
    page_digest: int  # of the header page

    @classmethod
    def of(cls, header: BlockHeader, page: bytes) -> WrittenBlock:
        return cls(header.key, header.payload_bytes, header.checksum, xxhash.xxh3_64_intdigest(page))


def block_in(slot: Slot, shadow: Segment, expect_key: bytes) -> tuple[BlockHeader, bytes] | Outcome:
    """Return the header of the block that was written to a slot whole, and its page; CORRUPT if there was no such
    block.
    """
    page = buffer_at(shadow.address, HEADER_BYTES).raw
    header = judge_header(page, expect_key, slot.nbytes - HEADER_BYTES, slot.generation)
    if isinstance(header, str):
        return Outcome(OutcomeKind.CORRUPT, message=f"no such block was written to {slot}: {header}")
    return header, page


def check(
    link: GpuWorkerLink, slot: Slot, written: WrittenBlock, checked: Completion,
    *, pages: Sequence[tuple[Slot, int]] = (), waits: bool = True,
) -> None:  # fmt: skip
    """Check a slot on the device; `checked` is called on a thread of the link's and must be quick. `pages`: other slots
    whose header pages must have these digests, too. `waits`: see `GpuWorkerLink.checksums`.
    """

    def summed(end: wire.End) -> None:
        if end.failure:
            outcome = Outcome(OutcomeKind.FAILED, message=end.failure)
        elif end.sums[0] != written.page_digest:
            outcome = Outcome(OutcomeKind.CORRUPT, message="the header is not the one that was written")
        elif end.sums[1] != written.checksum:
            outcome = Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
        elif any(found != digest for found, (_, digest) in zip(end.sums[2:], pages, strict=True)):
            outcome = Outcome(OutcomeKind.CORRUPT, message="another header is not the one that was written")
        else:
            outcome = Outcome(OutcomeKind.DONE)
        checked(outcome)

    payload = slot.offset + HEADER_BYTES
    places = [(slot.container, slot.offset, HEADER_BYTES), (slot.container, payload, written.payload_bytes)]
    places += [(other.container, other.offset, HEADER_BYTES) for other, _ in pages]
    link.checksums(places, summed, waits=waits)


def blamed(slot: Slot, payload: Sequence[Segment], written: WrittenBlock) -> Outcome:
    """Return why the device has wrong bytes: the source was damaged, or the way is."""
    if checksum_of(payload, written.payload_bytes) != written.checksum:
        return Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
    message = f"other bytes arrived in {slot} on the device than were sent"
    _LOG.error("%s: block %s", message, written.key.hex())
    return Outcome(OutcomeKind.FAILED, message=message)


class TransferThreads:
    """The threads of the transfers: `threads` that begin transfers and as many that end them; their names start with
    `name`.
    """

    def __init__(self, bounce_bytes: int, threads: int, name: str) -> None:
        self.bounce = Bounce(bounce_bytes)
        self._beginnings = ResidentThreads(f"{name}-start", threads)
        self._ends = ResidentThreads(f"{name}-end", threads)
        self._under_way = UnderWay()

    def expect(self, counted: Callable[[Outcome], Outcome], done: Completion) -> Completion:
        """Return the function to call at a new transfer's end in place of `done`, which gets the result of
        `counted`.
        """
        return self._under_way.begin(lambda outcome: done(counted(outcome)))

    def begin(self, job: Callable[[], None], end: Completion) -> None:
        """Run `job`, which ends the transfer by itself unless it raises."""
        self._beginnings.begin(job, end)

    def finish(self, job: Callable[[], None]) -> bool:
        """Run `job`, which must not raise. Return False after `close`, which cannot be while a transfer has not
        ended.
        """
        return self._ends.post(job)

    def close(self) -> None:
        """Finish the transfers under way, then end the threads. The link shares the buffer, which is closed after
        it.
        """
        self._beginnings.close()
        self._under_way.wait()
        self._ends.close()
