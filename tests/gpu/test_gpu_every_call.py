"""Every call of the driver that the GPU's worker makes fails, breaks the context, hangs and kills the worker: each
transfer ends in time, no byte is wrong, no block that was promised is lost, no device memory is, and the tier goes on.

Which calls there are in a situation is what the driver traced of it when nothing failed. A run tries a few of them that
chance chooses; all of them, for an hour:

    KVSTORED_TEST_EVERY_CASE=1 python -m pytest tests/gpu/test_gpu_every_call.py
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore_console.units import human_bytes
from kvstore_proto.arena import slot_bytes
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot, TierState
from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings
from kvstore_tiers.host import HostTier
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.transfers import block, finish, get
from tests.gpu.driver_faults import FAILS, WAYS, Cell, DriverFaults, cells, tried
from tests.gpu.emulated import emulated_node
from tests.gpu.test_emulated_driver import Driver, path
from tests.gpu.test_gpu_worker import kill_worker
from tests.reference.examples import EVERY_CASE, chosen
from tests.reference.nvrtc import need_nvrtc
from tests.reference.running_daemon import eventually
from tests.reference.stored_blocks import stored_slot

__all__ = ["path"]  # the fixture
MEMORY_BYTES, CHUNK_BYTES, CHUNKS = 64 << 20, 2 << 20, 6
PAYLOAD_BYTES = 50_000
KEPT, MOVED, WRITTEN = (1, 2), 3, 4  # numbers of blocks; KEPT are there before and after each failure
PATIENCE_S, START_TIMEOUT_S = 1.0, 10.0
LONGEST_S = 30.0  # of a transfer: patience, the death of a worker that hangs, the start of the next
TRIED = 8  # of the cells of a situation, in one run
LIMIT_S = 0 if EVERY_CASE else 600


class Bench:
    """A tier with two blocks, and where other blocks come from and go to. `memory` is the driver in this process.
    `calls`: what the worker called in the last situation, before its outcome was there."""

    def __init__(
        self, tmp_path: Path, memory: Driver, faults: DriverFaults, variables: dict[str, str], undo: ExitStack
    ) -> None:
        self.memory, self.calls = memory, Counter[str]()
        self.faults = faults
        settings = GpuWorkerSettings(
            variables=variables,
            patience_s=PATIENCE_S,
            file_patience_s=PATIENCE_S,
            start_timeout_s=START_TIMEOUT_S,
            regrow_s=0.0,
        )
        self.tier = undo.enter_context(
            closing(
                GpuTier(
                    CHUNKS * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, bounce_bytes=CHUNK_BYTES, settings=settings,
                )
            )
        )  # fmt: skip
        self.nvme = undo.enter_context(closing(NvmeTier.open(tmp_path / "nvme", 8 << 20, slab_bytes=4 << 20)))
        self.host = undo.enter_context(closing(HostTier(1 << 20, arena_bytes=1 << 20)))
        self.slots = {number: stored_slot(self.tier, *block(number, PAYLOAD_BYTES)) for number in KEPT}
        self.in_file = stored_slot(self.nvme, *block(MOVED, PAYLOAD_BYTES))
        self.in_host = stored_slot(self.host, *block(MOVED, PAYLOAD_BYTES))
        self._shared, self._owners = 0, 0
        self.share()

    def share(self) -> int:
        """The host's arena, once more."""
        arena = self.host.arena(self.in_host.container)
        self._shared += 1
        number, nbytes = self.tier.share(arena.fd, arena.address, arena.nbytes), self._shared * arena.nbytes
        is_said = f"copies {human_bytes(nbytes)} of host memory in place"
        assert eventually(lambda: is_said in self.tier.statistics().message), "it is registered"
        return number

    def unshare(self, number: int, ended: Callable[[], None]) -> None:
        self._shared -= 1
        self.tier.unshare(number, ended)

    def new_slot(self) -> Slot:
        slot = self.tier.allocate(slot_bytes(PAYLOAD_BYTES))
        assert slot is not None
        return slot

    def slot_in_new_memory(self) -> Slot | None:
        """Blocks of an owner have chunks of their own."""
        self._owners += 1
        return self.tier.allocate(slot_bytes(PAYLOAD_BYTES), f"owner{self._owners}")

    def begin(self, rule: str = "") -> None:
        self.faults.begin(rule)

    def end(self) -> None:
        self.calls = self.faults.end()

    def wait_for_worker(self) -> None:
        """Wait for the worker; the device may be full: no memory was there when it asked for some."""
        assert eventually(lambda: self.tier.statistics().state in (TierState.OK, TierState.FULL), LONGEST_S)

    def is_served(self, number: int) -> bool:
        """Return whether a kept block can be read: that may fail, and it is never another one."""
        header, payload = block(number, PAYLOAD_BYTES)
        outcome, copy = get(self.tier, self.slots[number], header.key, PAYLOAD_BYTES)
        assert outcome.kind in (OutcomeKind.DONE, OutcomeKind.FAILED), outcome
        assert not outcome.ok or np.array_equal(copy, payload)
        return outcome.ok

    def verified(self, number: int) -> Outcome:
        """Return what the tier says of a kept block."""
        key = block(number, PAYLOAD_BYTES)[0].key
        outcome = finish(lambda done: self.tier.verify(self.slots[number], key, done))
        assert outcome.kind in (OutcomeKind.DONE, OutcomeKind.FAILED), outcome
        return outcome

    def must_be_sound(self) -> None:
        """The tier serves what it has promised, and has the device's memory that it says."""
        self.wait_for_worker()
        assert eventually(lambda: all(self.is_served(number) for number in KEPT), LONGEST_S), "blocks are not served"
        assert all(self.verified(number).ok for number in KEPT)
        self.tier.free(self.new_slot())  # it hears of memory that was refused
        used_bytes = self.tier.statistics().used_bytes
        assert eventually(lambda: self.used_bytes() == used_bytes, LONGEST_S), (self.used_bytes(), used_bytes)

    def used_bytes(self) -> int:
        return MEMORY_BYTES - self.memory.free_bytes()


@contextmanager
def bench(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    need_nvrtc()
    faults = DriverFaults(tmp_path)
    variables = emulated_node(MEMORY_BYTES, must_emulate=True) | faults.variables
    for name in ("EMULATED_CUDA_NODE", "EMULATED_CUDA_MEMORY"):
        monkeypatch.setenv(name, variables[name])
    memory = Driver(library)
    with ExitStack() as undo:
        yield Bench(tmp_path, memory, faults, variables, undo)
    assert eventually(lambda: memory.free_bytes() == MEMORY_BYTES, LONGEST_S), "of a tier that was closed"


def fill(made: Bench, number: int, slot: Slot, start: Callable[[Completion], None]) -> None:
    """A block comes to a slot: it is there if that was said, else nothing is."""
    outcome = finish(start)
    made.end()
    made.wait_for_worker()
    header, payload = block(number, PAYLOAD_BYTES)
    found, copy = get(made.tier, slot, header.key, PAYLOAD_BYTES)
    if outcome.ok:
        assert found.ok and np.array_equal(copy, payload), found
        os.close(made.tier.export(slot.container)[0])  # so it outlives the worker
    else:
        assert found.kind is OutcomeKind.CORRUPT, "what failed is served"
    made.tier.free(slot)


def write_to(made: Bench, slot: Slot) -> None:
    header, payload = block(WRITTEN, PAYLOAD_BYTES)
    fill(made, WRITTEN, slot, lambda done: made.tier.write(slot, header, [segment_of(payload)], done))


def write(made: Bench, rule: str) -> None:
    slot = made.new_slot()
    made.begin(rule)
    write_to(made, slot)


def write_to_new_memory(made: Bench, rule: str) -> None:
    made.begin(rule)
    slot = made.slot_in_new_memory()
    assert slot is not None
    write_to(made, slot)


def drop(made: Bench, rule: str) -> None:
    """Host memory that was shared, and a chunk, in the place of which another owner gets one."""
    number, held = made.share(), list[Slot]()
    while slot := made.slot_in_new_memory():
        held.append(slot)
    write_to(made, held[0])  # all of that has been made
    for slot in held[1:]:
        made.tier.free(slot)
    made.begin(rule)
    left = threading.Event()
    made.unshare(number, left.set)
    new = made.slot_in_new_memory()
    assert new is not None
    write_to(made, new)
    assert left.wait(LONGEST_S), "the host's memory is given back"


def move_in(made: Bench, rule: str) -> None:
    """Move a block in from memory that the device copies from by itself."""
    slot, image, key = made.new_slot(), made.host.slot_segment(made.in_host), block(MOVED, PAYLOAD_BYTES)[0].key
    made.begin(rule)
    fill(made, MOVED, slot, lambda done: made.tier.move_in(slot, image, key, done))


def load(made: Bench, rule: str) -> None:
    slot, key = made.new_slot(), block(MOVED, PAYLOAD_BYTES)[0].key
    made.begin(rule)
    fill(made, MOVED, slot, lambda done: made.nvme.lend(made.in_file, made.tier.loader(slot, key), done))


def read(made: Bench, rule: str) -> None:
    made.begin(rule)
    made.is_served(KEPT[0])
    made.end()


def move_out(made: Bench, rule: str) -> None:
    header, payload = block(KEPT[0], PAYLOAD_BYTES)
    target = made.host.allocate(slot_bytes(PAYLOAD_BYTES))
    assert target is not None
    image = made.host.slot_segment(target)
    made.begin(rule)
    outcome = finish(lambda done: made.tier.move_out(made.slots[KEPT[0]], image, header.key, done))
    made.end()
    assert outcome.kind in (OutcomeKind.DONE, OutcomeKind.FAILED), outcome
    found, copy = get(made.host, target, header.key, PAYLOAD_BYTES)
    assert found.ok == outcome.ok and (not found.ok or np.array_equal(copy, payload))
    made.host.free(target)


def relocate(made: Bench, rule: str) -> None:
    """A copy of a kept block, which stays where it is."""
    source, target, key = made.slots[KEPT[0]], made.new_slot(), block(KEPT[0], PAYLOAD_BYTES)[0].key
    made.begin(rule)
    fill(made, KEPT[0], target, lambda done: made.tier.relocate(source, target, key, done))


def verify(made: Bench, rule: str) -> None:
    made.begin(rule)
    made.verified(KEPT[0])
    made.end()


def start(made: Bench, rule: str) -> None:
    """A worker dies; the next one gets what this one had, and is used for the first time."""
    starts = made.tier.worker_starts
    made.begin(rule)
    kill_worker(made.tier)
    assert eventually(lambda: made.tier.worker_starts > starts, LONGEST_S)
    key, slot = block(MOVED, PAYLOAD_BYTES)[0].key, made.new_slot()
    used = made.verified(KEPT[0]).ok or (rule and eventually(lambda: made.faults.has_met, LONGEST_S))
    assert used, "a read waits for the next worker"
    fill(made, MOVED, slot, lambda done: made.nvme.lend(made.in_file, made.tier.loader(slot, key), done))


SITUATIONS: dict[str, Callable[[Bench, str], None]] = {
    each.__name__: each
    for each in (write, read, move_in, move_out, relocate, verify, load, write_to_new_memory, drop, start)
}  # fmt: skip


def cells_of(made: Bench, situation: Callable[[Bench, str], None]) -> list[Cell]:
    """Return the cells of a worker that has done it before."""
    for _ in range(2):
        starts = made.tier.worker_starts
        situation(made, "")
    made.must_be_sound()
    assert made.tier.worker_starts == starts + (situation is start), "this machine has no time for it"
    return cells(made.calls)


def must_survive(made: Bench, situation: Callable[[Bench, str], None], cell: Cell, further: str = "") -> None:
    """Tried again where it was not called: threads of the worker take turns at some."""
    for _ in range(3):
        began_s = time.monotonic()
        situation(made, f"{cell.rule} {further}")
        took_s = time.monotonic() - began_s
        assert took_s < LONGEST_S, f"took {took_s:.1f} s"
        made.must_be_sound()
        if made.calls[f"{cell.call}={cell.what}"]:
            return
    pytest.fail("it was not called")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("name", SITUATIONS)
def test_every_call_may_fail(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with bench(tmp_path, path, monkeypatch) as made:
        for cell in chosen(cells_of(made, SITUATIONS[name]), TRIED):
            with tried(cell):
                must_survive(made, SITUATIONS[name], cell)


@pytest.mark.slow
def test_a_call_that_fails_once_needs_no_other_worker(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick part of what is above."""
    with bench(tmp_path, path, monkeypatch) as made:
        for situation in (write, read, relocate, verify):
            for cell in cells_of(made, situation):
                if cell.what == FAILS and cell.call != "run":  # what fails on the device breaks the context
                    with tried(cell):
                        must_survive(made, situation, cell)
        assert made.tier.worker_starts == 1


@pytest.mark.slow
def test_so_may_the_call_that_names_an_error(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(tmp_path, path, monkeypatch) as made:
        for what in WAYS:
            must_survive(made, write, Cell("cuGetErrorName", 1, what), "cuEventRecord:1=801")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["cuStreamCreate:0=801", "cuMemGetInfo:0=hang", "cuInit:0=kill"])
def test_a_first_worker_that_does_not_start_is_an_error(tmp_path: Path, rule: str) -> None:
    control = tmp_path / "control"
    control.write_text(rule)
    settings = GpuWorkerSettings(variables=emulated_node(control=control), start_timeout_s=5.0)
    with pytest.raises(OSError, match="its worker"):
        GpuTier(CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, settings=settings)
