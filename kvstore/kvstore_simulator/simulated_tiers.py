"""Tiers without bytes: the contract of a tier, kept in virtual time, so that the daemon's own movement runs on them.

Owns places and capacity of one simulated medium, and when a transfer completes. Never holds a byte: what is read back
is not looked at, and no transfer fails. Each place is a container of its own, since no client maps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_simulator.machine import WITH_FILES
from kvstore_simulator.media import Medium, SimulatedLane
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
from kvstore_tiers.image import FileImage, require_slot_size


class SimulatedTier(Tier):
    """`name`: the configuration's. `coming` is the lane that `move_in` and `write` use, `going` that of `move_out` and
    `read`. `memory`: HOST where other tiers read it in place, FILE where it hands its bytes out."""

    writable: frozenset[int] = frozenset()  # as the host tier's: by no client

    def __init__(
        self,
        name: str,
        medium: Medium,
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
        """As the host tier's: nothing is left for a later process here."""

    def slot_segment(self, slot: Slot) -> Segment:
        """Stands for the slot's memory: of its length, at no address."""
        return Segment(0, slot.nbytes, MemoryKind.FILE)

    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        self._send(self._coming, HEADER_BYTES + sum(segment.nbytes for segment in segments), done)

    def write_many(
        self,
        writes: Sequence[tuple[Slot, BlockHeader, Sequence[Segment]]],
        done: Callable[[Sequence[Outcome]], None],
    ) -> None:
        """As the host tier's: all of them pass at once, and end together."""

        def ended(outcome: Outcome) -> None:
            done([outcome] * len(writes))

        self._send(self._coming, sum(slot.nbytes for slot, _, _ in writes), ended)

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        self._send(self._going, slot.nbytes, done)

    def move_in(self, slot: Slot, source: Segment, expect_key: bytes, done: Completion) -> None:
        self._send(self._coming, slot.nbytes, done)

    def move_out(self, slot: Slot, destination: Segment, expect_key: bytes, done: Completion) -> None:
        self._send(self._going, slot.nbytes, done)

    def lend(self, slot: Slot, load: Load, done: Completion) -> None:
        """The other tier knows when its read ends. There is no file."""
        self._reads += 1
        self._read_bytes += slot.nbytes
        load(FileImage(-1, 0, slot.nbytes - HEADER_BYTES, slot.generation), done)

    def sync(self, done: Completion) -> None:
        """One latency after the last write."""
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
