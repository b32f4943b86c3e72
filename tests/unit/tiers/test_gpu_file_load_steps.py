"""Loads of a GPU tier from files, where the worker changes in their midst. The worker is played by the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from kvstore_proto.arena import HEADER_BYTES, slot_bytes
from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.file_loads import FileLoads
from kvstore_tiers.gpu.link import DOWN, GpuWorkerLink
from kvstore_tiers.gpu.transfer_threads import TransferThreads
from kvstore_tiers.gpu.worker_life import AUTO, BOUNCE
from kvstore_tiers.image import aligned_up
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.segments import AlignedBuffer, buffer_at
from kvstore_tiers.testing.transfers import block, finish
from tests.reference.stored_blocks import stored_slot

PAYLOAD_BYTES = 40_000


class PlayedLink:
    """The part of a link that a load asks: a worker that can checksum and has direct storage, until the test says
    otherwise.
    """

    def __init__(self, steps: TransferThreads) -> None:
        self.can_check, self.cannot_check = True, ""
        self.has_direct_storage, self.no_direct_storage = True, ""
        self._bounce = steps.bounce
        self.when_written: Callable[[], None] = lambda: None
        self.ends: list[wire.End] = []  # of the next loads; none: they go well

    def load(self, load: wire.FileLoad, descriptor: int, ended: Callable[[wire.End], None]) -> None:
        nbytes = HEADER_BYTES + (0 if load.is_direct else aligned_up(load.payload_bytes))
        os.preadv(descriptor, [buffer_at(self._bounce.address + load.region_offset, nbytes)], load.offset)
        os.close(descriptor)
        ended(self.ends.pop(0) if self.ends else wire.End())

    def transfer(
        self, letter: bytes, pieces: Sequence[wire.RegionPiece], ended: Callable[[str], None], *, waits: bool = True
    ) -> None:
        self.when_written()
        ended("")


@pytest.fixture
def steps() -> Iterator[TransferThreads]:
    made = TransferThreads(1 << 20, 2, "gpu")
    yield made
    made.close()
    made.bounce.close()


def load(loads: FileLoads, directory: Path) -> Outcome:
    header, payload = block(1, PAYLOAD_BYTES)
    shadow = AlignedBuffer(HEADER_BYTES).segment(HEADER_BYTES)
    slot = Slot(1, 0, slot_bytes(PAYLOAD_BYTES), 1)
    with closing(NvmeTier.open(directory, 8 << 20, slab_bytes=8 << 20)) as nvme:
        source = stored_slot(nvme, header, payload)
        return finish(
            lambda done: nvme.lend(source, lambda image, end: loads.load(slot, shadow, header.key, image, end), done)
        )


def test_what_neither_the_host_nor_the_device_verified_is_not_readable(steps: TransferThreads, tmp_path: Path) -> None:
    """The worker that wrote the header could checksum, the next one cannot."""
    link = PlayedLink(steps)
    loads = FileLoads(cast(GpuWorkerLink, link), steps, TransferCounters(), BOUNCE)

    def another_worker() -> None:
        link.can_check = False

    link.when_written = another_worker
    outcome = load(loads, tmp_path)
    assert outcome.kind is OutcomeKind.FAILED and "cannot verify" in outcome.message
    assert load(loads, tmp_path).ok, "verified by the host"


def test_one_death_is_counted_once_however_many_loads_the_worker_had(steps: TransferThreads, tmp_path: Path) -> None:
    link = PlayedLink(steps)
    loads = FileLoads(cast(GpuWorkerLink, link), steps, TransferCounters(), AUTO)

    def fail(end: wire.End) -> bool:
        """Fail a load; return whether direct storage is still trusted after it."""
        link.ends.append(end)
        outcome = load(loads, tmp_path)
        assert outcome.kind is OutcomeKind.FAILED and outcome.message == end.failure, "not read again"
        return loads.is_direct

    assert all(fail(wire.End(DOWN, is_down=True, dead_worker=1)) for _ in range(5))
    assert all(fail(wire.End("its worker cannot be started", is_down=True)) for _ in range(5)), "never sent"
    assert fail(wire.End(DOWN, is_down=True, dead_worker=2))
    assert not fail(wire.End(DOWN, is_down=True, dead_worker=3))
    assert "dies of it" in loads.sentence
