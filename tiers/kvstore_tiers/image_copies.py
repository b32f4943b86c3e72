"""The copies of a copy thread: a block into a slot of the host tier, out of one, between two; and its verification.

Owns the order of these steps. Never allocates, never decides when.
Invariants: a payload is copied first and the copy is checksummed, because staging memory stays writable by the client;
one that its client wrote in place is checksummed in place, and judged by that from then on; the header is written
last; nothing raises for bytes that do not hold, the outcome says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_tiers import failpoints
from kvstore_tiers.base import Outcome, OutcomeKind, Segment
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.image import image_header, stamp_header
from kvstore_tiers.segments import checksum_at, gather, gather_and_checksum, scatter, total_bytes


def is_in_place(target: Segment, segments: Sequence[Segment]) -> bool:
    """Whether the payload that is to be stored in the slot `target` is there already."""
    return len(segments) == 1 and segments[0].address == target.address + HEADER_BYTES


class ImageCopies:
    """Transfers over slots, counted in `counters`."""

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
            return count.wrote(Outcome(OutcomeKind.DONE, stored, header.payload_bytes))

    def verify(self, source: Segment, expect_key: bytes) -> Outcome:
        header = image_header(source, expect_key)
        if isinstance(header, str):
            return Outcome(OutcomeKind.CORRUPT, message=header)
        if checksum_at(source.address + HEADER_BYTES, header.payload_bytes) != header.checksum:
            return Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
        return Outcome(OutcomeKind.DONE, header, header.payload_bytes)

    def relocate(self, source: Segment, target: Segment, expect_key: bytes) -> Outcome:
        """Copy a block from one slot to another; what is in `target` has the checksum that its header says, or no
        header."""
        with self._counters.watch() as count:
            header = image_header(source, expect_key)
            if isinstance(header, str):
                return count.read(Outcome(OutcomeKind.CORRUPT, message=header))
            payload = target.address + HEADER_BYTES
            gather(payload, [source.part(HEADER_BYTES, header.payload_bytes)])
            if checksum_at(payload, header.payload_bytes) != header.checksum:
                return count.read(Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold"))
            stored = stamp_header(target, header)
            return count.wrote(Outcome(OutcomeKind.DONE, stored, header.payload_bytes))

    def load(self, source: Segment, expect_key: bytes, segments: Sequence[Segment]) -> Outcome:
        with self._counters.watch() as count:
            header = image_header(source, expect_key)
            if isinstance(header, str):
                return count.read(Outcome(OutcomeKind.CORRUPT, message=header))
            if total_bytes(segments) < header.payload_bytes:
                message = f"{header.payload_bytes} payload bytes do not fit {total_bytes(segments)} bytes of segments"
                return count.read(Outcome(OutcomeKind.FAILED, message=message))
            payload = source.address + HEADER_BYTES
            scatter(payload, header.payload_bytes, segments)
            if checksum_at(payload, header.payload_bytes) != header.checksum:
                return count.read(Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold"))
            return count.read(Outcome(OutcomeKind.DONE, header, header.payload_bytes))
