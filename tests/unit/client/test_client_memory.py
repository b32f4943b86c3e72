"""Mapped memory: read-only where it must be, never unmapped under a view; runs are joined; headers are checked."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client.arenas import Arenas, WritableArenas, prefault_all
from kvstore_client.handshake import GrantedArena, Handshake
from kvstore_client.memory import (
    SLICE_BYTES,
    Bytes,
    contiguous_runs,
    map_present,
    map_read_only,
    map_read_write,
    populate,
    prefault,
)
from kvstore_client.payload import write_payload, write_tokens
from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, BlockHeader, mismatch, read_header

HEADER = BlockHeader(
    key=b"k" * 16,
    parent=b"p" * 16,
    fingerprint=b"f" * 32,
    tenant=b"t" * 16,
    payload_bytes=4096,
    tokens=np.arange(64, dtype="<i4").tobytes(),
    generation=77,
)


def memfd(size_bytes: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def test_an_arena_is_readable_in_place_and_not_writable() -> None:
    descriptor = memfd(8192)
    writer = map_read_write(os.dup(descriptor), 8192)
    reader = map_read_only(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY), 8192)
    os.close(descriptor)
    writer[100] = 42
    assert reader[100] == 42
    with pytest.raises(ValueError, match="read-only"):
        reader[100] = 1
    with pytest.raises(ValueError, match=r"WRITEABLE|writeable"):
        reader.flags.writeable = True


def test_a_view_outlives_everything_else() -> None:
    arena = map_read_only(memfd(1 << 20), 1 << 20)
    view = arena[4096:8192][10:20]
    del arena
    gc.collect()
    assert view.sum() == 0


def test_a_descriptor_shorter_than_promised_is_refused() -> None:
    with pytest.raises(ValueError):
        map_read_only(memfd(4096), 8192)


def test_populate_leaves_the_bytes_alone() -> None:
    arena = map_read_write(memfd(1 << 20), 1 << 20)
    arena[:] = 7
    populate(arena, [(0, 8192), (65536, 4096)])
    assert (arena == 7).all()


def test_prefault_stops_when_it_is_no_longer_wanted_and_changes_no_byte() -> None:
    size_bytes = 3 * SLICE_BYTES
    descriptor = memfd(size_bytes)
    staging = map_read_write(os.dup(descriptor), size_bytes)
    staging[5] = 9
    answers = iter([True, False])
    thread = threading.Thread(target=prefault, args=(staging, lambda: next(answers)))
    thread.start()
    thread.join()
    assert SLICE_BYTES <= os.fstat(descriptor).st_blocks * 512 < size_bytes
    os.close(descriptor)
    assert staging[5] == 9
    assert not staging[6:].any()


def test_mapping_what_is_present_gives_an_arena_no_page_that_it_has_not() -> None:
    """An arena that was emptied since holds capacity that is in use elsewhere."""
    size_bytes = 3 * SLICE_BYTES
    descriptor = memfd(size_bytes)
    writer = map_read_write(os.dup(descriptor), size_bytes)
    writer[SLICE_BYTES : 2 * SLICE_BYTES + 4096] = 7
    arena = map_read_only(os.dup(descriptor), size_bytes)
    present_bytes = os.fstat(descriptor).st_blocks * 512
    assert map_present(arena, descriptor, lambda: True) == present_bytes == SLICE_BYTES + 4096
    assert os.fstat(descriptor).st_blocks * 512 == present_bytes
    os.close(descriptor)


def test_mapping_what_is_present_stops_when_it_is_no_longer_wanted() -> None:
    descriptor = memfd(3 * SLICE_BYTES)
    writer = map_read_write(os.dup(descriptor), 3 * SLICE_BYTES)
    writer[:] = 7
    answers = iter([True, False])
    assert map_present(writer, descriptor, lambda: next(answers)) == SLICE_BYTES
    os.close(descriptor)


def test_mapping_what_is_present_stops_at_the_most_that_is_wanted() -> None:
    descriptor = memfd(4 * SLICE_BYTES)
    writer = map_read_write(os.dup(descriptor), 4 * SLICE_BYTES)
    writer[SLICE_BYTES:] = 7
    assert map_present(writer, descriptor, lambda: True, most_bytes=2 * SLICE_BYTES) == 2 * SLICE_BYTES
    assert map_present(writer, descriptor, lambda: True, most_bytes=0) == 0
    os.close(descriptor)


class OneArena:
    """A handshake that grants the memory behind `descriptor` as every arena."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def request_arena(self, arena_id: int, _timeout_s: float, *, writable: bool = False) -> GrantedArena:
        return GrantedArena(arena_id, os.fstat(self.descriptor).st_size, os.dup(self.descriptor))


def entered_bytes(memory: Bytes) -> int:
    """Return how many bytes of the mapping of `memory` are in this process's page table."""
    begin = f"{memory.ctypes.data:x}-"
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(begin))
    return int(next(line for line in lines[first:] if line.startswith("Rss:")).split()[1]) * 1024


def test_blocks_that_a_first_get_may_read_are_mapped_before_staging() -> None:
    descriptor, staging_fd = memfd(2 * SLICE_BYTES), memfd(SLICE_BYTES)
    map_read_write(os.dup(descriptor), 2 * SLICE_BYTES)[:] = 7
    grants = cast(Handshake, OneArena(descriptor))
    arenas = Arenas(grants, [1])
    staging = map_read_write(os.dup(staging_fd), SLICE_BYTES)

    def is_staging_untouched() -> bool:
        return not os.fstat(staging_fd).st_blocks

    prefault_all(arenas, WritableArenas(grants, (), is_offered=False), staging, is_staging_untouched)
    assert not is_staging_untouched()
    assert entered_bytes(arenas.mapped[1]) == 2 * SLICE_BYTES
    for each in (descriptor, staging_fd):
        os.close(each)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 10)), max_size=20))
def test_runs_cover_the_same_bytes_and_do_not_touch(ranges: list[tuple[int, int]]) -> None:
    runs = contiguous_runs(ranges)
    covered = {byte for offset, length in ranges for byte in range(offset, offset + length)}
    assert {byte for offset, length in runs for byte in range(offset, offset + length)} == covered
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs))


def check(header: BlockHeader, tokens: bytes | None = HEADER.tokens) -> str:
    return mismatch(memoryview(header.pack()), 0, HEADER.key, tokens, HEADER.payload_bytes, HEADER.generation)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"key": b"x" * 16}, "key"),
        ({"generation": 78}, "generation"),
        ({"payload_bytes": 4097}, "payload size"),
        ({"tokens": HEADER.tokens[:-4]}, "token ids"),
        ({"tokens": HEADER.tokens + bytes(4)}, "token ids"),
        ({"tokens": HEADER.tokens[:-4] + b"\1\0\0\0"}, "token ids"),
    ],
)
def test_verify_reads_the_header_that_the_daemon_writes(change: dict[str, object], said: str) -> None:
    assert check(replace(HEADER, **change)) == said  # type: ignore[arg-type]


def test_a_lossy_copy_is_no_exact_block() -> None:
    raw = memoryview(replace(HEADER, error=0.5).pack())
    block = HEADER.key, HEADER.tokens, HEADER.payload_bytes, HEADER.generation
    assert mismatch(raw, 0, *block) == "" and mismatch(raw, 0, *block, exact=True) == "exactness"
    assert mismatch(memoryview(HEADER.pack()), 0, *block, exact=True) == ""


def test_verify_by_keys_alone_ignores_tokens_and_empty_memory_is_no_block() -> None:
    assert check(replace(HEADER, tokens=b""), tokens=None) == ""
    assert mismatch(memoryview(bytes(4096)), 0, HEADER.key, None, 4096, 77) == "no block header"


@pytest.mark.parametrize("kind", ["bytes", "array", "function"])
def test_a_slot_holds_tokens_and_payload_where_the_layout_says(kind: str) -> None:
    staging = np.zeros(4 * ALIGNMENT_BYTES, np.uint8)
    values = np.arange(512, dtype=np.uint64)
    payload = {"bytes": values.tobytes(), "array": values, "function": None}[kind]

    def fill(destination: np.ndarray) -> None:
        assert destination.shape == (4096,)
        np.copyto(destination, values.view(np.uint8))

    slot = staging[ALIGNMENT_BYTES : 3 * ALIGNMENT_BYTES]
    write_tokens(slot, 1, HEADER.tokens)
    write_payload(staging, ALIGNMENT_BYTES, payload if payload is not None else fill, 4096)
    # What the daemon would read once it has written the fields that are its own:
    own = np.frombuffer(replace(HEADER, tokens=b"").pack(), np.uint8).copy()
    own[108:112] = slot[108:112]
    own[256 : 256 + len(HEADER.tokens)] = slot[256 : 256 + len(HEADER.tokens)]
    own[152:160] = np.frombuffer(HEADER.pack(), np.uint8)[152:160]
    header = read_header(own)
    assert isinstance(header, BlockHeader)
    assert header.tokens == HEADER.tokens
    assert slot[HEADER_BYTES : HEADER_BYTES + 4096].tobytes() == values.tobytes()
    assert not staging[:ALIGNMENT_BYTES].any() and not staging[3 * ALIGNMENT_BYTES :].any()
