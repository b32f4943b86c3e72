"""A block's way from one slot of the GPU tier to another: copied on the device, and verified there.

The image is copied as it is, so that neighbours are one run. Then the target's own header page comes by the bounce
buffer, since it names another generation: no byte of the payload is in host memory. Only after the device has found the
written bytes in the target, and the source's header page as it was, the target's shadow names the block (`chunks`).
Never used where the device computes no checksums: nothing here could verify the payload.
Invariant: a range of the bounce buffer is given back once, when the copies that use it have ended.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Segment, Slot
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.link import WorkerLink
from kvstore_tiers.gpu.steps import Steps
from kvstore_tiers.gpu.written import Written, block_in, check
from kvstore_tiers.image import erase_header
from kvstore_tiers.segments import put_bytes
from kvstore_tiers.sizes import aligned_up

_LOG = logging.getLogger(__name__)


class GpuRelocations:
    """Over `link`; each counts as one write in `counters`."""

    def __init__(self, link: WorkerLink, steps: Steps, counters: TransferCounters) -> None:
        self._link = link
        self._steps = steps
        self._counters = counters

    def relocate(
        self, source: Slot, source_shadow: Segment, target: Slot, shadow: Segment, expect_key: bytes, done: Completion
    ) -> None:
        """See `Tier.relocate`; the shadows are those of the slots."""
        erase_header(shadow)  # until the block was verified
        end = self._steps.expect(self._counters.wrote, done)
        found = block_in(source, source_shadow, expect_key)
        if isinstance(found, Outcome):
            end(found)
            return
        header, page = found
        if HEADER_BYTES + header.payload_bytes > target.nbytes:
            end(Outcome(OutcomeKind.FAILED, message=f"{header.payload_bytes} payload bytes do not fit {target}"))
            return
        own = header.stamped(target.generation, header.checksum)
        move = _Move(self._link, self._steps, source, Written.of(header, page), target, shadow, own, own.pack(), end)
        self._steps.begin(move.begin, end)


@dataclass(slots=True)
class _Move:
    """One relocation; each step begins the next. `header` and `page` are the target's."""

    link: WorkerLink
    steps: Steps
    source: Slot
    written: Written
    target: Slot
    shadow: Segment
    header: BlockHeader
    page: bytes
    end: Completion
    offset: int = -1  # of the page in the bounce buffer

    def begin(self) -> None:
        source, target = self.source, self.target
        image_bytes = aligned_up(HEADER_BYTES + self.header.payload_bytes)
        move = wire.Move(source.container, source.offset, target.container, target.offset, image_bytes)
        self.offset = self.steps.bounce.take(HEADER_BYTES)
        put_bytes(self.steps.bounce.address + self.offset, self.page)
        self.link.move([move], self._stamp)

    def _stamp(self, failure: str) -> None:
        if failure:
            self._copied(failure)
            return
        page = wire.Piece(self.target.container, self.target.offset, wire.BOUNCE_REGION, self.offset, HEADER_BYTES)
        self.link.transfer(wire.WRITE, [page], self._copied)

    def _copied(self, failure: str) -> None:
        self.steps.bounce.give_back(self.offset, HEADER_BYTES)
        if failure:
            self.end(Outcome(OutcomeKind.FAILED, message=failure))
            return
        source_page = self.source, self.written.page_digest
        check(self.link, self.target, Written.of(self.header, self.page), self._checked, pages=[source_page])

    def _checked(self, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.CORRUPT:
            check(self.link, self.source, self.written, self._blamed)
        elif outcome.ok:
            put_bytes(self.shadow.address, self.page)
            self.end(Outcome(OutcomeKind.DONE, self.header, self.header.payload_bytes))
        else:
            self.end(outcome)

    def _blamed(self, source: Outcome) -> None:
        """What is in the target is not what was written to the source: that was damaged, or the way is."""
        if source.ok:
            message = f"other bytes arrived in {self.target} on the device than are in {self.source}"
            _LOG.error("%s: block %s", message, self.written.key.hex())
            source = Outcome(OutcomeKind.FAILED, message=message)
        self.end(source)
