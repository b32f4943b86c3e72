"""Host memory that is shared with the GPU's worker: copied in place once it is registered, by the bounce buffer until
then and where it cannot be, and never touched after it was taken back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.base import OutcomeKind
from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.transfers import block, finish, put
from tests.gpu.emulated import HostCopy, emulated_node, host_copies
from tests.gpu.test_gpu_worker import CHUNK_BYTES, kill_worker, order, wait_for_worker
from tests.reference.held_process import held
from tests.reference.running_daemon import eventually

pytestmark = pytest.mark.slow
MIB = 1 << 20
PAYLOAD_BYTES = 200_000
BOUNCE, ARENA = "/memfd:kvstore-bounce", "/memfd:kvstore-arena-1"


class Pair:
    """A host tier with one arena, which is shared with a GPU tier. `note`: what the driver copied since the last."""

    def __init__(self, directory: Path, *, sealed: bool = False, register_bytes: int = MIB, **variables: str) -> None:
        self._log = directory / "copies"
        self._log.touch()
        self._noted = 0
        self.control = directory / "control"
        self.control.touch()
        node = emulated_node(control=self.control, copies=self._log)
        self.gpu = GpuTier(
            4 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, bounce_bytes=CHUNK_BYTES,
            settings=GpuWorkerSettings(variables=node | variables, patience_s=2.0, register_bytes=register_bytes),
        )  # fmt: skip
        self.host = HostTier(MIB, arena_bytes=MIB, mode="sealed" if sealed else "owned")
        self.header, self.payload = block(1, PAYLOAD_BYTES)
        image = put(self.host, self.header, self.payload)
        assert image is not None
        self.image = image
        self.host.prefault_slice(MIB)

    def share(self) -> None:
        self.host.lend_to([self.gpu])

    def close(self) -> None:
        self.gpu.close()
        self.host.close()

    def noted(self) -> list[HostCopy]:
        before, found = self._noted, host_copies(self._log)
        self._noted = len(found)
        return found[before:]

    def there_and_back(self) -> list[HostCopy]:
        """Copy the block to the device and back to another slot of the arena; what the driver copied for it."""
        self.noted()
        slot, target = self.gpu.allocate(self.image.nbytes), self.host.allocate(self.image.nbytes)
        assert slot is not None and target is not None
        source, key = self.host.slot_segment(self.image), self.header.key
        assert finish(lambda done: self.gpu.move_in(slot, source, key, done)).ok
        moved = finish(lambda done: self.gpu.move_out(slot, self.host.slot_segment(target), key, done))
        assert moved.ok, moved
        copy = np.zeros(PAYLOAD_BYTES, dtype=np.uint8)
        assert finish(lambda done: self.host.read(target, key, [segment_of(copy)], done)).ok
        assert np.array_equal(copy, self.payload)
        self.host.free(target)
        self.gpu.free(slot)
        return self.noted()

    def is_in_place(self) -> bool:
        return "; copies 1.0 MiB of host memory in place" in self.gpu.statistics().message


IN_PLACE = [
    HostCopy(True, HEADER_BYTES, BOUNCE), HostCopy(True, PAYLOAD_BYTES, ARENA),
    HostCopy(False, HEADER_BYTES, BOUNCE), HostCopy(False, PAYLOAD_BYTES, ARENA),
]  # fmt: skip
WHOLE = HEADER_BYTES + PAYLOAD_BYTES
BOUNCED = [HostCopy(True, WHOLE, BOUNCE), HostCopy(False, WHOLE, BOUNCE)]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def open_pair(**options: Any) -> Pair:
        pairs.append(Pair(tmp_path, **options))
        return pairs[-1]

    yield open_pair
    for pair in pairs:
        pair.close()


def test_only_header_pages_pass_the_bounce_buffer_after_a_death_of_the_worker_too(opened: Callable[..., Pair]) -> None:
    pair = opened()
    assert pair.there_and_back() == BOUNCED
    pair.share()
    for starts in (2, 3):
        assert eventually(pair.is_in_place)
        assert sorted(pair.there_and_back()) == sorted(IN_PLACE)
        kill_worker(pair.gpu)
        wait_for_worker(pair.gpu, starts)


def test_a_device_does_not_write_to_sealed_arenas(opened: Callable[..., Pair]) -> None:
    pair = opened(sealed=True)
    pair.share()
    assert eventually(pair.is_in_place)
    assert sorted(pair.there_and_back()) == sorted([*IN_PLACE[:2], BOUNCED[1]])


def test_what_lies_across_two_registrations_goes_by_the_bounce_buffer(opened: Callable[..., Pair]) -> None:
    pair = opened(register_bytes=64 << 10)
    pair.share()
    assert eventually(pair.is_in_place)
    assert pair.there_and_back() == BOUNCED


def test_what_cannot_be_registered_goes_by_the_bounce_buffer(
    opened: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = opened(register_bytes=512 << 10)
    assert pair.there_and_back() == BOUNCED, "the checksums' own memory is registered, too"
    order(pair.control, "cuMemHostRegister:0=2")
    with caplog.at_level(logging.WARNING):
        pair.share()
        assert eventually(lambda: "OUT_OF_MEMORY" in pair.gpu.statistics().message)
        assert pair.there_and_back() == BOUNCED
    warnings = [each for each in caplog.messages if "bounce" in each]
    assert warnings == ["gpu copies host memory through its bounce buffer: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"]
    assert pair.gpu.worker_starts == 1


def test_copies_do_not_wait_for_a_registration_and_memory_is_given_back_when_its_worker_is_dead(
    opened: Callable[..., Pair],
) -> None:
    pair = opened()
    assert pair.there_and_back() == BOUNCED, "the checksums' own memory is registered, too"
    order(pair.control, "cuMemHostRegister:1=hang")
    pair.share()
    assert pair.there_and_back() == BOUNCED
    arena, worker = pair.host.arena(pair.image.container), pair.gpu.worker_process
    pair.host.free(pair.image)
    give_back = pair.host.take_empty()
    assert give_back is not None and arena.held_bytes == MIB
    order(pair.control, "")
    give_back()
    assert arena.fd < 0 and not Path(f"/proc/{worker}").exists(), "the worker that did not answer was killed"
    wait_for_worker(pair.gpu, 2)


def test_memory_is_unregistered_when_no_copy_is_under_way(
    opened: Callable[..., Pair], capfd: pytest.CaptureFixture[str]
) -> None:
    pair = opened(EMULATED_CUDA_DELAY_US="400000", EMULATED_CUDA_SEED="3")
    arena, key, left = pair.host.arena(pair.image.container), pair.header.key, threading.Event()
    number = pair.gpu.share(arena.fd, arena.address, arena.nbytes)
    assert eventually(pair.is_in_place)
    slot, target = pair.gpu.allocate(pair.image.nbytes), pair.host.allocate(pair.image.nbytes)
    assert slot is not None and target is not None
    assert finish(lambda done: pair.gpu.move_in(slot, pair.host.slot_segment(pair.image), key, done)).ok
    pair.noted()
    outcomes: list[OutcomeKind] = []
    pair.gpu.move_out(slot, pair.host.slot_segment(target), key, lambda outcome: outcomes.append(outcome.kind))
    assert eventually(lambda: bool(pair.noted())), "it is queued"
    pair.gpu.unshare(number, left.set)
    assert left.wait(10.0) and eventually(lambda: outcomes == [OutcomeKind.DONE])
    assert "emulated CUDA" not in capfd.readouterr().err
    assert finish(partial(pair.gpu.move_out, slot, pair.host.slot_segment(target), key)).ok
    assert [each.file for each in pair.noted()] == [BOUNCE]
    pair.host.free(target)


def test_memory_that_is_taken_back_is_not_shared_with_the_next_worker(opened: Callable[..., Pair]) -> None:
    pair = opened()
    pair.share()
    assert eventually(pair.is_in_place)
    pair.host.free(pair.image)
    give_back = pair.host.take_empty()
    assert give_back is not None
    kill_worker(pair.gpu)
    give_back()
    wait_for_worker(pair.gpu, 2)
    maps = Path(f"/proc/{pair.gpu.worker_process}/maps")
    assert eventually(lambda: BOUNCE in maps.read_text()) and ARENA not in maps.read_text()


def test_a_copy_that_waited_for_a_worker_does_not_wait_for_its_registrations(
    opened: Callable[..., Pair],
) -> None:
    pair = opened()
    pair.share()
    assert eventually(pair.is_in_place)
    slot, outcomes = pair.gpu.allocate(pair.image.nbytes), list[OutcomeKind]()
    assert slot is not None
    source = pair.host.slot_segment(pair.image)
    with held(pair.gpu.worker_process):
        kill_worker(pair.gpu)
        assert not eventually(lambda: pair.gpu.worker_starts > 1, 0.3), "the last one is not gone"
        pair.gpu.move_in(slot, source, pair.header.key, lambda outcome: outcomes.append(outcome.kind))
        assert not eventually(lambda: bool(outcomes), 0.3)
    assert eventually(lambda: outcomes == [OutcomeKind.DONE])
    assert pair.noted() == BOUNCED[:1]
