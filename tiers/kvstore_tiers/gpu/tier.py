"""The GPU tier: blocks in the memory of one device, written and read by its worker process.

The module owns the slots (`chunks`) and the capacity; `transfers` and `file_loads` make transfers. It holds no CUDA
context: the link (`link`) lets a worker do the copies, and holds a descriptor of all device memory, so that blocks
outlive the worker. A witness that keeps these descriptors, and the shadows' ones, lets them outlive this process too
(`adopt`, `leave`). A slot holds the whole image, header page first. Payloads in memory that was shared (`share`), such
as the host tier's arenas, and that the worker has registered, are copied by the device in place; all others by way of
the bounce buffer. Memory is shared in parts, since registering each takes a moment; a part is a region to the worker,
so no copy crosses the border of two registrations. The worker itself reads files.

Checksums are verified by this process, on bytes that came back to host memory, and by the device on bytes that arrived
there, before they may be read. Without NVRTC that is not possible, and `statistics` says so. Invariants: nothing is
read from a slot that was not written whole in this generation; a payload without a checksum is checksummed in the copy
that no client can write; a transfer under way when the worker dies ends FAILED.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue

import numpy as np

from kvstore_console.units import human_bytes
from kvstore_proto.arena import DEVICE_ARENAS, HEADER_BYTES, BlockHeader
from kvstore_tiers.adoption import AdoptedArena
from kvstore_tiers.arena import Arena, ArenaRecord, ChunkWitness
from kvstore_tiers.base import (
    Completion,
    Load,
    MemoryKind,
    Outcome,
    OutcomeKind,
    Segment,
    Slot,
    TierInfo,
    TierState,
    TierStatistics,
    require_fits,
)
from kvstore_tiers.containers import ContainerTier
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.chunks import Chunks, header_room
from kvstore_tiers.gpu.file_loads import FileLoads
from kvstore_tiers.gpu.link import DOWN, GpuWorkerLink
from kvstore_tiers.gpu.regions import Regions
from kvstore_tiers.gpu.transfer_threads import TransferThreads
from kvstore_tiers.gpu.transfers import GpuTransfers
from kvstore_tiers.gpu.worker_life import AUTO, OFF, GpuWorkerSettings
from kvstore_tiers.image import require_slot_size
from kvstore_tiers.segments import buffer_at

MIN_CHUNK_BYTES = 2 << 20  # what devices give out memory by
DEFAULT_CHUNK_BYTES, DEFAULT_BOUNCE_BYTES = 32 << 20, 64 << 20
_LOG = logging.getLogger(__name__)


class GpuTier(ContainerTier):
    """A tier that keeps blocks in `capacity_bytes` bytes of the memory of CUDA device `device`, in chunks of
    `chunk_bytes` bytes, a multiple of 2 MiB. A worker process does the copies; the constructor waits until it is ready.
    `bounce_bytes` of host memory serve copies that cannot be made directly. Chunk numbers begin at `first_number`. With
    a `witness`, a listener that records the chunks for a later process, the blocks stay on the device after `close`.
    Raises OSError with the reason if the worker does not start.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        device: int = 0,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        bounce_bytes: int = DEFAULT_BOUNCE_BYTES,
        name: str = "gpu",
        settings: GpuWorkerSettings | None = None,
        first_number: int = DEVICE_ARENAS,
        witness: ChunkWitness | None = None,
    ) -> None:
        if chunk_bytes <= 0 or chunk_bytes % MIN_CHUNK_BYTES:
            raise ValueError(f"a chunk is a multiple of {MIN_CHUNK_BYTES} bytes, not {chunk_bytes}")
        settings = settings or GpuWorkerSettings()
        self.info = TierInfo(
            name, "gpu", MemoryKind.DEVICE, is_exported=True, container_bytes=chunk_bytes,
            dram_bytes=header_room(capacity_bytes), loads_files=settings.from_files != OFF,
            shares_memory=settings.registers,
        )  # fmt: skip
        self._counters = TransferCounters()
        self._refusals: SimpleQueue[tuple[int, str]] = SimpleQueue()  # from the link's thread
        self._refused, self._refused_at_s, self._regrow_s = "", 0.0, settings.regrow_s
        self._closed = False
        self._regions = Regions(name)
        self._link = GpuWorkerLink(
            device, lambda chunk, why: self._refusals.put((chunk, why)),
            follower=witness, regions=self._regions, settings=settings,
        )  # fmt: skip
        self._chunks = self._containers = Chunks(
            capacity_bytes, chunk_bytes, self._link.device_identity, self._make, self._link.drop_chunk, first_number,
            witness,
        )  # fmt: skip
        self._steps = TransferThreads(max(bounce_bytes, chunk_bytes), 2, name)
        bounce = self._steps.bounce
        self._link.add_region(wire.BOUNCE_REGION, wire.MemoryRegion(bounce.descriptor, 0, bounce.nbytes))
        self._register_bytes = settings.register_bytes
        self._numbers = count(wire.BOUNCE_REGION + 1)
        self._shared: dict[int, list[int]] = {}  # memory in parts, by the number of the first
        self._sharing = threading.Lock()
        self._transfers = GpuTransfers(self._link, self._steps, self._counters, self._regions)
        self._loads = self._make_loads(settings.from_files) if settings.from_files != OFF else None

    def _make_loads(self, way: str) -> FileLoads:
        try:
            loads = FileLoads(self._link, self._steps, self._counters, way)
        except OSError:
            self.close()
            raise
        is_second_best = way == AUTO and not loads.is_direct
        _LOG.log(logging.WARNING if is_second_best else logging.INFO, "%s %s", self.info.name, loads.sentence)
        return loads

    # Places

    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        require_slot_size(nbytes)
        if self._closed:
            return None
        self._hear_refusals()
        return self._chunks.allocate(nbytes, owner)

    def free(self, slot: Slot) -> None:
        self._hear_refusals()
        self._chunks.free(slot)

    def _make(self, chunk: Arena) -> None:
        self._link.add_chunk(chunk.number, chunk.nbytes)

    def _hear_refusals(self) -> None:
        """Take note of chunks that the device had no memory for, since the last time. No more are asked for, for a
        while.
        """
        try:
            while True:
                number, self._refused = self._refusals.get_nowait()
                self._refused_at_s = time.monotonic()
                self._chunks.refuse(number)
        except Empty:
            pass
        if self._refused and time.monotonic() - self._refused_at_s > self._regrow_s:
            self._refused = ""
        self._chunks.may_grow = not self._refused

    # Transfers

    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        require_fits(slot, header, segments)
        self._transfers.write(slot, self._shadow(slot), header, segments, done)

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        self._transfers.read(slot, self._shadow(slot), expect_key, segments, done)

    def loader(self, slot: Slot, expect_key: bytes) -> Load:
        if self._loads is None:
            return super().loader(slot, expect_key)
        return partial(self._loads.load, slot, self._shadow(slot), expect_key)

    def relocate(self, source: Slot, target: Slot, expect_key: bytes, done: Completion) -> None:
        """Copy the block with the key `expect_key` from the slot `source` to the slot `target`. It is copied on the
        device if the device can verify the copy, otherwise through host memory.
        """
        if self._link.can_check:
            shadows = self._shadow(source), self._shadow(target)
            self._transfers.relocate(source, shadows[0], target, shadows[1], expect_key, done)
        else:
            super().relocate(source, target, expect_key, done)

    def _shadow(self, slot: Slot) -> Segment:
        """Return the slot's shadow. Raises RuntimeError for a slot that is not allocated."""
        return self._chunks.of(slot).segment(slot)

    def verify(self, slot: Slot, expect_key: bytes, done: Completion) -> None:
        """Check that `slot` still contains the block with the key `expect_key` as it was written. `done` gets DONE,
        CORRUPT, or FAILED if that cannot be known. If the slot is freed meanwhile, the answer has no meaning.
        """
        self._transfers.verify(slot, self._shadow(slot), expect_key, done)

    @property
    def verifies(self) -> bool:
        """True if the device itself can compute checksums."""
        return self._link.can_check

    def probe(self, done: Completion, *, thorough: bool = True) -> None:
        if self._link.worker.is_up:
            done(Outcome(OutcomeKind.DONE))
        else:
            done(Outcome(OutcomeKind.FAILED, message=DOWN))

    def adopt(self, record: ArenaRecord, shadow: int, memory: int) -> AdoptedArena | None:
        """Take over a chunk (a piece of device memory) of a process that has ended; `record` describes it. `shadow` and
        `memory` are descriptors of its header pages in DRAM and of its device memory; the caller closes both. Return
        None if the capacity has no room. Blocks whose header on the device differs from the header in DRAM are dropped
        and counted as damaged. It waits for the device. Raises ForeignMemory or OSError.
        """
        with contextlib.ExitStack() as undo:
            copies = []
            for _ in range(2):  # before the chunk is in the books
                copies.append(os.dup(memory))
                undo.callback(os.close, copies[-1])
            found = self._chunks.adopt(record, shadow)
            if found is None:
                return None
            undo.pop_all()
        self._link.import_chunk(record.number, record.nbytes, *copies)
        slots = [*found.slots, *found.retired]
        try:
            pages = self._transfers.header_pages(found.slots)
        except OSError:
            for slot in slots:
                self._chunks.free(slot)
            self._chunks.abandon(record.number)
            raise
        holds = [
            page == buffer_at(self._shadow(slot).address, HEADER_BYTES).raw
            for page, slot in zip(pages, found.slots, strict=True)
        ]
        for slot, is_whole in zip(found.slots, holds, strict=True):
            if not is_whole:
                self._chunks.free(slot)
        return found._replace(
            slots=[slot for slot, is_whole in zip(found.slots, holds, strict=True) if is_whole],
            headers=found.headers[np.array(holds, dtype=bool)],
            damaged_slots=found.damaged_slots + holds.count(False),
        )

    def retire(self, slot: Slot) -> None:
        """Mark the block in `slot` as gone. Its bytes stay until `free`, but no later process takes it for a block."""
        self._chunks.of(slot).retire(slot)

    def shadow_of(self, number: int) -> Arena | None:
        """Return the arena in DRAM with the headers of the blocks in chunk `number` (a piece of device memory); None if
        there is no such chunk.
        """
        return self._chunks.get(number)

    def owner(self, number: int) -> str | None:
        """Return the owner of the blocks in chunk `number` (a piece of device memory); None if there is no such
        chunk.
        """
        chunk = self._chunks.get(number)
        return chunk.owner if chunk is not None else None

    def export(self, number: int) -> tuple[int, int]:
        """Return a new descriptor of the device memory of chunk `number`, which the caller closes, and the number of
        its bytes. Another process can import that memory to read it; nothing keeps it from writing. Raises OSError if
        the memory does not exist now.
        """
        descriptor = self._link.descriptor_of(number)
        if descriptor < 0:
            raise OSError(f"chunk {number} of {self.info.name} is not made")
        return descriptor, self._chunks.chunk_bytes

    def share(self, descriptor: int, address: int, nbytes: int) -> int:
        parts: list[int] = []
        with self._sharing:
            for offset in range(0, nbytes, self._register_bytes):
                part_bytes = min(self._register_bytes, nbytes - offset)
                parts.append(next(self._numbers))
                self._regions.add(parts[-1], address + offset, part_bytes)
                self._link.add_region(parts[-1], wire.MemoryRegion(descriptor, offset, part_bytes))
            self._shared[parts[0]] = parts
        return parts[0]

    def unshare(self, number: int, ended: Callable[[], None]) -> None:
        with self._sharing:
            parts = self._shared.pop(number)
        left = count(len(parts) - 1, -1)

        def part_left() -> None:
            if not next(left) and not self._steps.finish(ended):
                ended()

        for part in parts:
            self._regions.drop(part)
        for part in parts:
            self._link.drop_region(part, part_left)

    # Reports

    @property
    def device_identity(self) -> int:
        """The identity of the CUDA device that has the blocks (see `kvstore_cuda.device`)."""
        return self._link.device_identity

    @property
    def worker_process(self) -> int:
        """The process number of the worker; 0 while there is none."""
        return self._link.worker.process_id

    @property
    def worker_starts(self) -> int:
        """The number of worker processes that were started so far."""
        return self._link.worker.starts

    def location(self, slot: Slot) -> str:
        return f"{self.info.name}:{slot.container}+{slot.offset}"

    def statistics(self) -> TierStatistics:
        chunks = self._chunks
        state, message = TierState.OK, self._link.device_name
        if self._link.cannot_check:
            message += f"; what arrives on it is not verified there: {self._link.cannot_check}"
        if self._loads is not None:
            message += f"; {self._loads.sentence}"
        if in_place := self._regions.registered_bytes:
            message += f"; copies {human_bytes(in_place)} of host memory in place"
        if self._regions.refusal:
            message += f"; copies host memory through its bounce buffer: {self._regions.refusal}"
        if self._closed:
            state = TierState.CLOSED
        elif not self._link.worker.is_up:
            state, message = TierState.FAILED, DOWN
        elif self._refused:
            state, message = TierState.FULL, f"the device gives no memory: {self._refused}"
        elif chunks.lacks_headers:
            room = human_bytes(self.info.dram_bytes)
            message += f"; it takes no more blocks that are as small as these: {room} of header pages is the limit"
        used_bytes, blocks_bytes = (0, 0) if self._closed else (chunks.nbytes, chunks.blocks_bytes)
        return self._counters.report(
            TierStatistics(
                state=state,
                capacity_bytes=chunks.capacity_bytes,
                used_bytes=used_bytes,
                blocks=0 if self._closed else chunks.blocks,
                used_by={"blocks": blocks_bytes, "free": used_bytes - blocks_bytes},
                message=message,
            )
        )  # fmt: skip

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._steps.close()
        self._link.close()
        self._steps.bounce.close()
        self._chunks.leave()
