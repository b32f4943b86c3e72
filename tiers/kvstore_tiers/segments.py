"""Memory that a transfer reads or fills, named by address.

The module owns the `Segment` record and the few operations on raw addresses that every host-memory tier shares: copy,
view, checksum. It does not allocate payload memory and never follows an address that is not SYSTEM. Invariants: every
copy and checksum of payload here releases the GIL (ctypes.memmove is a foreign call; python-xxhash releases it above
100 KiB, and hashes less in microseconds), because a copy that holds it stalls the control thread for milliseconds.
Headers are copied with the GIL held: that takes a tenth of a microsecond, and getting the GIL back from a busy thread
up to a switch interval.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_cuda.host_copies import HASHED_MIN_BYTES, native
from kvstore_proto.arena import ALIGNMENT_BYTES

Bytes = npt.NDArray[np.uint8]
PIECE_BYTES = 512 * 1024  # half of a server core's second-level cache, or less
SMALL_BYTES = 16384  # copied in about the time of a hand-over of the GIL between idle threads

_small_memmove = ctypes.PyDLL(None).memmove  # a PyDLL's calls keep the GIL
_small_memmove.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
_small_memmove.restype = None


class MemoryKind(Enum):
    """The kind of memory that an address belongs to: DRAM of this process, device memory, or a file."""

    SYSTEM = "system"  # an address in this process
    DEVICE = "device"  # memory, but no address in this process: reached by reads and writes alone
    FILE = "file"  # no address: reached by reads and writes alone


class Segment(NamedTuple):
    """A piece of memory, `nbytes` bytes at `address`, that a transfer reads or fills. `owner` is an object that keeps
    the memory alive. If the memory is a slot, `generation` is the slot's, which is written into the header of an image
    that is stored there. If clients can write the memory, `vouched` is the only header that is believed there, without
    the zeros at its end.
    """

    address: int
    nbytes: int
    memory: MemoryKind = MemoryKind.SYSTEM
    owner: object = None
    generation: int = 0
    vouched: bytes | None = None

    def part(self, offset: int, nbytes: int) -> Segment:
        """Return the piece of `nbytes` bytes that begins `offset` bytes behind the start of this segment. Raises
        ValueError if it is not within the segment.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} are outside a segment of {self.nbytes}")
        return Segment(self.address + offset, nbytes, self.memory, self.owner, self.generation)


class AlignedBuffer:
    """Zeroed memory of `nbytes` bytes that begins at a page. It is freed when this object and all its segments are
    gone.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._mapping = mmap.mmap(-1, max(nbytes, ALIGNMENT_BYTES))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def segment(self, nbytes: int) -> Segment:
        return Segment(self.address, nbytes, owner=self)


def segment_of(array: Bytes) -> Segment:
    """Return a segment over the memory of the contiguous uint8 `array`, which it keeps alive. Raises ValueError if the
    array is not contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError("a segment needs contiguous memory")
    return Segment(array.ctypes.data, array.nbytes, owner=array)


def total_bytes(segments: Sequence[Segment]) -> int:
    return sum(segment.nbytes for segment in segments)


def buffer_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return a writable ctypes buffer over the `nbytes` bytes at `address`. The caller keeps that memory alive."""
    return (ctypes.c_char * nbytes).from_address(address)


def view_at(address: int, nbytes: int) -> Bytes:
    """Return a writable array uint8[nbytes] over the memory at `address`. The caller keeps that memory alive."""
    return np.frombuffer(memoryview(buffer_at(address, nbytes)).cast("B"), dtype=np.uint8)


def checksum_at(address: int, nbytes: int) -> int:
    """Return the 64-bit xxh3 checksum of the `nbytes` bytes at `address`."""
    return xxhash.xxh3_64_intdigest(buffer_at(address, nbytes))


def checksum_of(segments: Sequence[Segment], nbytes: int) -> int:
    """Return the 64-bit xxh3 checksum of the first `nbytes` bytes of `segments`, read one after another."""
    if len(segments) == 1:
        return checksum_at(segments[0].address, nbytes)
    digest = xxhash.xxh3_64()
    for segment in clipped(segments, nbytes):
        digest.update(buffer_at(segment.address, segment.nbytes))
    return digest.intdigest()


def clipped(segments: Sequence[Segment], nbytes: int) -> Iterator[Segment]:
    """Yield the leading `segments` that together have `nbytes` bytes; the last of them is shortened to end there."""
    left = nbytes
    for segment in segments:
        if left <= 0:
            return
        yield segment if segment.nbytes <= left else segment.part(0, left)
        left -= segment.nbytes


def gather(destination: int, segments: Sequence[Segment]) -> None:
    """Copy the bytes of all `segments`, one after another, to the address `destination`."""
    for segment in segments:
        ctypes.memmove(destination, segment.address, segment.nbytes)
        destination += segment.nbytes


def gather_and_checksum(destination: int, segments: Sequence[Segment], nbytes: int) -> int:
    """Copy the bytes of all `segments`, one after another, to the address `destination`. Return the 64-bit xxh3
    checksum of the first `nbytes` bytes there. Compiled code copies and hashes in one pass; without it, copy and
    checksum alternate in pieces of 512 KiB, which stay in the processor's cache.
    """
    if len(segments) == 1 and HASHED_MIN_BYTES <= nbytes == segments[0].nbytes:
        library = native.get()
        if library is not None:
            found: int = library.kv_copy_and_hash(destination, segments[0].address, nbytes)
            return found
    digest = xxhash.xxh3_64()
    for segment in segments:
        for offset in range(0, segment.nbytes, PIECE_BYTES):
            length = min(PIECE_BYTES, segment.nbytes - offset)
            ctypes.memmove(destination, segment.address + offset, length)
            if nbytes:
                hashed = min(length, nbytes)
                digest.update(buffer_at(destination, hashed))
                nbytes -= hashed
            destination += length
    return digest.intdigest()


def scatter(source: int, nbytes: int, segments: Sequence[Segment]) -> None:
    """Copy `nbytes` bytes from the address `source` into `segments`, filling one after another. The segments must have
    at least `nbytes` bytes together.
    """
    for segment in clipped(segments, nbytes):
        ctypes.memmove(segment.address, source, segment.nbytes)
        source += segment.nbytes


def scatter_and_checksum(source: int, nbytes: int, segments: Sequence[Segment]) -> int:
    """Copy `nbytes` bytes as `scatter` does. Return the 64-bit xxh3 checksum of what was written."""
    if segments and segments[0].nbytes >= nbytes:
        return gather_and_checksum(segments[0].address, [Segment(source, nbytes)], nbytes)
    scatter(source, nbytes, segments)
    return checksum_of(segments, nbytes)


def put_bytes(address: int, data: bytes) -> None:
    """Write `data` to the memory at `address`."""
    copy = _small_memmove if len(data) <= SMALL_BYTES else ctypes.memmove
    copy(address, data, len(data))
