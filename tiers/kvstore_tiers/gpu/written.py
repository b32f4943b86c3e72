"""What was written to a slot of device memory, and whether it is there.

Engines of the tenant may import device memory, and read it without this process: where the worker can, it checksums
what a copy has written there before the write is reported. Owns nothing, moves no payload.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Segment, Slot
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.link import WorkerLink
from kvstore_tiers.image import judge_header
from kvstore_tiers.segments import buffer_at, checksum_of

_LOG = logging.getLogger(__name__)


class Written(NamedTuple):
    """What was written to a slot whole."""

    key: bytes
    payload_bytes: int
    checksum: int
    page_digest: int  # of the header page

    @classmethod
    def of(cls, header: BlockHeader, page: bytes) -> Written:
        return cls(header.key, header.payload_bytes, header.checksum, xxhash.xxh3_64_intdigest(page))


def block_in(slot: Slot, shadow: Segment, expect_key: bytes) -> tuple[BlockHeader, bytes] | Outcome:
    """The header of the block that was written to a slot whole, and its page; CORRUPT where no such block was."""
    page = buffer_at(shadow.address, HEADER_BYTES).raw
    header = judge_header(page, expect_key, slot.nbytes - HEADER_BYTES, slot.generation)
    if isinstance(header, str):
        return Outcome(OutcomeKind.CORRUPT, message=f"no such block was written to {slot}: {header}")
    return header, page


def check(
    link: WorkerLink, slot: Slot, written: Written, checked: Completion,
    *, pages: Sequence[tuple[Slot, int]] = (), waits: bool = True,
) -> None:  # fmt: skip
    """Ask the device; `checked` is called on a thread of the link's, which is soon done with it. `pages`: other slots
    whose header pages must have these digests, too. `waits`: as there."""

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


def blamed(slot: Slot, payload: Sequence[Segment], written: Written) -> Outcome:
    """Why the device has other bytes than were to be written: the source was damaged, or the way is."""
    if checksum_of(payload, written.payload_bytes) != written.checksum:
        return Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
    message = f"other bytes arrived in {slot} on the device than were sent"
    _LOG.error("%s: block %s", message, written.key.hex())
    return Outcome(OutcomeKind.FAILED, message=message)
