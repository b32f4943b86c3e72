"""Chunks of device memory are given up when nobody uses them, are left alone after a failed import, and no place
outside of one is read. A grant that is late is no failure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_client.device.arenas import IDLE_S, RETRY_S, DeviceArenas
from kvstore_client.device.memory import DeviceChunk, DeviceError
from kvstore_client.get import Get
from kvstore_client.handshake import GrantedArena
from kvstore_client.keys import KeyChains
from kvstore_client.memory import Bytes
from kvstore_client.prefix import KeyedPrefix
from kvstore_client.results import REASON_DEADLINE, ClientCounters
from kvstore_proto.arena import DEVICE_ARENAS, HEADER_BYTES
from kvstore_proto.v1 import kvstore_pb2 as wire
from tests.reference.conversations import model, tokens_of

CHUNK = 4 * HEADER_BYTES


class Device:
    """A clock, a daemon that hands over chunks, and the device that they are imported on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.imports = 0
        self.fails = self.is_late = self.refuses = False
        self.read_places: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now

    def request_arena(self, arena_id: int, timeout_s: float, *, writable: bool = False) -> GrantedArena | None:
        if self.is_late or self.refuses:
            self.now += timeout_s if self.is_late else 0.0
            return None
        return GrantedArena(arena_id, CHUNK, os.open(os.devnull, os.O_RDONLY))

    def import_chunk(self, descriptor: int, nbytes: int) -> DeviceChunk:
        self.imports += 1
        if self.fails:
            raise DeviceError("cuMemImportFromShareableHandle", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        memory: Any = self
        return DeviceChunk(1 << 40, nbytes, memory)

    def read(self, places: Sequence[tuple[int, int]]) -> list[Bytes]:
        self.read_places += places
        return [np.zeros(nbytes, np.uint8) for _, nbytes in places]

    def arenas(self) -> DeviceArenas:
        return DeviceArenas(self, self, clock=self.clock)


def test_a_chunk_is_imported_anew_once_it_was_idle() -> None:
    device = Device()
    arenas = device.arenas()
    for _ in range(3):
        assert arenas.headers([DEVICE_ARENAS], [0], 1.0)
        device.now += IDLE_S - 0.1
        arenas.drop_idle()
    assert device.imports == 1
    device.now += 0.2
    arenas.drop_idle()
    assert arenas.headers([DEVICE_ARENAS], [0], 1.0)
    assert device.imports == 2


def test_a_chunk_that_a_lease_refers_to_is_not_imported_twice() -> None:
    device = Device()
    arenas = device.arenas()
    held = arenas.headers([DEVICE_ARENAS], [0], 1.0)
    device.now += 10 * IDLE_S
    arenas.drop_idle()
    again = arenas.headers([DEVICE_ARENAS], [HEADER_BYTES], 1.0)
    assert held and again and held[0][0] is again[0][0]
    assert device.imports == 1


def test_after_a_failed_import_none_is_tried_for_a_while() -> None:
    device = Device()
    device.fails = True
    arenas = device.arenas()
    assert arenas.headers([DEVICE_ARENAS], [0], 1.0) is None
    assert arenas.is_off
    assert arenas.headers([DEVICE_ARENAS], [0], 1.0) is None, "of a request sent before"
    assert device.imports == 1
    assert arenas.headers([1, 2], [0, 0], 1.0) == {}, "host memory is no matter of the device"
    device.now += RETRY_S
    device.fails = False
    assert not arenas.is_off
    assert arenas.headers([DEVICE_ARENAS], [0], 1.0)


def test_after_a_refused_grant_none_is_asked_for_for_a_while() -> None:
    device = Device()
    device.refuses = True
    arenas = device.arenas()
    assert arenas.headers([DEVICE_ARENAS], [0], 1.0) is None
    assert arenas.is_off


def test_after_a_late_grant_the_next_lease_may_name_the_device() -> None:
    device = Device()
    device.is_late = True
    arenas = device.arenas()
    began = device.now
    assert arenas.headers([DEVICE_ARENAS, DEVICE_ARENAS + 1], [0, 0], 1.0) is None
    assert device.now == began + 1.0, "one wait for all"
    assert not arenas.is_off
    device.is_late = False
    assert arenas.headers([DEVICE_ARENAS], [0], 1.0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_get_whose_grant_is_late_has_time_left_for_host_memory(is_streamed: bool) -> None:
    device, fingerprint = Device(), model()
    device.is_late = True
    asked: list[tuple[bool, int, float]] = []
    on_device = wire.AcquireReply(
        lease_id=1, blocks=1, arena_ids=[DEVICE_ARENAS], offsets=[0], generations=[1],
        payload_bytes=[fingerprint.payload_bytes()], expires_in_ms=10_000,
    )  # fmt: skip

    def call(request: wire.Request, deadline_s: float, late: object) -> wire.Response | str:
        asked.append((request.acquire.host_only, request.acquire.max_wait_ms, deadline_s))
        return REASON_DEADLINE if request.acquire.host_only else wire.Response(acquire=on_device)

    stream = SimpleNamespace(confirmed_releases=0)
    daemon: Any = SimpleNamespace(
        device_arenas=device.arenas(), max_keys=8, call=call, release=lambda _: None, stream=stream
    )
    chain = KeyChains(fingerprint, [b"r" * 16]).chain(tokens_of(1, 1), None, 0)
    prefix = KeyedPrefix(daemon, fingerprint, fingerprint.groups[0], chain)
    get = Get(prefix, ClientCounters(), 1.0, verify=False, clock=device.clock)
    lease = get.lease_of(on_device, 1.0) if is_streamed else get.lease(prefault=False, promote=True)
    assert lease.reason == REASON_DEADLINE
    assert asked == [*([] if is_streamed else [(False, 800, 1.0)]), (True, 400, 0.5)]


def test_no_place_outside_of_its_chunk_is_read() -> None:
    device = Device()
    arenas = device.arenas()
    forged = [CHUNK, CHUNK - HEADER_BYTES + 1, 1 << 63, 17, CHUNK - HEADER_BYTES]
    assert list(arenas.headers([DEVICE_ARENAS] * len(forged), forged, 1.0) or {}) == [4]
    assert device.read_places == [((1 << 40) + CHUNK - HEADER_BYTES, HEADER_BYTES)]
