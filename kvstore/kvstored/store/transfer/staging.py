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
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.base import Coding, Outcome, OutcomeKind, Segment, Slot, Tier
from kvstore_tiers.codecs import Codec, ShapeOf, codec_of
from kvstore_tiers.codecs.images import coded_slot_bytes, image_bytes
from kvstore_tiers.codecs.measured import Measured, measure_beside
from kvstore_tiers.codecs.scratch import Scratch
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import AlignedBuffer
from kvstored.completions import CompletionQueue
from kvstored.store.transfer.codec_choice import CodecChoice, auto_codecs
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)


class StagedImage(NamedTuple):
    """A block in the form in which it will be stored in a slot of `slot_bytes`. `image` is the coded form, in `buffer`
    if it has memory of its own; without an image, the source's copy is stored as it is."""

    slot_bytes: int
    image: Segment | None = None
    buffer: AlignedBuffer | None = None
    error: float = 0.0  # above 0: the image is lossy


class CodecStaging:
    """Brings blocks into the form of `coding`, whose codec is not "none". `host` has the copy threads. `shape_of` gives
    the shape of a fingerprint's payloads; it is called from these threads. `blocks_a_get(nbytes)` returns how many
    blocks of that size a request reads from the tier, on average."""

    def __init__(
        self,
        coding: Coding,
        shape_of: ShapeOf,
        host: HostTier,
        completions: CompletionQueue,
        counters: Counters,
        blocks_a_get: Callable[[int], float] = lambda nbytes: 1.0,
    ) -> None:
        self._coding = coding
        self._choice: CodecChoice | None = None
        self._fixed = Measured(codec, coding.rates) if (codec := codec_of(coding.codec)) is not None else None
        if self._fixed is None:
            chosen = [Measured(each, coding.rates) for each in auto_codecs()]
            self._choice = CodecChoice(chosen, coding.rates, blocks_a_get, measure_beside, time.monotonic)
            self._choice.measure_again()
        self._shape_of = shape_of
        self._host = host
        self._completions = completions
        self._counters = counters
        self._scratch = Scratch(coding.staging_bytes // 2)  # the other half is for reading
        self._waiting: deque[tuple[int, asyncio.Future[AlignedBuffer]]] = deque()

    async def stage(
        self, tier: Tier, source: Slot, key: bytes, whole_bytes: int, *, takes_lossy: bool = False
    ) -> StagedImage | Outcome:
        """Bring the block `key` in the slot `source` of `tier` into the codec's form, or leave it as it is when the
        codec is lossy and the block does not take that. `whole_bytes` is the size of a slot for the block as it is.
        Return an outcome when the copy in `source` is damaged or cannot be read."""
        is_as_put = tier.info.is_in_memory and tier.info.coding.is_none
        if tier.info.is_in_memory and tier.info.coding.codec == self._coding.codec:
            return StagedImage(source.nbytes, tier.slot_segment(source))  # it has that form, or was not worth it there
        codec = self._codec_for(whole_bytes - HEADER_BYTES, takes_lossy=takes_lossy)
        if codec is None:
            return StagedImage(whole_bytes)
        raw_bytes = 0 if is_as_put else whole_bytes
        needed_bytes = raw_bytes + image_bytes(codec, whole_bytes - HEADER_BYTES)
        if needed_bytes > self._scratch.most_bytes:
            self._counters.add("uncoded_blocks")
            return StagedImage(whole_bytes)
        buffer = await self._take(needed_bytes)
        try:
            staged = await self._stage(codec, tier, source, key, buffer.segment(needed_bytes), raw_bytes)
        except BaseException:
            self._give_back(buffer)
            raise
        if isinstance(staged, Outcome) or staged.image is None:
            self._give_back(buffer)
            return StagedImage(whole_bytes) if isinstance(staged, StagedImage) else staged
        return staged._replace(buffer=buffer)

    def release(self, staged: StagedImage) -> None:
        """Free the memory of `staged`. The caller ensures that nothing reads it any more."""
        if staged.buffer is not None:
            self._give_back(staged.buffer)

    def _codec_for(self, payload_bytes: int, *, takes_lossy: bool) -> Codec | None:
        """Return the codec for a block, None when it is stored as it is."""
        if self._choice is not None:
            codec = self._choice.choose(payload_bytes, takes_lossy=takes_lossy)
            codec = codec or self._choice.choose_to_try(payload_bytes, takes_lossy=takes_lossy)
            if codec is None:
                self._counters.add("refused_coding_blocks")
            return codec
        assert self._fixed is not None
        if self._fixed.is_lossy and not takes_lossy:
            self._counters.add("refused_lossy_blocks")
            return None
        return self._fixed

    async def _stage(
        self, codec: Codec, tier: Tier, source: Slot, key: bytes, room: Segment, raw_bytes: int
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
        outcome: Outcome = await ask(partial(self._host.encode, codec, self._shape_of, image, key, target))
        header = outcome.header
        if outcome.kind is OutcomeKind.FAILED:
            log.warning("codec %s failed, block %s is stored as it is: %s", codec.name, key.hex(), outcome.message)
        elif not outcome.ok or header is None:
            return outcome
        elif header.codec:
            self._counters.add("coded_blocks")
            self._counters.add("coded_bytes", header.payload_bytes)
            self._counters.add("coded_stored_bytes", header.stored_bytes)
            self._coding.rates.shrank(header.codec, header.payload_bytes, header.stored_bytes)
            return StagedImage(coded_slot_bytes(header.payload_bytes, header.stored_bytes), target, error=header.error)
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
