"""The work of the host tier's copy threads: copies into slots, out of them and between them, and verification.

The module owns the threads, and the order of the steps of a copy. It does not allocate or free a slot, or decide when.
Invariants: a payload is copied first and the copy is checksummed, because staging memory stays writable by the client;
a payload that its client wrote in place is checksummed in place, and judged by that from then on; the header is written
last; damaged bytes raise nothing, the outcome says so.
"""

from __future__ import annotations

import ctypes as ct
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import HASHED_MIN_BYTES, native
from kvstore_proto.arena import HEADER_BYTES, BlockHeader, unjudged_header
from kvstore_tiers import failpoints
from kvstore_tiers.arena import Arena
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Segment, Slot, require_fits
from kvstore_tiers.codecs import Codec, ShapeOf
from kvstore_tiers.codecs.images import decode_image, encode_image, judge_stored
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.image import false_checksum, image_header, stamp_header
from kvstore_tiers.segments import checksum_at, gather, gather_and_checksum, scatter_and_checksum, total_bytes
from kvstore_tiers.threads import ResidentThreads, Transfer, TransferBatch


def is_in_place(target: Segment, segments: Sequence[Segment]) -> bool:
    """Return True if `segments` are the payload's place in the slot whose memory is `target`, so that the payload need
    not be copied.
    """
    return len(segments) == 1 and segments[0].address == target.address + HEADER_BYTES


class ImageCopies:
    """A maker of copies, checks and moves of blocks between slots and other host memory. The calling thread does each
    one, and `counters` counts it.
    """

    def __init__(self, counters: TransferCounters) -> None:
        self._counters = counters

    def store(self, target: Segment, header: BlockHeader, segments: Sequence[Segment]) -> Outcome:
        with self._counters.watch() as count:
            failpoints.hit("host.before-copy")
            payload = target.address + HEADER_BYTES
            if is_in_place(target, segments):
                checksum = checksum_at(payload, header.payload_bytes)
            else:
                if header.checksum:
                    gather(payload, segments)
                checksum = header.checksum or gather_and_checksum(payload, segments, header.payload_bytes)
            failpoints.hit("host.before-header")
            stored = stamp_header(target, header, checksum)
            return count.wrote(Outcome(OutcomeKind.DONE, stored, header.stored_bytes))

    def verify(self, source: Segment, expect_key: bytes) -> Outcome:
        header = image_header(source, expect_key)
        if isinstance(header, str):
            return Outcome(OutcomeKind.CORRUPT, message=header)
        if checksum_at(source.address + HEADER_BYTES, header.stored_bytes) != header.stored_checksum:
            return Outcome(OutcomeKind.CORRUPT, message=false_checksum(header))
        return Outcome(OutcomeKind.DONE, header, header.stored_bytes)

    def relocate(self, source: Segment, target: Segment, expect_key: bytes) -> Outcome:
        """Copy the block with the key `expect_key` from the slot memory `source` to the slot memory `target`. If the
        outcome is not DONE, `target` contains no valid header.
        """
        with self._counters.watch() as count:
            header = image_header(source, expect_key)
            if isinstance(header, str):
                return count.read(Outcome(OutcomeKind.CORRUPT, message=header))
            place, nbytes = target.address + HEADER_BYTES, header.stored_bytes
            if gather_and_checksum(place, [source.part(HEADER_BYTES, nbytes)], nbytes) != header.stored_checksum:
                return count.read(Outcome(OutcomeKind.CORRUPT, message=false_checksum(header)))
            return count.wrote(Outcome(OutcomeKind.DONE, stamp_header(target, header), nbytes))

    def load(self, source: Segment, expect_key: bytes, segments: Sequence[Segment]) -> Outcome:
        with self._counters.watch() as count:
            header = image_header(source, expect_key)
            if isinstance(header, str):
                return count.read(Outcome(OutcomeKind.CORRUPT, message=header))
            if header.coded is not None:
                stored = source.part(HEADER_BYTES, header.stored_bytes)
                return count.read(judge_stored(header, [stored]) or decode_image(header, stored, segments))
            if total_bytes(segments) < header.payload_bytes:
                message = f"{header.payload_bytes} payload bytes do not fit {total_bytes(segments)} bytes of segments"
                return count.read(Outcome(OutcomeKind.FAILED, message=message))
            payload = source.address + HEADER_BYTES
            if scatter_and_checksum(payload, header.payload_bytes, segments) != header.checksum:
                return count.read(Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold"))
            return count.read(Outcome(OutcomeKind.DONE, header, header.payload_bytes))


_WORD = 8
Headers = npt.NDArray[np.uint8]
AT_ONCE_BYTES = 256 * 1024  # copied and hashed in 0.1 ms; a hand-over waits for a core, on a busy machine some ms
IN_PLACE_SPEED = 4  # a checksum alone takes a quarter of that time at most
MIN_PART_BYTES = 4 * 2**20  # less is copied in the time that waking a second thread and its GIL takes


class ImageRun:
    """The blocks that are to be stored together, in columns: the slot of each, its header without checksums, and the
    address and size of its payload, which may be in the slot already.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self._headers: list[Headers] = []  # of each `add`
        self._owners: list[object] = []  # of the payloads' memory

    def __len__(self) -> int:
        return len(self.slots)

    def add(self, slots: Sequence[Slot], addresses: Sequence[int], nbytes: int, owner: object) -> Headers:
        """Add blocks that go to `slots`, all of one size. Each has `nbytes` of payload, at the address of `addresses`
        at the same position; `owner` keeps that memory alive. Return the array of their headers, all zeros, which the
        caller fills next, by `kvstore_proto.arena.pack_unsummed`. Raises RuntimeError for payloads that do not fit.
        """
        if HEADER_BYTES + nbytes > slots[0].nbytes:
            raise RuntimeError(f"{nbytes} stored bytes and a header do not fit a slot of {slots[0].nbytes}")
        headers = np.zeros((len(slots), HEADER_BYTES), np.uint8)
        self.slots += slots
        self.addresses += addresses
        self.sizes += [nbytes] * len(slots)
        self._headers.append(headers)
        self._owners.append(owner)
        return headers

    @property
    def headers(self) -> Headers:
        """The headers of all blocks, in the order of `slots`: an array uint8[blocks, 4096]."""
        if len(self._headers) > 1:
            self._headers = [np.concatenate(self._headers)]
        return self._headers[0]


class ImageBatch(TransferBatch):
    """A batch of stores (`images`, into the slots' memory at `targets`) that compiled code does: `parts` threads
    together, each in one call without the GIL. `stored` is called before `done` is.
    """

    def __init__(
        self,
        library: ct.CDLL,
        images: ImageRun,
        targets: Sequence[int],
        parts: int,
        stored: Callable[[ImageRun], None],
        done: Callable[[Sequence[Outcome]], None],
    ) -> None:
        super().__init__([], parts, done)
        self._library, self._images, self._stored = library, images, stored
        self._headers = images.headers  # here, not in `run`: threads together would each make an array of all
        # How many have been taken; where each goes, comes from, its size.
        self._table = array("Q", [0])
        self._table.extend(targets)
        self._table.extend(images.addresses)
        self._table.extend(images.sizes)

    def __len__(self) -> int:
        return len(self._images)

    def run(self) -> None:
        count, table = len(self._images), self._table.buffer_info()[0]
        places = [table + _WORD * (1 + column * count) for column in range(3)]
        self._library.kv_store_images(table, count, *places, self._headers.ctypes.data)
        self.end_part()

    def _ended(self) -> Sequence[Outcome]:
        sizes = self._images.sizes
        if not self._table[0]:  # no thread has run
            return [Outcome(OutcomeKind.CANCELLED, message="the tier is closed")] * len(sizes)
        self._stored(self._images)
        of_size = {nbytes: Outcome(OutcomeKind.DONE, None, nbytes) for nbytes in set(sizes)}
        return [of_size[nbytes] for nbytes in sizes]


def segment_of(arena: Arena, slot: Slot) -> Segment:
    """Return the memory of `slot` in `arena`. Raises RuntimeError if the slot is not allocated."""
    arena.require_out(slot)
    return arena.segment(slot)


class HostTransfers:
    """The copy threads of a host tier, and the transfers that they do. `copy_threads` is their number, and their names
    begin with `name`. `arena_of` returns the arena of a slot, or raises RuntimeError.
    """

    def __init__(
        self, name: str, copy_threads: int, counters: TransferCounters, arena_of: Callable[[Slot], Arena]
    ) -> None:
        self._arena_of = arena_of
        self._counters = counters
        self._copies = ImageCopies(counters)
        self._threads = ResidentThreads(name, copy_threads)

    def store(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        require_fits(slot, header, segments)
        arena = self._arena_of(slot)
        self._threads.submit(self._storing(arena, slot, segment_of(arena, slot), header, segments), done)

    def store_many(self, images: ImageRun, done: Callable[[Sequence[Outcome]], None]) -> None:
        """Store the blocks of `images`. `done` is called once with the outcomes, in order and without headers. A small
        batch is stored before this returns.
        """
        targets = list[int]()
        for arena, slots in self._by_arena(images.slots):
            arena.require_all_out(slots)
            targets += [arena.address + offset for _, offset, _, _ in slots]
        places = zip(targets, images.addresses, images.sizes, strict=True)
        in_place = [size for target, source, size in places if source == target + HEADER_BYTES]
        nbytes = sum(images.sizes) - sum(in_place) + sum(in_place) // IN_PLACE_SPEED  # as if all were copied
        parts = max(1, min(len(self._threads), nbytes // MIN_PART_BYTES))
        batch = self._batch(images, targets, parts, done)
        if nbytes <= AT_ONCE_BYTES and not failpoints.are_armed() and not self._threads.is_closed:
            batch.run()
            return
        for _ in range(parts):
            if not self._threads.post(batch.run):
                batch.end_part()

    def _batch(
        self, images: ImageRun, targets: Sequence[int], parts: int, done: Callable[[Sequence[Outcome]], None]
    ) -> TransferBatch:
        library = None if failpoints.are_armed() else native.get()
        if library is not None and min(images.sizes) >= HASHED_MIN_BYTES:
            return ImageBatch(library, images, targets, parts, self._stored, done)
        storing: list[Transfer] = []
        for at, slot in enumerate(images.slots):
            arena, header = self._arena_of(slot), unjudged_header(images.headers[at].tobytes())
            payload = Segment(images.addresses[at], images.sizes[at], owner=images)
            storing.append(self._storing(arena, slot, segment_of(arena, slot), header, [payload]))
        return TransferBatch(storing, parts, done)

    def _stored(self, images: ImageRun) -> None:
        """Count the stores of `images`, which have succeeded, and let arenas that clients write know the headers."""
        self._counters.wrote_all(len(images), sum(images.sizes))
        at = 0
        for arena, slots in self._by_arena(images.slots):
            arena.vouch(slots, images.headers[at : at + len(slots)])
            at += len(slots)

    def _by_arena(self, slots: Sequence[Slot]) -> list[tuple[Arena, Sequence[Slot]]]:
        """Return `slots` in runs of the same arena, each with that arena."""
        runs = [list(run) for _, run in groupby(slots, itemgetter(0))]
        return [(self._arena_of(run[0]), run) for run in runs]

    def load(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        source = segment_of(self._arena_of(slot), slot)
        self._threads.submit(lambda: self._copies.load(source, expect_key, segments), done)

    def move(self, source: Segment, slot: Slot, expect_key: bytes, done: Completion) -> None:
        """Copy the slot image (header and payload) `source` to `slot`. `done` gets CORRUPT if `source` does not contain
        the block with the key `expect_key`.
        """
        arena = self._arena_of(slot)
        copy = partial(self._copies.relocate, source, segment_of(arena, slot), expect_key)
        self._threads.submit(_vouching(arena, slot, copy), done)

    def encode(
        self, codec: Codec, shape_of: ShapeOf, source: Segment, expect_key: bytes, target: Segment, done: Completion
    ) -> None:
        """Write the slot image `source` in the form of `codec` to `target`, on a copy thread. `source` must hold the
        block `expect_key`. `encode_image` describes the outcomes."""
        self._threads.submit(partial(encode_image, codec, shape_of, source, expect_key, target), done)

    def verify(self, slot: Slot, expect_key: bytes, done: Completion) -> None:
        source = segment_of(self._arena_of(slot), slot)
        self._threads.submit(lambda: self._copies.verify(source, expect_key), done)

    def close(self) -> None:
        self._threads.close()

    def _storing(
        self, arena: Arena, slot: Slot, target: Segment, header: BlockHeader, segments: Sequence[Segment]
    ) -> Transfer:
        return _vouching(arena, slot, partial(self._copies.store, target, header, segments))


def _vouching(arena: Arena, slot: Slot, transfer: Transfer) -> Transfer:
    """Return `transfer` into `slot`, extended so that the arena afterwards knows the header that was written."""
    if not arena.is_writable:
        return transfer

    def run() -> Outcome:
        outcome = transfer()
        if outcome.ok and outcome.header is not None:
            arena.vouch((slot,), np.frombuffer(outcome.header.pack(), np.uint8).reshape(1, -1))
        return outcome

    return run
