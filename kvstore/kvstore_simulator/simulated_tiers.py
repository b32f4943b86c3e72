"""Tiers without bytes, and the media under them: they keep the contract of a tier in virtual time, so that the daemon's
own movement runs on them.

A transfer passes two media. It queues, first come first served, at the slower of the two; the other one only counts its
bytes. In the queue it first takes one of `parallel` places, waits out the latency, then has the medium to itself for as
long as its bytes take. Many small transfers are bound by latency and places, few large ones by bandwidth. The times of
a transfer are known when it is sent, since transfers keep their order.

The module owns places and capacity of one simulated medium, and the time when a transfer completes. It holds no bytes:
reads return none, and no transfer fails. Each place is a container of its own, since no client maps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace

from kvstore_proto.arena import DEVICE_ARENAS, HEADER_BYTES, BlockHeader
from kvstore_simulator.machine import ENGINE, GPU, WITH_FILES, MediumSpec
from kvstore_simulator.virtual_time import VirtualLoop
from kvstore_tiers.base import (
    Completion,
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
)
from kvstore_tiers.containers import SingleSlots
from kvstore_tiers.host_transfers import ImageRun
from kvstore_tiers.image import FileImage, require_slot_size
from kvstored.clock import NS_PER_S


@dataclass(slots=True)
class _Line:
    """The queue of a medium: one for both directions, or one for each."""

    free_ns: int = 0


@dataclass(slots=True)
class Pipe:
    """One direction of a simulated medium. `busy_ns` is the time in nanoseconds in which bytes moved, without waiting
    and latency.
    """

    bytes_per_s: float
    line: _Line
    nbytes: int = 0
    busy_ns: int = 0

    def took_ns(self, nbytes: int) -> int:
        return round(nbytes * NS_PER_S / self.bytes_per_s)

    def count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.busy_ns += self.took_ns(nbytes)


class SimulatedMedium:
    """One medium of a machine, with a queue for each direction or one queue for both."""

    def __init__(self, spec: MediumSpec) -> None:
        self.spec = spec
        line = _Line()
        self.reading = Pipe(spec.read_bytes_per_s, line)
        self.writing = Pipe(spec.write_bytes_per_s, _Line() if spec.duplex else line)
        self.latency_ns = round(spec.latency_s * NS_PER_S)
        self.places = [0] * spec.parallel  # a heap: when each is free

    @property
    def busy_ns(self) -> int:
        """The nanoseconds in which bytes moved: in the busier direction if each direction has its own queue, otherwise
        in both together.
        """
        reading, writing = self.reading.busy_ns, self.writing.busy_ns
        return max(reading, writing) if self.spec.duplex else reading + writing


@dataclass(frozen=True, slots=True)
class Passage:
    """The begin and end of a simulated transfer: when its first bytes begin to move, and when its last bytes have
    arrived.
    """

    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class SimulatedLane:
    """A queue of transfers from one medium to another. `moved` has the end and the bytes of each transfer, for
    plots.
    """

    name: str
    source: SimulatedMedium
    target: SimulatedMedium
    nbytes: int = 0
    transfers: int = 0
    waited_ns: int = 0
    moved: list[tuple[int, int]] = field(default_factory=list)

    def send(self, nbytes: int, now_ns: int) -> Passage:
        """Queue a transfer of `nbytes` and return its times."""
        reading, writing = self.source.reading, self.target.writing
        is_source_slower = reading.bytes_per_s <= writing.bytes_per_s
        medium, pipe = (self.source, reading) if is_source_slower else (self.target, writing)
        place_ns = max(now_ns, medium.places[0])
        begin_ns = max(place_ns + medium.latency_ns, pipe.line.free_ns)
        end_ns = begin_ns + pipe.took_ns(nbytes)
        if self.source is self.target and not medium.spec.duplex:
            end_ns += (writing if pipe is reading else reading).took_ns(nbytes)  # each byte passes twice
        heapreplace(medium.places, end_ns)
        pipe.line.free_ns = end_ns
        reading.count(nbytes)
        writing.count(nbytes)
        self.nbytes += nbytes
        self.transfers += 1
        self.waited_ns += begin_ns - medium.latency_ns - now_ns
        self.moved.append((end_ns, nbytes))
        return Passage(begin_ns, end_ns)


class SimulatedTier(Tier):
    """A storage tier without bytes, in which transfers take virtual time. `name` is its name in the configuration.
    Writes and moves into it use the lane `coming`, reads and moves out of it the lane `going`. `memory` is SYSTEM if
    other tiers read its slots in place, and FILE if it copies them out.
    """

    writable: frozenset[int] = frozenset()  # as the host tier's: by no client

    def __init__(
        self,
        name: str,
        medium: SimulatedMedium,
        capacity_bytes: int,
        loop: VirtualLoop,
        coming: SimulatedLane,
        going: SimulatedLane,
        memory: MemoryKind = MemoryKind.FILE,
        is_mapped: bool = False,
    ) -> None:
        self.medium = medium
        is_durable = memory is MemoryKind.FILE
        self.info = TierInfo(
            name, medium.spec.name, memory, is_durable=is_durable, is_mapped=is_mapped,
            lends_files=is_durable and medium.spec.name in WITH_FILES,
        )  # fmt: skip
        self._loop = loop
        self._coming, self._going = coming, going
        self._slots = SingleSlots(capacity_bytes)
        self._reads = self._writes = self._read_bytes = self._written_bytes = 0
        self._written_ns = 0  # when the last write ends

    @property
    def used_bytes(self) -> int:
        return self._slots.used_bytes

    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        require_slot_size(nbytes)
        return self._slots.take(nbytes)

    def free(self, slot: Slot) -> None:
        self._slots.free(slot)

    def retire(self, slot: Slot) -> None:
        """Do nothing, as the host tier does, because no later process could use the slot."""

    def slot_segment(self, slot: Slot) -> Segment:
        """Return a segment that stands for the slot's memory. It has a length and no address."""
        return Segment(0, slot.nbytes, MemoryKind.FILE)

    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        self._send(self._coming, HEADER_BYTES + sum(segment.nbytes for segment in segments), done)

    def write_many(self, images: ImageRun, done: Callable[[Sequence[Outcome]], None]) -> None:
        """Start all writes at once, as the host tier does. They end together."""

        def ended(outcome: Outcome) -> None:
            done([outcome] * len(images))

        self._send(self._coming, sum(slot.nbytes for slot in images.slots), ended)

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        self._send(self._going, slot.nbytes, done)

    def move_in(self, slot: Slot, source: Segment, expect_key: bytes, done: Completion) -> None:
        self._send(self._coming, slot.nbytes, done)

    def move_out(self, slot: Slot, destination: Segment, expect_key: bytes, done: Completion) -> None:
        self._send(self._going, slot.nbytes, done)

    def lend(self, slot: Slot, load: Load, done: Completion) -> None:
        """Lend the slot to another tier, which reads it and knows when its read ends. Nothing else is done, because
        there is no file to lend.
        """
        self._reads += 1
        self._read_bytes += slot.nbytes
        load(FileImage(-1, 0, slot.nbytes - HEADER_BYTES, slot.generation), done)

    def sync(self, done: Completion) -> None:
        """Call `done` one latency after the last write."""
        written_ns = max(self._loop.now_ns(), self._written_ns)
        self._loop.at_ns(written_ns + self.medium.latency_ns, done, Outcome(OutcomeKind.DONE))

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            TierState.OK, self._slots.capacity_bytes, self._slots.used_bytes, len(self._slots),
            bytes_read=self._read_bytes, bytes_written=self._written_bytes, reads=self._reads, writes=self._writes,
            used_by={"blocks": self._slots.used_bytes},
        )  # fmt: skip

    def close(self) -> None:
        pass

    def _send(self, lane: SimulatedLane, nbytes: int, done: Completion) -> None:
        is_write = lane is not self._going
        if is_write:
            self._writes += 1
            self._written_bytes += nbytes
        else:
            self._reads += 1
            self._read_bytes += nbytes
        passage = lane.send(nbytes, self._loop.now_ns())
        if is_write:
            self._written_ns = max(self._written_ns, passage.end_ns)
        self._loop.at_ns(passage.end_ns, done, Outcome(OutcomeKind.DONE, nbytes=nbytes))


class SimulatedGpuTier(SimulatedTier):
    """A GPU tier without bytes, in which transfers take virtual time. Its blocks are in the device memory `medium`, and
    an engine on that device copies them at the speed of that memory. Other copies use `link`, the engine's own link
    between `host` and device memory. The device also reads blocks from `nvme` over it, without DRAM; if `nvme` is None,
    it reads none.
    """

    def __init__(
        self,
        name: str,
        medium: SimulatedMedium,
        capacity_bytes: int,
        loop: VirtualLoop,
        link: SimulatedMedium,
        host: SimulatedMedium,
        nvme: SimulatedMedium | None = None,
    ) -> None:
        top = host.spec.name
        self.up = SimulatedLane(f"{GPU}\N{RIGHTWARDS ARROW}{top}", link, host)
        self.down = SimulatedLane(f"{top}\N{RIGHTWARDS ARROW}{GPU}", host, link)
        self.to_engine = SimulatedLane(f"{GPU}\N{RIGHTWARDS ARROW}{ENGINE}", medium, medium)
        self.nvme_to_gpu: SimulatedLane | None = None
        if nvme is not None:
            self.nvme_to_gpu = SimulatedLane(f"{nvme.spec.name}\N{RIGHTWARDS ARROW}{GPU}", nvme, link)
        super().__init__(name, medium, capacity_bytes, loop, self.down, self.up, MemoryKind.DEVICE)
        self.info = TierInfo(name, GPU, MemoryKind.DEVICE, is_exported=True, loads_files=nvme is not None)
        self._slots = SingleSlots(capacity_bytes, DEVICE_ARENAS)

    def loader(self, slot: Slot, expect_key: bytes) -> Load:
        lane = self.nvme_to_gpu
        if lane is None:
            return super().loader(slot, expect_key)

        def load(image: FileImage, ended: Completion) -> None:
            self._send(lane, slot.nbytes, ended)

        return load

    def owner(self, container: int) -> str | None:
        """Return None for every chunk, because no simulated chunk belongs to a tenant."""
        return "" if container > DEVICE_ARENAS else None
