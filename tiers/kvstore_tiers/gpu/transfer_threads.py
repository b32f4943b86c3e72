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
    """The bounce buffer of a GPU tier: `nbytes` bytes of host memory that this process and the GPU worker both map.
    Copies from and to memory that the worker does not know pass through it.
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
        """Wait for a free range of `nbytes` bytes in the buffer, and return its offset. Raises ValueError if the buffer
        is smaller, OSError once it is closed.
        """
        if aligned_up(nbytes) > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit a bounce buffer of {self.nbytes}")
        return self._parts.take(nbytes)[0]

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free the range of `nbytes` bytes at `offset`, which `take` returned."""
        self._parts.give_back((offset, aligned_up(nbytes)))

    def close(self) -> None:
        os.close(self.descriptor)


_LOG = logging.getLogger(__name__)


class WrittenBlock(NamedTuple):
    """The facts by which a block on the device is verified: key, payload bytes, payload checksum, and the xxh3_64 of
    its header page.
    """

    key: bytes
    payload_bytes: int
    checksum: int
    page_digest: int  # of the header page

    @classmethod
    def of(cls, header: BlockHeader, page: bytes) -> WrittenBlock:
        return cls(header.key, header.payload_bytes, header.checksum, xxhash.xxh3_64_intdigest(page))


def block_in(slot: Slot, shadow: Segment, expect_key: bytes) -> tuple[BlockHeader, bytes] | Outcome:
    """Return the header and the header page of the block `expect_key` that was written to `slot`, read from `shadow`,
    the slot's header page in DRAM. Return a CORRUPT outcome if no such block is there.
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
    """Let the device compute the checksums of the header page and the payload in `slot`, and compare them with
    `written`. `pages` are further slots, each with the checksum that its header page must have. `checked` gets DONE,
    CORRUPT or FAILED, and must return quickly. `waits` is explained at `GpuWorkerLink.transfer`.
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
    """Return the outcome for a block that arrived wrong in `slot`: CORRUPT if the source bytes `payload` do not match
    `written` themselves, FAILED if they were changed on the way.
    """
    if checksum_of(payload, written.payload_bytes) != written.checksum:
        return Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
    message = f"other bytes arrived in {slot} on the device than were sent"
    _LOG.error("%s: block %s", message, written.key.hex())
    return Outcome(OutcomeKind.FAILED, message=message)


class TransferThreads:
    """The threads of a GPU tier's transfers and their bounce buffer of `bounce_bytes` bytes. `threads` threads start
    transfers, and as many others end them; their names start with `name`.
    """

    def __init__(self, bounce_bytes: int, threads: int, name: str) -> None:
        self.bounce = Bounce(bounce_bytes)
        self._beginnings = ResidentThreads(f"{name}-start", threads)
        self._ends = ResidentThreads(f"{name}-end", threads)
        self._under_way = UnderWay()

    def expect(self, counted: Callable[[Outcome], Outcome], done: Completion) -> Completion:
        """Count one transfer as under way, and return the function that the transfer must call at its end in place of
        `done`. `done` then gets the result of `counted(outcome)`.
        """
        return self._under_way.begin(lambda outcome: done(counted(outcome)))

    def begin(self, job: Callable[[], None], end: Completion) -> None:
        """Run `job`, which starts a transfer, on one of the threads for starts. The job makes sure that the transfer
        ends; if it raises, `end` gets FAILED.
        """
        self._beginnings.begin(job, end)

    def finish(self, job: Callable[[], None]) -> bool:
        """Run `job`, which must not raise, on one of the threads for ends. Return False, without running it, after
        `close`.
        """
        return self._ends.post(job)

    def close(self) -> None:
        """Wait for the transfers under way, then end the threads. The bounce buffer (host memory for copies) stays
        open.
        """
        self._beginnings.close()
        self._under_way.wait()
        self._ends.close()
