"""The GPU's worker dies, hangs and runs out of memory; the tier goes on, and blocks are still there."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_proto.arena import slot_bytes
from kvstore_tiers.base import Completion, OutcomeKind, Slot, TierState
from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings
from kvstore_tiers.gpu.link import DOWN
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import AlignedBuffer, segment_of
from kvstore_tiers.testing.transfers import block, finish, finish_all, get, put
from tests.gpu.emulated import emulated_node
from tests.reference.free_device_memory import free_bytes
from tests.reference.held_process import held
from tests.reference.running_daemon import eventually

pytestmark = pytest.mark.slow
CHUNK_BYTES = 2 << 20
PAYLOAD_BYTES = 50_000
PATIENCE_S = 30.0


@pytest.fixture
def control(tmp_path: Path) -> Path:
    """The file that orders failures; empty at first."""
    path = tmp_path / "control"
    path.touch()
    return path


def order(control: Path, rules: str) -> None:
    scratch = control.with_suffix(".new")
    scratch.write_text(rules)
    os.replace(scratch, control)


def open_tier(control: Path | None = None, *, capacity_bytes: int = 4 * CHUNK_BYTES, **settings: Any) -> GpuTier:
    return GpuTier(
        capacity_bytes, chunk_bytes=CHUNK_BYTES, bounce_bytes=CHUNK_BYTES,
        settings=GpuWorkerSettings(variables=emulated_node(control=control), **settings),
    )  # fmt: skip


@contextlib.contextmanager
def tier_of_blocks(control: Path | None, count: int) -> Iterator[tuple[GpuTier, dict[int, Slot]]]:
    with closing(open_tier(control)) as tier:
        slots: dict[int, Slot] = {}
        for number in range(1, count + 1):
            slot = put(tier, *block(number, PAYLOAD_BYTES))
            assert slot is not None
            slots[number] = slot
        yield tier, slots


def must_hold(tier: GpuTier, slots: dict[int, Slot]) -> None:
    for number, slot in slots.items():
        header, payload = block(number, PAYLOAD_BYTES)
        outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
        assert outcome.ok, outcome
        assert np.array_equal(copy, payload)


def kill_worker(tier: GpuTier) -> None:
    process = tier.worker_process
    assert process > 0
    os.kill(process, signal.SIGKILL)


def wait_for_worker(tier: GpuTier, starts: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while tier.worker_starts < starts or tier.statistics().state is not TierState.OK:
        assert time.monotonic() < deadline_s, "no worker came back"
        time.sleep(0.01)


def wait_for_state(tier: GpuTier, state: TierState) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while tier.statistics().state is not state:
        assert time.monotonic() < deadline_s, f"it is not {state}"
        time.sleep(0.01)


def test_a_transfer_under_way_fails_when_the_worker_dies(control: Path) -> None:
    with tier_of_blocks(control, 2) as (tier, slots):
        order(control, "run:1=kill")
        header, payload = block(1, PAYLOAD_BYTES)
        outcome, _ = get(tier, slots[1], header.key, payload.nbytes)
        assert outcome.kind is OutcomeKind.FAILED
        order(control, "")
        wait_for_worker(tier, 2)
        must_hold(tier, slots)
        assert tier.statistics().errors == 1


def test_a_worker_that_hangs_is_replaced(control: Path) -> None:
    with closing(open_tier(control, patience_s=0.5)) as tier:
        header, payload = block(1, PAYLOAD_BYTES)
        slot = put(tier, header, payload)
        assert slot is not None
        order(control, "run:1=hang")
        assert get(tier, slot, header.key, payload.nbytes)[0].kind is OutcomeKind.FAILED
        order(control, "")
        wait_for_worker(tier, 2)
        must_hold(tier, {1: slot})


def test_more_chunks_than_the_socket_holds_keep_nobody_waiting(control: Path) -> None:
    """A worker hears of them while it starts, and one that hangs reads nothing."""
    settings: dict[str, Any] = {"socket_bytes": 1, "start_timeout_s": 4.0, "capacity_bytes": 16 * CHUNK_BYTES}
    with closing(open_tier(control, **settings)) as tier:
        slots = {at: tier.allocate(slot_bytes(PAYLOAD_BYTES), f"owner{at}") for at in range(14)}
        blocks = {at: slot for at, slot in slots.items() if slot is not None}
        for at, slot in blocks.items():
            header, payload = block(at, PAYLOAD_BYTES)
            assert finish(partial(tier.write, slot, header, [segment_of(payload)])).ok
        order(control, "cuInit:0=hang")
        kill_worker(tier)
        asked = threading.Thread(target=tier.allocate, args=(slot_bytes(PAYLOAD_BYTES), "another"), daemon=True)
        is_killed = eventually(lambda: tier.worker_starts >= 3, PATIENCE_S)
        asked.start()
        asked.join(PATIENCE_S)
        order(control, "")
        assert is_killed and not asked.is_alive(), "who asks for memory waits for the worker"
        wait_for_worker(tier, 3)
        must_hold(tier, blocks)


def test_a_worker_that_hangs_at_what_it_is_told_first_is_replaced(control: Path) -> None:
    """The worker takes 64 packets at a time, and its socket a few more. A transfer waits behind the
    rest: it owes none.
    """
    chunks = 100
    capacity_bytes, variables = chunks * CHUNK_BYTES, emulated_node(2 * chunks * CHUNK_BYTES, control)
    settings = GpuWorkerSettings(variables=variables, socket_bytes=1, patience_s=4.0)
    with closing(GpuTier(capacity_bytes, chunk_bytes=CHUNK_BYTES, settings=settings)) as tier:
        for at in range(chunks - 1):
            assert tier.allocate(CHUNK_BYTES, f"owner{at}") is not None
        header, payload = block(1, PAYLOAD_BYTES)
        slot = put(tier, header, payload)
        assert slot is not None
        order(control, "cuMemImportFromShareableHandle:1=hang")
        kill_worker(tier)
        assert eventually(lambda: tier.worker_starts == 2)
        reading = threading.Thread(target=get, args=(tier, slot, header.key, payload.nbytes), daemon=True)
        reading.start()
        is_replaced = eventually(lambda: tier.worker_starts == 3, PATIENCE_S)
        order(control, "")
        if not is_replaced:
            kill_worker(tier)  # else this test would not end
        reading.join(PATIENCE_S)
        assert is_replaced and not reading.is_alive()
        must_hold(tier, {1: slot})


def test_a_killed_worker_that_does_not_go_is_down_and_may_still_write(control: Path) -> None:
    """The packets sent to the worker end when it has gone: its memory is used anew then."""
    with tier_of_blocks(control, 1) as (tier, slots):
        key, ended = block(1, PAYLOAD_BYTES)[0].key, threading.Event()
        memory = AlignedBuffer(PAYLOAD_BYTES).segment(PAYLOAD_BYTES)
        with held(tier.worker_process):
            order(control, "run:1=kill")
            tier.read(slots[1], key, [memory], lambda _: ended.set())
            wait_for_state(tier, TierState.FAILED)
            assert not ended.is_set()
            assert get(tier, slots[1], key, PAYLOAD_BYTES)[0].message == DOWN, "does not wait"
            assert not ended.is_set()
            order(control, "")
        assert ended.wait(PATIENCE_S)
        wait_for_worker(tier, 2)
        must_hold(tier, slots)


def test_a_broken_context_is_replaced(control: Path) -> None:
    with tier_of_blocks(control, 2) as (tier, slots):
        order(control, "run:1=700")
        header, payload = block(1, PAYLOAD_BYTES)
        assert get(tier, slots[1], header.key, payload.nbytes)[0].kind is OutcomeKind.FAILED
        order(control, "")
        wait_for_worker(tier, 2)
        must_hold(tier, slots)


@pytest.mark.parametrize("call", ["cuEventRecord", "cuMemcpyHtoDAsync"])
def test_a_call_that_fails_once_fails_one_transfer(control: Path, call: str) -> None:
    with tier_of_blocks(control, 1) as (tier, slots):
        order(control, f"{call}:1=801")
        header, payload = block(2, PAYLOAD_BYTES)
        slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
        assert slot is not None
        source = HostTier(1 << 20, arena_bytes=1 << 20)
        with closing(source):
            image = put(source, header, payload)
            assert image is not None
            moved = finish(lambda done: tier.move_in(slot, source.slot_segment(image), header.key, done))
        assert moved.kind is OutcomeKind.FAILED and "NOT_SUPPORTED" in moved.message
        assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].kind is OutcomeKind.CORRUPT, "what failed is not served"
        must_hold(tier, slots)
        assert tier.worker_starts == 1


def test_a_full_device_is_a_full_tier(control: Path) -> None:
    with closing(open_tier(control)) as tier:
        order(control, "cuMemCreate:1=2")
        header, _ = block(1, PAYLOAD_BYTES)
        slot = tier.allocate(slot_bytes(PAYLOAD_BYTES))
        assert slot is not None
        source = block(1, PAYLOAD_BYTES)[1]
        outcome = finish(lambda done: tier.write(slot, header, [segment_of(source)], done))
        assert outcome.kind is OutcomeKind.FAILED and "OUT_OF_MEMORY" in outcome.message
        tier.free(slot)
        assert tier.allocate(8192) is None
        statistics = tier.statistics()
        assert statistics.state is TierState.FULL and statistics.used_bytes == 0


def test_arenas_that_are_shared_are_copied_in_place() -> None:
    """The copies go without a bounce, and in both directions; after a restart of the worker too."""
    with closing(open_tier()) as tier, closing(HostTier(1 << 20, arena_bytes=1 << 20)) as host:
        header, payload = block(1, PAYLOAD_BYTES)
        image = put(host, header, payload)
        assert image is not None
        arena = host.arena(image.container)
        number = tier.share(arena.fd, arena.address, arena.nbytes)
        slot = tier.allocate(image.nbytes)
        assert slot is not None
        for restarts in (1, 2):
            target = host.allocate(image.nbytes)
            assert target is not None
            assert finish(lambda done: tier.move_in(slot, host.slot_segment(image), header.key, done)).ok  # noqa: B023
            moved = finish(lambda done: tier.move_out(slot, host.slot_segment(target), header.key, done))  # noqa: B023
            assert moved.ok, moved
            outcome, copy = get_of_host(host, target, header.key)
            assert outcome and np.array_equal(copy, payload)
            host.free(target)
            tier.free(slot)
            slot = tier.allocate(image.nbytes)
            assert slot is not None
            kill_worker(tier)
            wait_for_worker(tier, restarts + 1)
        tier.unshare(number, lambda: None)


def get_of_host(host: HostTier, slot: Slot, key: bytes) -> tuple[bool, np.ndarray]:
    copy = np.zeros(PAYLOAD_BYTES, dtype=np.uint8)
    return finish(lambda done: host.read(slot, key, [segment_of(copy)], done)).ok, copy


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(OSError, match="there is no CUDA device 7: this machine has 2"):
        GpuTier(
            CHUNK_BYTES,
            device=7,
            chunk_bytes=CHUNK_BYTES,
            settings=GpuWorkerSettings(variables=emulated_node(must_emulate=True)),
        )


def test_a_machine_without_a_driver_is_named() -> None:
    variables = emulated_node(must_emulate=True) | {"LD_LIBRARY_PATH": ""}
    with pytest.raises(OSError, match=r"libcuda\.so\.1 cannot be loaded"):
        GpuTier(CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, settings=GpuWorkerSettings(variables=variables))


def test_no_block_and_no_byte_is_lost_over_many_deaths(control: Path) -> None:
    """The worker is killed again and again, at rest and while it copies."""
    with tier_of_blocks(control, 20) as (tier, slots):
        used_bytes = tier.statistics().used_bytes
        for death in range(20):
            starts = tier.worker_starts
            if death % 2:
                kill_worker(tier)
            else:
                order(control, "run:1=kill")
                outcomes = finish_all([partial(start_read, tier, slot, number) for number, slot in slots.items()])
                order(control, "")
                assert any(outcome.kind is OutcomeKind.FAILED for outcome in outcomes)
            wait_for_worker(tier, starts + 1)
            must_hold(tier, slots)
        assert tier.statistics().used_bytes == used_bytes


def start_read(tier: GpuTier, slot: Slot, number: int, done: Completion) -> None:
    key = block(number, PAYLOAD_BYTES)[0].key
    tier.read(slot, key, [AlignedBuffer(PAYLOAD_BYTES).segment(PAYLOAD_BYTES)], done)


def test_no_device_memory_is_lost_when_workers_die() -> None:
    variables = emulated_node()
    before_bytes = free_bytes(variables=variables)
    tier = GpuTier(
        4 * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        bounce_bytes=CHUNK_BYTES,
        settings=GpuWorkerSettings(variables=variables),
    )
    slots: dict[int, Slot] = {}
    with closing(tier):
        for starts in range(2, 7):
            slots[starts] = put(tier, *block(starts, PAYLOAD_BYTES)) or pytest.fail("no room")
            kill_worker(tier)
            wait_for_worker(tier, starts)
        must_hold(tier, slots)
        assert free_bytes(variables=variables) < before_bytes
    assert free_bytes(before_bytes, variables) >= before_bytes
