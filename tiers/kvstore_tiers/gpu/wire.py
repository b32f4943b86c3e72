"""The protocol between the tier and its worker: packets of a SOCK_SEQPACKET socket pair, without payload.

A packet is one letter and fields of fixed size; texts come last. Numbers of regions (host memory that both map), chunks
(device memory) and transfers are the tier's. A packet that names something the worker has already, or no longer, is
ignored: the tier repeats everything after a restart.

    to the worker                                    from the worker
                                                     k can why              before ready: whether it can checksum
                                                     d can why              and whether it has direct storage
    M region bytes + descriptor   map, register it   r device total name    ready
    U region                      unmap it           f text                 it cannot start
                                                     g region rights text   registered; not, when there is a text
                                                     l region               unmapped
    C chunk bytes                 make it            c chunk + descriptor   made
    I chunk bytes + descriptor    map it             x chunk text           it is not there
    D chunk                       unmap, release it  t transfer text        ended; well when the text is empty
    W/R transfer pieces           copy to / from the device
    V transfer moves              copy on the device
    S transfer pieces             checksum them      s transfer sums        of a transfer S that went well; else t
    L transfer load + descriptor  read from a file   u transfer errno text  its file cannot be read; else t
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SOCKET_BYTES = 4 << 20
MAX_PACKET_BYTES = 192 << 10  # less than the smallest send buffer
MAX_PIECES = 2048
MAX_CHECKED = 64  # pieces of one transfer S
MAX_TEXT_BYTES = 400

MAP, UNMAP, CREATE, IMPORT, DROP, WRITE, READ, CHECK, LOAD = b"M", b"U", b"C", b"I", b"D", b"W", b"R", b"S", b"L"
MOVE = b"V"
ABLE, DIRECT, READY, FATAL, MADE, REFUSED = b"k", b"d", b"r", b"f", b"c", b"x"
REGISTERED, LEFT = b"g", b"l"
ENDED, UNREAD, SUMS = b"t", b"u", b"s"

BOUNCE_REGION = 0  # the number of the bounce buffer, which is always there
UNREGISTERED = "its host memory is not registered"  # the end of a transfer that may be tried again by the bounce buffer

_NUMBERS = struct.Struct("<QQ")
_LOAD = struct.Struct("<8Q")
_REGION = struct.Struct("<3Q")


class MemoryRegion(NamedTuple):
    """A piece of host memory for the GPU worker to map: `nbytes` bytes of the memfd `descriptor` from `offset` on. The
    sender keeps the descriptor open.
    """

    descriptor: int
    offset: int
    nbytes: int


class RegionPiece(NamedTuple):
    """A copy of `nbytes` bytes between a region (host memory) and a chunk (device memory), with an offset in each. An
    order for checksums uses only the chunk.
    """

    chunk: int
    chunk_offset: int
    region: int
    region_offset: int
    nbytes: int


class ChunkMove(NamedTuple):
    """A copy of `nbytes` bytes within device memory, from one chunk and offset to another. The two ranges must not
    overlap.
    """

    source_chunk: int
    source_offset: int
    chunk: int
    chunk_offset: int
    nbytes: int


class FileLoad(NamedTuple):
    """An order to read a slot image from a file at `offset`: its header page goes to a region (host memory), its
    payload to a chunk (device memory). Unless `is_direct`, the payload passes through the region, behind the header
    page.
    """

    offset: int
    payload_bytes: int
    region: int
    region_offset: int
    chunk: int
    chunk_offset: int  # of the payload
    is_direct: bool


class End(NamedTuple):
    """The end of a transfer of the GPU worker. An empty `failure` means success. `errno` is set if a file could not be
    read; `sums` has the checksums that were ordered. `is_down` means that no worker did the transfer; `dead_worker` is
    the process number of the worker that died while it did it, or 0.
    """

    failure: str = ""
    errno: int = 0
    sums: Sequence[int] = ()
    is_down: bool = False
    dead_worker: int = 0


def pack(letter: bytes, number: int, nbytes: int = 0, text: str = "") -> bytes:
    return letter + _NUMBERS.pack(number, nbytes) + text.encode()[:MAX_TEXT_BYTES]


def unpack(packet: bytes) -> tuple[int, int, str]:
    """Return the number, the number of bytes and the text in `packet`, which `pack` made."""
    number, nbytes = _NUMBERS.unpack_from(packet, 1)
    return number, nbytes, packet[1 + _NUMBERS.size :].decode(errors="replace")


def pack_region(number: int, region: MemoryRegion) -> bytes:
    return MAP + _REGION.pack(number, region.offset, region.nbytes)


def unpack_region(packet: bytes, descriptor: int) -> tuple[int, MemoryRegion]:
    """Return a region's number and the region from `packet`, which `pack_region` made. `descriptor` is the one that
    came with the packet.
    """
    number, offset, nbytes = _REGION.unpack_from(packet, 1)
    return number, MemoryRegion(descriptor, offset, nbytes)


def pack_transfer(letter: bytes, number: int, pieces: Sequence[RegionPiece] | Sequence[ChunkMove]) -> bytes:
    """Return the packet that orders the transfer `number` of the kind `letter`, such as WRITE, with the copies
    `pieces`. Raises ValueError for more than MAX_PIECES pieces, or MAX_CHECKED pieces for checksums.
    """
    if len(pieces) > (MAX_CHECKED if letter == CHECK else MAX_PIECES):
        raise ValueError(f"{len(pieces)} pieces do not fit a packet")
    return letter + _NUMBERS.pack(number, len(pieces)) + np.array(pieces, dtype="<i8").tobytes()


def unpack_transfer(packet: bytes) -> tuple[int, list[RegionPiece]]:
    number, rows = _unpack_rows(packet, len(RegionPiece._fields))
    return number, [RegionPiece(*row) for row in rows]


def unpack_moves(packet: bytes) -> tuple[int, list[ChunkMove]]:
    """Return the transfer's number and its copies within device memory from `packet`, which `pack_transfer` made with
    the letter MOVE.
    """
    number, rows = _unpack_rows(packet, len(ChunkMove._fields))
    return number, [ChunkMove(*row) for row in rows]


def _unpack_rows(packet: bytes, columns: int) -> tuple[int, list[list[int]]]:
    number, count = _NUMBERS.unpack_from(packet, 1)
    rows = np.frombuffer(packet, dtype="<i8", offset=1 + _NUMBERS.size).reshape(count, columns)
    return number, rows.tolist()


def pack_load(number: int, load: FileLoad) -> bytes:
    return LOAD + _LOAD.pack(number, *load)


def unpack_load(packet: bytes) -> tuple[int, FileLoad]:
    number, *fields, is_direct = _LOAD.unpack_from(packet, 1)
    return number, FileLoad._make([*fields, bool(is_direct)])


def unpack_end(packet: bytes) -> tuple[int, End]:
    """Return the transfer's number and its end from `packet`, which has the letter ENDED, UNREAD or SUMS."""
    letter = packet[:1]
    number, errno, text = unpack(packet)
    if letter == SUMS:
        return number, End(sums=unpack_sums(packet))
    return number, End(text, errno if letter == UNREAD else 0)


def pack_sums(number: int, sums: Sequence[int]) -> bytes:
    return SUMS + _NUMBERS.pack(number, len(sums)) + np.array(sums, dtype="<u8").tobytes()


def unpack_sums(packet: bytes) -> list[int]:
    sums: list[int] = np.frombuffer(packet, dtype="<u8", offset=1 + _NUMBERS.size).tolist()
    return sums
