"""Blocks that the worker reads from a file of another tier, past this process's memory: the tier's side.

The worker reads the header page into the bounce buffer, and the payload to the device: by direct storage if it has that
and the device can checksum, otherwise by way of the bounce buffer. This module judges, stamps and writes the header.
Then the device verifies both, or this process the payload in the bounce buffer. Only after that the slot's shadow names
the block (`chunks`), and it may be read. The module decides whether direct storage is trusted. A block that fails
verification, or that direct storage could not read, is read again by way of the bounce buffer: if that succeeds, direct
storage was at fault, and is not used any more. Nothing here waits for another worker if one has died: there is a way by
DRAM. Invariants: the descriptor is closed once, when the transfer ends; a range of the bounce buffer is given back when
no process uses it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.base import Completion, FileImage, Outcome, OutcomeKind, Segment, Slot
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.link import DOWN, GpuWorkerLink
from kvstore_tiers.gpu.transfer_threads import TransferThreads, WrittenBlock, blamed, check
from kvstore_tiers.gpu.worker_life import BOUNCE, DIRECT
from kvstore_tiers.image import erase_header, judge_header
from kvstore_tiers.segments import buffer_at, checksum_at, put_bytes
from kvstore_tiers.threads import run_transfer

MOST_DEATHS = 3  # of workers, in a row, while they read by direct storage
_UNVERIFIED = Outcome(OutcomeKind.FAILED, message="the device cannot verify what arrived")
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Load:
    """A load. `distrust`: the fault of direct storage, if the file is read again because of it."""

    slot: Slot
    shadow: Segment
    image: FileImage
    key: bytes
    end: Completion
    distrust: str = ""


class FileLoads:
    """The loads of blocks from another tier's files into a GPU tier's slots; the worker process behind `link` does
    them. `way` is AUTO, DIRECT (only direct storage) or BOUNCE (through host memory). Raises OSError if DIRECT is
    demanded and not available.
    """

    def __init__(self, link: GpuWorkerLink, steps: TransferThreads, counters: TransferCounters, way: str) -> None:
        self._link = link
        self._steps = steps
        self._counters = counters
        self._way = way
        self._distrust = ""
        self._deaths, self._dead_worker = 0, 0  # how many in a row, and the last of them
        if way == DIRECT and not self.is_direct:
            raise OSError(f"there is no direct storage: {self._why_bounced}")

    @property
    def is_direct(self) -> bool:
        """True if payloads go from the file to the device without host memory. This is used only if the device can
        verify what arrives.
        """
        return self._way != BOUNCE and not self._why_bounced

    @property
    def sentence(self) -> str:
        """A sentence for the operator that says whether files are read directly to the device or through host
        memory.
        """
        if self.is_direct:
            return "reads NVMe by direct storage"
        why = "" if self._way == BOUNCE else f": {self._why_bounced}"
        return f"reads NVMe through host memory{why}"

    @property
    def _why_bounced(self) -> str:
        link = self._link
        if self._distrust:
            return self._distrust
        if not link.has_direct_storage:
            return link.no_direct_storage or DOWN
        return "" if link.can_check else f"the device cannot verify what arrives ({link.cannot_check or 'not wanted'})"

    def load(self, slot: Slot, shadow: Segment, expect_key: bytes, image: FileImage, done: Completion) -> None:
        """Read the block with the key `expect_key` from the file `image` into `slot`, as `Tier.loader` describes.
        `shadow` is the slot's header page in DRAM. `done` gets the outcome.
        """
        erase_header(shadow.address)  # until the block was verified
        counted = self._steps.expect(self._counters.wrote, done)

        def end(outcome: Outcome) -> None:
            os.close(image.descriptor)
            counted(outcome)

        load = _Load(slot, shadow, image, expect_key, end)
        if image.nbytes > slot.nbytes:
            end(Outcome(OutcomeKind.FAILED, message=f"{image.payload_bytes} payload bytes do not fit {slot}"))
            return
        self._steps.begin(partial(self._begin, load, self.is_direct), end)

    def _begin(self, load: _Load, is_direct: bool) -> None:
        bounced_bytes = HEADER_BYTES if is_direct else load.image.nbytes
        offset = self._steps.bounce.take(bounced_bytes)
        attempt = _Attempt(self._link, self._steps, load, is_direct, offset, bounced_bytes, self._ended, self._died)
        try:
            attempt.begin()
        except OSError as error:  # of this process, not of the file
            self._steps.bounce.give_back(offset, bounced_bytes)
            load.end(Outcome(OutcomeKind.FAILED, message=str(error)))

    def _ended(self, load: _Load, is_direct: bool, outcome: Outcome, failure: str) -> None:
        """Handle the end of an attempt. `failure`: the failure of the way, such as direct storage; then `outcome` is
        not final.
        """
        if is_direct and failure:
            load.distrust = failure
            self._steps.begin(partial(self._begin, load, False), load.end)
            return
        if is_direct and outcome.ok:
            self._deaths = 0
        elif outcome.ok and load.distrust:
            self._give_up(load.distrust)
        load.end(outcome)

    def _died(self, worker: int) -> None:
        """Note that the worker died while it had a load by direct storage. Called on one thread, of the link's; once
        for each such load.
        """
        if worker == self._dead_worker:
            return
        self._dead_worker = worker
        self._deaths += 1
        if self._deaths >= MOST_DEATHS:
            self._give_up("the worker dies of it")

    def _give_up(self, why: str) -> None:
        if not self._distrust:
            _LOG.error("direct storage is not used any more: %s", why)
        self._distrust = why


@dataclass(slots=True)
class _Attempt:
    """One reading of a file. `ended(load, is_direct, outcome, failure of the way)` is called once; before it `died`,
    with a worker that died while it read by direct storage.
    """

    link: GpuWorkerLink
    steps: TransferThreads
    load: _Load
    is_direct: bool
    offset: int
    bounced_bytes: int
    ended: Callable[[_Load, bool, Outcome, str], None]
    died: Callable[[int], None]

    @property
    def _address(self) -> int:
        return self.steps.bounce.address + self.offset

    def begin(self) -> None:
        """Begin to read. Raises OSError."""
        image, slot = self.load.image, self.load.slot
        load = wire.FileLoad(
            image.offset, image.payload_bytes, wire.BOUNCE_REGION, self.offset, slot.container,
            slot.offset + HEADER_BYTES, self.is_direct,
        )  # fmt: skip
        self.link.load(load, os.dup(image.descriptor), self._read)

    def _read(self, end: wire.End) -> None:
        if end.failure:
            if end.dead_worker and self.is_direct:
                self.died(end.dead_worker)
            outcome = Outcome(OutcomeKind.FAILED, message=end.failure, errno=end.errno)
            self._end(outcome, "" if end.errno or end.is_down else end.failure)
        else:
            self.steps.finish(self._judge)

    def _judge(self) -> None:
        outcome = run_transfer(self._stamp)
        if not outcome.ok:
            self._end(outcome)

    def _stamp(self) -> Outcome:
        """Write the header with the slot's own generation, if it is the block's; return the outcome."""
        load, address = self.load, self._address
        slot, image = load.slot, load.image
        header = judge_header(
            buffer_at(address, HEADER_BYTES).raw, load.key, slot.nbytes - HEADER_BYTES, image.generation
        )  # fmt: skip
        if isinstance(header, str):
            return Outcome(OutcomeKind.CORRUPT, message=header)
        if header.payload_bytes != image.payload_bytes:
            message = f"the header says {header.payload_bytes} payload bytes, the record {image.payload_bytes}"
            return Outcome(OutcomeKind.CORRUPT, message=message)
        by_host = not self.link.can_check  # asked once: the next worker may answer otherwise
        if by_host:  # and so it is in the bounce buffer
            if self.is_direct:
                return _UNVERIFIED
            if checksum_at(address + HEADER_BYTES, header.payload_bytes) != header.checksum:
                return Outcome(OutcomeKind.CORRUPT, message="the payload's checksum does not hold")
        stamped = header.stamped(slot.generation, header.checksum)
        page = stamped.pack()
        put_bytes(address, page)
        written = WrittenBlock.of(stamped, page)

        def checked(outcome: Outcome) -> None:
            if outcome.ok:
                put_bytes(load.shadow.address, page)
                outcome = Outcome(OutcomeKind.DONE, stamped, header.payload_bytes)
            self._checked(outcome, written)

        def copied(failure: str) -> None:
            if failure:
                self._end(Outcome(OutcomeKind.FAILED, message=failure))
            elif self.link.can_check:
                check(self.link, slot, written, checked, waits=False)
            elif by_host:
                checked(Outcome(OutcomeKind.DONE))
            else:
                self._end(_UNVERIFIED)

        piece = wire.RegionPiece(slot.container, slot.offset, wire.BOUNCE_REGION, self.offset, HEADER_BYTES)
        self.link.transfer(wire.WRITE, [piece], copied, waits=False)
        return Outcome(OutcomeKind.DONE)

    def _checked(self, outcome: Outcome, written: WrittenBlock) -> None:
        if outcome.kind is not OutcomeKind.CORRUPT:
            self._end(outcome)
        elif self.is_direct:
            self._end(outcome, f"other bytes arrived on the device than are in the file ({outcome.message})")
        else:
            payload = [Segment(self._address + HEADER_BYTES, written.payload_bytes)]
            self._end(run_transfer(lambda: blamed(self.load.slot, payload, written)))

    def _end(self, outcome: Outcome, failure: str = "") -> None:
        self.steps.bounce.give_back(self.offset, self.bounced_bytes)
        self.ended(self.load, self.is_direct, outcome, failure)
