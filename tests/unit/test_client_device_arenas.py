"""Chunks of device memory are given up when nobody uses them, are left alone after a failed import, and no place
outside of one is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore_client.device.arenas import IDLE_S, RETRY_S, DeviceArenas
from kvstore_client.device.memory import DeviceChunk, DeviceError
from kvstore_client.handshake import GrantedArena
from kvstore_client.memory import Bytes
from kvstore_proto.arena import DEVICE_ARENAS, HEADER_BYTES

CHUNK = 4 * HEADER_BYTES


class Device:
    """A clock, a daemon that hands over chunks, and the device that they are imported on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.imports = 0
        self.fails = False
        self.read_places: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now

    def request_arena(self, arena_id: int, timeout_s: float, *, writable: bool = False) -> GrantedArena | None:
        return GrantedArena(arena_id, CHUNK, os.open(os.devnull, os.O_RDONLY))

    def map(self, descriptor: int, nbytes: int) -> DeviceChunk:
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


def test_no_place_outside_of_its_chunk_is_read() -> None:
    device = Device()
    arenas = device.arenas()
    forged = [CHUNK, CHUNK - HEADER_BYTES + 1, 1 << 63, 17, CHUNK - HEADER_BYTES]
    assert list(arenas.headers([DEVICE_ARENAS] * len(forged), forged, 1.0) or {}) == [4]
    assert device.read_places == [((1 << 40) + CHUNK - HEADER_BYTES, HEADER_BYTES)]
