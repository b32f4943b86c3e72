"""Slot images are written and read by direct I/O, one pwritev or preadv each.

Owns the aligned pages that a direct transfer needs beside the caller's memory: the header, the last partial page of a
payload, and, for memory that is not aligned, a bounce buffer. One set a thread, so nothing of it is shared or locked.
Invariants: what is in a slot behind a payload's last byte, up to the page's end, is zeros; nothing is read beyond the
payload's last page, so bytes of a slot's former block never reach a caller.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES
from kvstore_tiers.image import aligned_down, aligned_up
from kvstore_tiers.segments import AlignedBuffer, Segment, buffer_at, clipped, gather, put_bytes, scatter


class _Pages(threading.local):
    """The pages and buffers through which one thread transfers."""

    def __init__(self) -> None:
        self.header = AlignedBuffer(HEADER_BYTES)
        self.tail = AlignedBuffer(ALIGNMENT_BYTES)
        self.bounce = AlignedBuffer(0)


class ImageRead(NamedTuple):
    """A slot image (header page and payload) that was read but not checked yet, valid until this thread's next
    transfer. `payload` is the memory with the payload; `waiting` are segments of the caller that are still to be
    filled.
    """

    raw_header: bytes
    payload: Sequence[Segment]
    nbytes: int
    waiting: Sequence[Segment]  # the caller's misaligned segments, which got nothing yet

    def deliver(self) -> None:
        """Copy the payload to the caller's segments, unless it was read into them directly."""
        if self.waiting:
            scatter(self.payload[0].address, self.nbytes, self.waiting)


class SlotIO:
    """A reader and writer of slot images by direct I/O, with aligned page buffers for each thread. Any thread may use
    it.
    """

    def __init__(self) -> None:
        self._pages = _Pages()

    def stable(self, segments: Sequence[Segment], nbytes: int) -> Sequence[Segment]:
        """Return `segments`, which contain `nbytes` bytes of payload, if direct I/O accepts their alignment; otherwise
        return an aligned copy of them.
        """
        if _is_aligned(segments):
            return segments
        bounce = self._bounce(nbytes)
        gather(bounce.address, segments)
        return [bounce.segment(nbytes)]

    def scratch(self, nbytes: int) -> Segment:
        """Return aligned memory of this thread of at least `nbytes` bytes, rounded up to whole pages. It is valid until
        the thread's next transfer from or to unaligned memory.
        """
        return self._bounce(nbytes).segment(aligned_up(nbytes))

    def write_image(self, fd: int, offset: int, header: bytes, payload: Sequence[Segment], nbytes: int) -> None:
        """Write a slot image to the file `fd` at `offset`: the `header` page and `nbytes` of `payload`, which `stable`
        returned. Raises OSError.
        """
        pages = self._pages
        put_bytes(pages.header.address, header)
        whole_bytes = aligned_down(nbytes)
        if nbytes > whole_bytes:
            put_bytes(pages.tail.address, bytes(ALIGNMENT_BYTES))
            gather(pages.tail.address, list(_after(payload, whole_bytes)))
        written_bytes = os.pwritev(fd, self._vector(payload, whole_bytes, nbytes), offset)
        _require_whole(written_bytes, HEADER_BYTES + aligned_up(nbytes), "written")

    def read_image(self, fd: int, offset: int, segments: Sequence[Segment], nbytes: int) -> ImageRead:
        """Read a slot image from the file `fd` at `offset`: the header page and `nbytes` bytes of payload. Aligned
        `segments` are filled at once; others are filled by `ImageRead.deliver`. Raises OSError.
        """
        pages = self._pages
        is_direct = _is_aligned(segments)
        payload = list(clipped(segments, nbytes)) if is_direct else [self._bounce(nbytes).segment(nbytes)]
        whole_bytes = aligned_down(nbytes)
        got_bytes = os.preadv(fd, self._vector(payload, whole_bytes, nbytes), offset)
        _require_whole(got_bytes, HEADER_BYTES + aligned_up(nbytes), "read")
        if nbytes > whole_bytes:
            scatter(pages.tail.address, nbytes - whole_bytes, list(_after(payload, whole_bytes)))
        raw_header = buffer_at(pages.header.address, HEADER_BYTES).raw
        return ImageRead(raw_header, payload, nbytes, () if is_direct else segments)

    def _vector(self, payload: Sequence[Segment], whole_bytes: int, nbytes: int) -> list[ctypes.Array[ctypes.c_char]]:
        vector = [buffer_at(self._pages.header.address, HEADER_BYTES)]
        vector += [buffer_at(segment.address, segment.nbytes) for segment in clipped(payload, whole_bytes)]
        if nbytes > whole_bytes:
            vector.append(buffer_at(self._pages.tail.address, ALIGNMENT_BYTES))
        return vector

    def _bounce(self, nbytes: int) -> AlignedBuffer:
        pages = self._pages
        if pages.bounce.nbytes < nbytes:
            pages.bounce = AlignedBuffer(aligned_up(nbytes))
        return pages.bounce


def _is_aligned(segments: Sequence[Segment]) -> bool:
    """Return whether direct I/O takes these segments; the last may end anywhere, its tail is copied through a page of
    ours."""
    if len(segments) > 1000:  # IOV_MAX is 1024
        return False
    addresses_fit = all(segment.address % ALIGNMENT_BYTES == 0 for segment in segments)
    return addresses_fit and all(segment.nbytes % ALIGNMENT_BYTES == 0 for segment in segments[:-1])


def _after(segments: Iterable[Segment], skip_bytes: int) -> Iterable[Segment]:
    """Return a scatter list without its first `skip_bytes`."""
    for segment in segments:
        if skip_bytes < segment.nbytes:
            yield segment.part(skip_bytes, segment.nbytes - skip_bytes)
        skip_bytes = max(0, skip_bytes - segment.nbytes)


def _require_whole(moved_bytes: int, wanted_bytes: int, verb: str) -> None:
    if moved_bytes != wanted_bytes:
        raise OSError(errno.EIO, f"{moved_bytes} of {wanted_bytes} bytes {verb}")
