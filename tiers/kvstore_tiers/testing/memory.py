"""The reference tier: plain, slow and correct.

Owns copies of payloads in a dict. It defines what every other tier must do: the conformance suite passes on it, and
other tiers are compared with it. Never used to hold real data. Invariants: counts a slot as `nbytes`, like the other
tiers; a slot read before it was written is CORRUPT, and not a crash.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace

from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, BlockHeader, payload_checksum
from kvstore_tiers.base import (
    Completion,
    FileImage,
    Load,
    MemoryKind,
    Outcome,
    OutcomeKind,
    Segment,
    Slot,
    Tier,
    TierInfo,
    TierState,
    TierStatistics,
    require_fits,
)
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.image import judge_header, require_slot_size
from kvstore_tiers.segments import AlignedBuffer, buffer_at, put_bytes, total_bytes
from kvstore_tiers.threads import ResidentThreads


class MemoryTier(Tier):
    """A tier for tests that keeps up to `capacity_bytes` bytes of blocks in Python objects. `memory` is the kind of
    memory that it reports as its own.
    """

    def __init__(self, capacity_bytes: int, *, name: str = "memory", memory: MemoryKind = MemoryKind.SYSTEM) -> None:
        self.info = TierInfo(name, "memory", memory)
        self._capacity_bytes = capacity_bytes
        self._slots: dict[Slot, tuple[BlockHeader, bytes] | None] = {}
        self._used_bytes = 0
        self._next_offset = 0
        self._counters = TransferCounters()
        self._threads = ResidentThreads(name, 1)
        self._closed = False

    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        require_slot_size(nbytes)
        if self._closed or self._used_bytes + nbytes > self._capacity_bytes:
            return None
        slot = Slot(0, self._next_offset, nbytes, 1)
        self._next_offset += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._slots[slot] = None
        self._used_bytes += nbytes
        return slot

    def free(self, slot: Slot) -> None:
        if slot not in self._slots:
            raise RuntimeError(f"{slot} is not allocated")
        del self._slots[slot]
        self._used_bytes -= slot.nbytes

    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        require_fits(slot, header, segments)
        self._threads.submit(lambda: self._store(slot, header, segments), done)

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        self._threads.submit(lambda: self._load(slot, expect_key, segments), done)

    def loader(self, slot: Slot, expect_key: bytes) -> Load:
        def load(image: FileImage, done: Completion) -> None:
            self._threads.submit(lambda: self._read_file(slot, image, expect_key), done)

        return load

    def statistics(self) -> TierStatistics:
        return self._counters.report(
            TierStatistics(
                state=TierState.CLOSED if self._closed else TierState.OK,
                capacity_bytes=self._capacity_bytes,
                used_bytes=self._used_bytes,
                blocks=len(self._slots),
                used_by={"blocks": self._used_bytes},
            )
        )

    def close(self) -> None:
        self._closed = True
        self._threads.close()
        self._slots.clear()
        self._used_bytes = 0

    def _store(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment]) -> Outcome:
        payload = b"".join(buffer_at(segment.address, segment.nbytes).raw for segment in segments)
        checksum = header.checksum or payload_checksum(payload)
        stored = replace(header, checksum=checksum, generation=slot.generation)
        self._slots[slot] = (stored, payload)
        return self._counters.wrote(Outcome(OutcomeKind.DONE, stored, len(payload)))

    def _load(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment]) -> Outcome:
        block = self._slots.get(slot)
        if block is None or block[0].key != expect_key or payload_checksum(block[1]) != block[0].checksum:
            message = f"{slot} does not hold block {expect_key.hex()}"
            return self._counters.read(Outcome(OutcomeKind.CORRUPT, message=message))
        header, payload = block
        if total_bytes(segments) < len(payload):
            message = f"{len(payload)} payload bytes do not fit {total_bytes(segments)} bytes of segments"
            return self._counters.read(Outcome(OutcomeKind.FAILED, message=message))
        rest = payload
        for segment in segments:
            put_bytes(segment.address, rest[: segment.nbytes])
            rest = rest[segment.nbytes :]
        return self._counters.read(Outcome(OutcomeKind.DONE, header, len(payload)))

    def _read_file(self, slot: Slot, image: FileImage, expect_key: bytes) -> Outcome:
        pages = AlignedBuffer(image.nbytes)
        try:
            got = os.preadv(image.descriptor, [buffer_at(pages.address, image.nbytes)], image.offset)
        finally:
            os.close(image.descriptor)
        if got != image.nbytes:
            return Outcome(OutcomeKind.FAILED, message=f"{got} of {image.nbytes} bytes read", errno=errno.EIO)
        raw = buffer_at(pages.address, HEADER_BYTES).raw
        header = judge_header(raw, expect_key, slot.nbytes - HEADER_BYTES, image.generation)
        if isinstance(header, str):
            return self._counters.wrote(Outcome(OutcomeKind.CORRUPT, message=header))
        payload = pages.segment(image.nbytes).part(HEADER_BYTES, header.payload_bytes)
        if payload_checksum(buffer_at(payload.address, payload.nbytes).raw) != header.checksum:
            return self._counters.wrote(Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold"))
        return self._store(slot, header, [payload])
