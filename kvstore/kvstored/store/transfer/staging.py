"""Staging brings a block into the form of a tier's codec before the block has a slot there: its size is known only
then.

The module owns the memory for this work, which is bounded and counted in the capacity of the mapped tier, and the queue
of callers that wait for it. The copy threads of the mapped tier do the work. A block is stored as it is when the codec
does not make it small enough for a smaller slot, or when it does not fit into the memory. The module makes no other
decision: `link.py` pins the block and finds the slot. Invariants: memory is given out in the order of the requests.
Each `StagedImage` is released once. A caller that holds staging memory of one tier waits for room in that tier, never
for staging memory of a tier before it, so these waits form no circle.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.base import Coding, Outcome, OutcomeKind, Segment, Slot, Tier
from kvstore_tiers.codecs import codec_named
from kvstore_tiers.codecs.images import coded_slot_bytes, image_bytes
from kvstore_tiers.codecs.scratch import Scratch
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import AlignedBuffer
from kvstored.completions import CompletionQueue
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedImage:
    """A block in the form in which it will be stored in a slot of `slot_bytes`. `image` is the coded form, in `buffer`
    if it has memory of its own; without an image, the source's copy is stored as it is."""

    slot_bytes: int
    image: Segment | None = None
    buffer: AlignedBuffer | None = None


class CodecStaging:
    """A component that encodes blocks for a tier with the codec of `coding`, which is not "none", before they get a
    slot there. The copy threads of `host` do the work."""

    def __init__(self, coding: Coding, host: HostTier, completions: CompletionQueue, counters: Counters) -> None:
        codec = codec_named(coding.codec)
        assert codec is not None
        self._codec = codec
        self._coding = coding
        self._host = host
        self._completions = completions
        self._counters = counters
        self._scratch = Scratch(coding.staging_bytes // 2)  # the other half is for reading
        self._waiting: deque[tuple[int, asyncio.Future[AlignedBuffer]]] = deque()

    async def stage(self, tier: Tier, source: Slot, key: bytes, whole_bytes: int) -> StagedImage | Outcome:
        """Encode the block `key` in the slot `source` of `tier`, waiting for memory first. `whole_bytes` is the size of
        a slot for the uncompressed block. Return an outcome when the copy in `source` is damaged or cannot be read.
        """
        is_as_put = tier.info.is_in_memory and tier.info.coding.is_none
        if tier.info.is_in_memory and tier.info.coding.codec == self._coding.codec:
            return StagedImage(source.nbytes, tier.slot_segment(source))  # it has that form, or was not worth it there
        raw_bytes = 0 if is_as_put else whole_bytes
        needed_bytes = raw_bytes + image_bytes(self._codec, whole_bytes - HEADER_BYTES)
        if needed_bytes > self._scratch.most_bytes:
            self._counters.add("uncoded_blocks")
            return StagedImage(whole_bytes)
        buffer = await self._take(needed_bytes)
        try:
            staged = await self._stage(tier, source, key, buffer.segment(needed_bytes), raw_bytes)
        except BaseException:
            self._give_back(buffer)
            raise
        if isinstance(staged, Outcome) or staged.image is None:
            self._give_back(buffer)
            return StagedImage(whole_bytes) if isinstance(staged, StagedImage) else staged
        return StagedImage(staged.slot_bytes, staged.image, buffer)

    def release(self, staged: StagedImage) -> None:
        """Free the memory of `staged`. The caller ensures that nothing reads it any more."""
        if staged.buffer is not None:
            self._give_back(staged.buffer)

    async def _stage(
        self, tier: Tier, source: Slot, key: bytes, room: Segment, raw_bytes: int
    ) -> StagedImage | Outcome:
        ask = self._completions.outcome_of
        if raw_bytes:
            image = room.part(0, raw_bytes)
            read: Outcome = await ask(partial(tier.move_out, source, image, key))
            if not read.ok:
                return read
        else:
            image = tier.slot_segment(source)
        target = room.part(raw_bytes, room.nbytes - raw_bytes)
        outcome: Outcome = await ask(partial(self._host.encode, self._codec, image, key, target))
        header = outcome.header
        if outcome.kind is OutcomeKind.FAILED:
            log.warning(
                "codec %s failed, block %s is stored as it is: %s", self._codec.name, key.hex(), outcome.message
            )
        elif not outcome.ok or header is None:
            return outcome
        elif header.codec:
            self._counters.add("coded_blocks")
            self._counters.add("coded_bytes", header.payload_bytes)
            self._counters.add("coded_stored_bytes", header.stored_bytes)
            return StagedImage(coded_slot_bytes(header.payload_bytes, header.stored_bytes), target)
        self._counters.add("uncoded_blocks")
        return StagedImage(0)

    async def _take(self, nbytes: int) -> AlignedBuffer:
        if not self._waiting:
            buffer = self._scratch.try_take(nbytes)
            if buffer is not None:
                return buffer
        turn: asyncio.Future[AlignedBuffer] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        return await turn

    def _give_back(self, buffer: AlignedBuffer) -> None:
        self._scratch.give_back(buffer)
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if turn.done():  # given up
                self._waiting.popleft()
                continue
            taken = self._scratch.try_take(nbytes)
            if taken is None:
                return
            self._waiting.popleft()
            turn.set_result(taken)
