"""Header pages of blocks on a device take DRAM, up to a limit, which is part of the host tier's capacity."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_tiers.arena import Arena
from kvstore_tiers.arena_memory import ForeignMemory
from kvstore_tiers.base import MemoryKind, Slot, TierInfo
from kvstore_tiers.gpu.chunks import Chunks, header_room
from kvstored.config import load_config
from kvstored.lifetime.warm.node_memory import NodeMemory

MIB = 1 << 20
CHUNK_BYTES = 2 * MIB
LARGE, SMALL = 512 << 10, 8 << 10  # slots


def filled(chunks: Chunks, slot_bytes: int, most: int = 1 << 20) -> list[Slot]:
    """Slots, with their header pages written, until there are no more."""
    slots: list[Slot] = []
    while len(slots) < most and (slot := chunks.allocate(slot_bytes, "tenant")) is not None:
        chunks.of(slot).view(slot)[:4096] = 1
        slots.append(slot)
    return slots


def held_bytes(chunks: Chunks) -> int:
    return sum(chunk.held_bytes for report in chunks.reports() if (chunk := chunks.get(report.container)) is not None)


def opened(capacity_bytes: int) -> Chunks:
    made: list[Arena] = []
    return Chunks(capacity_bytes, CHUNK_BYTES, 1, made.append, lambda number: None)


@pytest.mark.parametrize("capacity_bytes", [2 * MIB, 64 * MIB, 512 * MIB])
def test_blocks_of_half_a_mebibyte_fill_the_whole_tier(capacity_bytes: int) -> None:
    chunks = opened(capacity_bytes)
    assert len(filled(chunks, LARGE)) == capacity_bytes // LARGE
    assert not chunks.lacks_headers
    chunks.leave()


def test_header_pages_of_small_blocks_take_no_more_than_their_room() -> None:
    chunks = opened(64 * MIB)
    room = header_room(64 * MIB)
    slots = filled(chunks, SMALL)
    assert len(slots) * 4096 == held_bytes(chunks) == chunks.headers_bytes == room
    assert chunks.lacks_headers
    for slot in slots[: CHUNK_BYTES // SMALL]:  # a whole chunk
        chunks.free(slot)
    assert len(filled(chunks, LARGE, 4)) == 4, "which can have larger blocks then"
    assert held_bytes(chunks) <= chunks.headers_bytes <= room and not chunks.lacks_headers
    chunks.leave()


def test_no_chunk_is_emptied_for_slots_whose_header_pages_would_have_no_room() -> None:
    chunks = opened(64 * MIB)
    filled(chunks, SMALL)
    large = filled(chunks, LARGE)
    assert {report.slot_bytes for report in chunks.convertible(LARGE, "tenant")} == {SMALL}
    assert chunks.convertible(SMALL, "another tenant") == [
        report for report in chunks.reports() if report.slot_bytes == SMALL
    ]
    for slot in large[: CHUNK_BYTES // LARGE]:
        chunks.free(slot)
    before = chunks.nbytes
    assert chunks.allocate(SMALL, "tenant") is None and chunks.lacks_headers
    assert chunks.nbytes == before, "an empty chunk stays where it would be of no use"
    chunks.leave()


def test_a_chunk_whose_header_pages_have_no_room_is_not_taken_over() -> None:
    chunks, before = opened(64 * MIB), opened(64 * MIB)
    (slot,) = filled(before, SMALL, 1)
    shadow = before.of(slot)
    filled(chunks, SMALL)
    with pytest.raises(ForeignMemory, match="header pages"):
        chunks.adopt(dataclasses.replace(shadow.record, number=99), shadow.fd)
    chunks.leave()
    before.leave()


def test_the_room_is_counted_in_the_capacity_of_dram(tmp_path: Path) -> None:
    settings = (f"daemon.state_dir={tmp_path}", "host.capacity=16MiB", "host.staging=1MiB", "host.warm_restart=off")
    memory = NodeMemory(load_config(None, settings))
    host = memory.open(forget=False)
    fits, too_large = (_tier_with_headers(nbytes) for nbytes in (3 * MIB, 13 * MIB))
    memory.charge_beside(fits)
    assert host.statistics().used_by["headers of vram"] == 3 * MIB
    assert host.charged_bytes == 4 * MIB
    with pytest.raises(ValueError, match=r"no room for 13\.0 MiB of header pages of vram"):
        memory.charge_beside(too_large)
    memory.close(has_served=True)


def _tier_with_headers(nbytes: int) -> Any:
    return SimpleNamespace(info=TierInfo("vram", "gpu", MemoryKind.DEVICE, dram_bytes=nbytes))
