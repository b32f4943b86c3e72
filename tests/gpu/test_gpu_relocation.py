"""Blocks that are copied from one slot of device memory to another: on the device, verified there, or not at all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvstore_proto.arena import HEADER_BYTES, slot_bytes
from kvstore_tiers.base import Completion, Outcome, OutcomeKind, Slot
from kvstore_tiers.child_processes import receive_packet, send_packet
from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings, wire
from kvstore_tiers.testing.transfers import block, finish, finish_all, get, put
from tests.gpu.emulated import HostCopy, emulated_node, host_copies
from tests.gpu.test_gpu_export import overwrite
from tests.gpu.test_gpu_shared_memory import BOUNCE
from tests.gpu.test_gpu_worker import CHUNK_BYTES, order, wait_for_worker
from tests.reference.nvrtc import need_nvrtc

pytestmark = pytest.mark.slow
PAYLOAD_BYTES = 12 * 4096  # whole pages: the last byte of an image is one of its payload


@pytest.fixture(autouse=True)
def compiler() -> None:
    need_nvrtc()


@contextmanager
def opened(variables: dict[str, str], **settings: bool) -> Iterator[GpuTier]:
    chosen = GpuWorkerSettings(variables=variables, **settings)
    with closing(
        GpuTier(4 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, bounce_bytes=CHUNK_BYTES, settings=chosen)
    ) as tier:  # fmt: skip
        yield tier


def stored(tier: GpuTier, number: int = 1) -> Slot:
    slot = put(tier, *block(number, PAYLOAD_BYTES))
    assert slot is not None
    return slot


def new_slot(tier: GpuTier, owner: str = "") -> Slot:
    slot = tier.allocate(slot_bytes(PAYLOAD_BYTES), owner)
    assert slot is not None
    return slot


def start(tier: GpuTier, source: Slot, target: Slot, number: int, done: Completion) -> None:
    tier.relocate(source, target, block(number, PAYLOAD_BYTES)[0].key, done)


def relocated(tier: GpuTier, source: Slot, target: Slot, number: int = 1) -> Outcome:
    return finish(partial(start, tier, source, target, number))


def found(tier: GpuTier, slot: Slot, number: int = 1) -> Outcome:
    header, payload = block(number, PAYLOAD_BYTES)
    outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
    if outcome.ok:
        assert np.array_equal(copy, payload)
        assert outcome.header is not None
        assert (outcome.header.generation, outcome.header.tokens) == (slot.generation, header.tokens)
    return outcome


def is_empty(tier: GpuTier, slot: Slot) -> bool:
    """Return whether the tier says of itself that no block was written there."""
    outcome = found(tier, slot)
    return outcome.kind is OutcomeKind.CORRUPT and "no such block was written" in outcome.message


@pytest.mark.parametrize("owner", ["", "another chunk"])
def test_no_byte_of_the_payload_is_in_host_memory(tmp_path: Path, owner: str) -> None:
    log, trace = tmp_path / "copies", tmp_path / "trace"
    log.touch()
    with opened(emulated_node(copies=log, trace=trace)) as tier:
        source, before = stored(tier), tier.statistics()
        tier.free(new_slot(tier))  # the next one is in its second use
        target = new_slot(tier, owner)
        assert (source.container == target.container) == (not owner)
        log.write_text("")
        trace.write_text("")
        outcome = relocated(tier, source, target)
        assert outcome.ok and outcome.header is not None and outcome.header.generation == target.generation
        assert host_copies(log) == [HostCopy(True, HEADER_BYTES, BOUNCE)]
        assert trace.read_text().split().count("cuMemcpyDtoDAsync") == 1
        after = tier.statistics()
        assert (after.writes, after.reads) == (before.writes + 1, before.reads)
        assert after.bytes_written == before.bytes_written + PAYLOAD_BYTES
        assert found(tier, source).ok and found(tier, target).ok
        tier.free(source)
        assert finish(lambda done: tier.verify(target, block(1, PAYLOAD_BYTES)[0].key, done)).ok


def test_neighbours_that_come_together_are_one_run(tmp_path: Path) -> None:
    """The worker takes together what waits for it when it starts. A driver without batches gets each run in a call."""
    trace, page = tmp_path / "trace", 4096
    variables = emulated_node(trace=trace, must_emulate=True) | {"EMULATED_CUDA_VERSION": "12040"}
    packets = [wire.pack(wire.CREATE, number, CHUNK_BYTES) for number in (1, 2)]
    for number in range(8):  # the last one comes from elsewhere
        source = number * page if number < 7 else 100 * page
        packets.append(wire.pack_transfer(wire.MOVE, number, [wire.ChunkMove(1, source, 2, number * page, page)]))
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, others:
        for packet in packets:
            send_packet(own, packet)
        own.settimeout(60)
        command = [sys.executable, "-m", "kvstore_tiers.gpu.worker", "--socket", str(others.fileno()), "--device", "0"]
        with subprocess.Popen(command, pass_fds=[others.fileno()], env=os.environ | variables):
            others.close()
            ended: set[int] = set()
            while len(ended) < 8:
                packet, descriptors = receive_packet(own, wire.MAX_PACKET_BYTES)
                assert packet
                for descriptor in descriptors:
                    os.close(descriptor)
                if packet[:1] == wire.ENDED:
                    number, end = wire.unpack_end(packet)
                    assert not end.failure
                    ended.add(number)
            own.close()
    assert trace.read_text().split().count("cuMemcpyDtoDAsync") == 2


@pytest.mark.parametrize("part", ["payload", "last byte", "header"])
def test_a_damaged_block_is_corrupt_and_its_copy_is_not_served(tmp_path: Path, part: str) -> None:
    node = emulated_node()
    with opened(node) as tier:
        source, target = stored(tier), new_slot(tier)
        at = {"payload": HEADER_BYTES, "last byte": HEADER_BYTES + PAYLOAD_BYTES - 1, "header": 100}[part]
        written = int(block(1, PAYLOAD_BYTES)[1][at - HEADER_BYTES]) if part != "header" else 1
        overwrite(tier, node, source.container, source.offset + at, bytes([written ^ 255]), tmp_path / "data")
        outcome = relocated(tier, source, target)
        assert outcome.kind is OutcomeKind.CORRUPT and outcome.header is None
        assert tier.statistics().corrupt == 1
        assert is_empty(tier, target)
        other, place = stored(tier, 2), target
        assert relocated(tier, other, place, 2).ok and found(tier, place, 2).ok


def test_another_block_than_was_expected_is_not_copied() -> None:
    with opened(emulated_node()) as tier:
        source, target = stored(tier), new_slot(tier)
        assert relocated(tier, source, target, 2).kind is OutcomeKind.CORRUPT
        assert relocated(tier, target, new_slot(tier)).kind is OutcomeKind.CORRUPT, "nothing was written there"
        assert found(tier, target).kind is found(tier, target, 2).kind is OutcomeKind.CORRUPT
        assert found(tier, source).ok


@contextmanager
def ordered(directory: Path) -> Iterator[tuple[GpuTier, Path, Slot, Slot]]:
    """A tier, the file that orders failures of its driver, a slot with a block and an empty one."""
    control = directory / "control"
    control.touch()
    with opened(emulated_node(control=control)) as tier:
        yield tier, control, stored(tier), new_slot(tier)


@pytest.mark.parametrize("step", [1, 2])
def test_other_bytes_than_were_sent_are_no_fault_of_the_source(tmp_path: Path, step: int) -> None:
    """The other bytes are in the image, or in the header page."""
    with ordered(tmp_path) as (tier, control, source, target):
        order(control, f"run:{step}=spoil")
        outcome = relocated(tier, source, target)
        assert outcome.kind is OutcomeKind.FAILED and "other bytes arrived" in outcome.message
        assert is_empty(tier, target)
        order(control, "")
        assert found(tier, source).ok and relocated(tier, source, target).ok and found(tier, target).ok


@pytest.mark.parametrize("call", ["run:1", "run:2", "cuLaunchKernel:1"])
def test_a_worker_that_dies_meanwhile_fails_it(tmp_path: Path, call: str) -> None:
    """While it copies the image, while it copies the header page, and while it verifies."""
    with ordered(tmp_path) as (tier, control, source, target):
        order(control, f"{call}=kill")
        assert relocated(tier, source, target).kind is OutcomeKind.FAILED
        order(control, "")
        wait_for_worker(tier, 2)
        assert is_empty(tier, target)
        assert found(tier, source).ok and relocated(tier, source, target).ok and found(tier, target).ok


@pytest.mark.parametrize("call", ["cuMemcpyDtoDAsync", "cuMemcpyHtoDAsync", "cuLaunchKernel"])
def test_a_call_that_fails_fails_that_one_alone(tmp_path: Path, call: str) -> None:
    with ordered(tmp_path) as (tier, control, source, target):
        order(control, f"{call}:1=801")
        outcome = relocated(tier, source, target)
        assert outcome.kind is OutcomeKind.FAILED and "NOT_SUPPORTED" in outcome.message
        assert is_empty(tier, target)
        assert relocated(tier, source, target).ok and found(tier, target).ok and tier.worker_starts == 1


def test_memory_that_the_device_does_not_give_takes_no_copy(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.touch()
    with opened(emulated_node(control=control)) as tier:
        source = stored(tier)
        order(control, "cuMemCreate:1=2")
        target = new_slot(tier, "other")
        outcome = relocated(tier, source, target)
        assert outcome.kind is OutcomeKind.FAILED and "OUT_OF_MEMORY" in outcome.message
        assert found(tier, source).ok


def test_a_block_that_does_not_fit_is_not_copied() -> None:
    with opened(emulated_node()) as tier:
        source, small = stored(tier), tier.allocate(8192)
        assert small is not None
        outcome = relocated(tier, source, small)
        assert outcome.kind is OutcomeKind.FAILED and "do not fit" in outcome.message


def test_a_slot_that_is_free_is_a_wrong_call() -> None:
    with opened(emulated_node()) as tier:
        source, target = stored(tier), new_slot(tier)
        tier.free(target)
        with pytest.raises(RuntimeError):
            relocated(tier, source, target)


def test_a_device_that_cannot_verify_has_the_processor_do_it(tmp_path: Path) -> None:
    log = tmp_path / "copies"
    log.touch()
    node = emulated_node(copies=log)
    with opened(node, checks=False) as tier:
        source, target = stored(tier), new_slot(tier)
        log.write_text("")
        assert relocated(tier, source, target).ok and found(tier, target).ok
        assert host_copies(log)[:2] == [
            HostCopy(False, HEADER_BYTES + PAYLOAD_BYTES, BOUNCE), HostCopy(True, HEADER_BYTES + PAYLOAD_BYTES, BOUNCE),
        ]  # fmt: skip
        again = new_slot(tier)
        overwrite(tier, node, source.container, source.offset + HEADER_BYTES, b"forged", tmp_path / "data")
        assert relocated(tier, source, again).kind is OutcomeKind.CORRUPT
        assert found(tier, again).kind is OutcomeKind.CORRUPT


def test_many_are_copied_at_once_and_copies_copied_on() -> None:
    with opened(emulated_node()) as tier:
        sources = {number: stored(tier, number) for number in range(1, 11)}
        for _ in range(3):
            targets = {number: new_slot(tier) for number in sources}
            outcomes = finish_all(
                [partial(start, tier, sources[number], targets[number], number) for number in sources]
            )
            assert all(outcome.ok for outcome in outcomes)
            for number, slot in targets.items():
                assert found(tier, slot, number).ok
                tier.free(sources[number])
            sources = targets
