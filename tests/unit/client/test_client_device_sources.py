"""Payloads of a lease are copied straight from where the device may read, and from nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore_client.device.registered import Registration
from kvstore_client.device.transfers import Payloads, Sources
from kvstore_client.lease import LeasedBlock
from kvstore_client.memory import Bytes
from kvstore_proto.arena import HEADER_BYTES

BLOCK_BYTES, CHUNK_ADDRESS = 8192, 1 << 40
SLOT_BYTES = HEADER_BYTES + BLOCK_BYTES


class Registered:
    """The first `nbytes` of each of `arenas` are registered."""

    def __init__(self, nbytes: int, *arenas: Bytes) -> None:
        self._arenas, self._nbytes = arenas, nbytes
        self.taken: list[Registration] = []
        self.given_back: list[Registration] = []

    def take(self, memory: Bytes, offset: int, nbytes: int) -> Registration | None:
        if offset + nbytes > self._nbytes or not any(memory is arena for arena in self._arenas):
            return None
        self.taken.append(Registration(memory[: self._nbytes], memory.ctypes.data, is_made=True))
        return self.taken[-1]

    def give_back(self, taken: Registration) -> None:
        self.given_back.append(taken)


def leased(memory: Bytes, slot: int, chunk: Any = None) -> LeasedBlock:
    return LeasedBlock(memory, slot * SLOT_BYTES, BLOCK_BYTES, 1, b"", chunk)


def places(payloads: Payloads) -> list[tuple[int, int]]:
    return list(zip(payloads.pages.tolist(), payloads.addresses.tolist(), strict=True))


def at(memory: Bytes, slot: int) -> int:
    return memory.ctypes.data + slot * SLOT_BYTES + HEADER_BYTES


def test_each_payload_goes_the_way_of_its_memory_in_the_order_of_pages() -> None:
    known, other = np.zeros(4 * SLOT_BYTES, np.uint8), np.zeros(4 * SLOT_BYTES, np.uint8)
    registered, chunk = Registered(4 * SLOT_BYTES, known), SimpleNamespace(address=CHUNK_ADDRESS)
    blocks = [(leased(known, 0), 9), (leased(other, 1), 3), (leased(known, 2), 1), (leased(other, 1, chunk), 4)]
    sources = Sources(blocks, registered)  # type: ignore[arg-type]
    assert places(sources.on_host) == [(1, at(known, 2)), (9, at(known, 0))]
    assert places(sources.elsewhere) == [(3, at(other, 1))]
    assert places(sources.on_device) == [(4, CHUNK_ADDRESS + SLOT_BYTES + HEADER_BYTES)]
    assert len(registered.taken) == 1, "one look for an arena"
    sources.give_back()
    assert registered.given_back == registered.taken


def test_a_payload_that_ends_beyond_what_is_registered_goes_by_the_buffer() -> None:
    arena = np.zeros(4 * SLOT_BYTES, np.uint8)
    registered = Registered(2 * SLOT_BYTES - 16, arena)
    sources = Sources([(leased(arena, 0), 0), (leased(arena, 1), 1)], registered)  # type: ignore[arg-type]
    assert places(sources.on_host) == [(0, at(arena, 0))] and places(sources.elsewhere) == [(1, at(arena, 1))]


def test_no_blocks_are_no_payloads() -> None:
    sources = Sources([], Registered(0))  # type: ignore[arg-type]
    assert [places(each) for each in (sources.on_device, sources.on_host, sources.elsewhere)] == [[], [], []]
