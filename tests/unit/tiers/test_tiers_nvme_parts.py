"""The NVMe tier's parts alone: layout, record runs, journal; and its books at the edges."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_tiers.base import Slot
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme import layout as lay
from kvstore_tiers.nvme.commit import Journal, PendingRecords
from kvstore_tiers.nvme.slab_file import _runs
from kvstore_tiers.testing.transfers import block, finish, get, put
from tests.reference.stored_blocks import store_numbers, stored_slot

SUPERBLOCK = lay.Superblock(b"u" * 16, 2**63 + 5, 7, 8192, 100, 3, 1 << 20, 42)


@given(st.integers(8192, 1 << 22), st.integers(1, 64))
def test_slots_fit_their_file(file_bytes: int, pages: int) -> None:
    slot_bytes = pages * 4096
    slots = lay.slots_that_fit(file_bytes, slot_bytes)
    superblock = replace(SUPERBLOCK, slot_bytes=slot_bytes, slots=slots, file_bytes=file_bytes)
    if slots:
        assert superblock.slot_offset(slots) + lay.SUPERBLOCK_BYTES <= file_bytes
        assert superblock.slots_offset >= lay.SUPERBLOCK_BYTES + slots * lay.RECORD_BYTES
        assert superblock.index_of(superblock.slot_offset(slots - 1)) == slots - 1
    assert slots >= 1 or file_bytes < lay.smallest_file_bytes(slot_bytes)


def test_superblocks_come_back_and_every_flipped_bit_shows() -> None:
    raw = SUPERBLOCK.pack()
    assert lay.read_superblock(raw) == SUPERBLOCK
    for offset in (0, 9, 20, 60, 2000, 4090):
        damaged = bytearray(raw)
        damaged[offset] ^= 1
        assert isinstance(lay.read_superblock(bytes(damaged)), str)
    assert isinstance(lay.read_superblock(raw[:100]), str)


def test_records_hold_only_in_their_place_and_format() -> None:
    header = replace(block(9, 5000)[0], generation=4, checksum=77, tokens=b"")
    raw = lay.pack_record(header, lay.RecordState.LIVE, 12, SUPERBLOCK.record_seed(5))
    assert lay.record_holds(raw, SUPERBLOCK.record_seed(5))
    assert not lay.record_holds(raw, SUPERBLOCK.record_seed(6))
    assert not lay.record_holds(raw, replace(SUPERBLOCK, format_id=1).record_seed(5))
    assert lay.record_header(raw) == header
    parsed = lay.np.frombuffer(raw, dtype=lay.RECORD_DTYPE)[0]
    assert (parsed["state"], parsed["generation"], parsed["sequence"]) == (lay.RecordState.LIVE, 4, 12)
    assert (parsed["key"].tobytes(), parsed["payload_bytes"]) == (header.key, 5000)


def test_neighbouring_records_go_in_one_write() -> None:
    records = [(index, bytes([index]) * lay.RECORD_BYTES) for index in (1, 2, 3, 7, 9, 10)]
    runs = list(_runs(records))
    assert [(first, len(run) // lay.RECORD_BYTES) for first, run in runs] == [(1, 3), (7, 1), (9, 2)]
    assert b"".join(run for _, run in runs) == b"".join(raw for _, raw in records)


def test_a_batch_put_back_loses_nothing_and_the_newer_wins() -> None:
    journal = Journal(first_sequence=5)
    slab = object()
    older, newer = (replace(block(1, 10)[0], generation=g) for g in (1, 2))
    journal.note_written(slab, 0, older)  # type: ignore[arg-type]
    journal.note_freed(slab, 3, 7)  # type: ignore[arg-type]
    batch = journal.take()
    assert journal.sequence == 6
    journal.note_written(slab, 0, newer)  # type: ignore[arg-type]
    journal.note_quarantined(slab, 9)  # type: ignore[arg-type]
    journal.put_back(batch)
    again = journal.take()
    assert again.written[slab] == {0: newer}  # type: ignore[index]
    assert again.freed[slab] == {3: 7}  # type: ignore[index]
    assert again.quarantined[slab] == {9}  # type: ignore[index]
    assert not PendingRecords()


def test_the_newer_of_two_records_of_a_key_wins(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, 3 << 20, slab_bytes=256 << 10)) as tier:
        first = put(tier, *block(1, 5000))
        assert finish(tier.sync).ok
        second = put(tier, *block(1, 5000))
        assert finish(tier.sync).ok
        assert first is not None and second is not None
    with closing(NvmeTier.open(tmp_path, 3 << 20, slab_bytes=256 << 10)) as tier:
        assert [slot for slot, _ in tier.recover()] == [second]
        assert tier.recovery_report.superseded_blocks == 1
        assert tier.statistics().blocks == 1


def test_quarantine_is_bounded(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, 3 << 20, slab_bytes=256 << 10, quarantine_slots=2)) as tier:
        slots = [put(tier, *block(n, 5000)) for n in range(1, 5)]
        for slot in slots:
            assert slot is not None
            tier.quarantine(slot, "bad")
        assert list(tier.quarantined()) == slots[:2]
        assert tier.statistics().quarantined_slots == 2
        assert tier.statistics().used_by["quarantine"] == 2 * 12288


def test_a_quarantined_block_that_was_never_synced_stays_quarantined(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, 3 << 20, slab_bytes=256 << 10)) as tier:
        slot = stored_slot(tier, *block(1, 5000))
        tier.quarantine(slot, "bad from the start")
    with closing(NvmeTier.open(tmp_path, 3 << 20, slab_bytes=256 << 10)) as tier:
        assert list(tier.quarantined()) == [slot]
        assert list(tier.recover()) == []


def test_why_slots_are_in_quarantine_is_said_by_who_knows(tmp_path: Path) -> None:
    """The records do not say it: the daemon keeps it, and says so after the start."""
    with closing(NvmeTier.open(tmp_path, 3 << 20, slab_bytes=256 << 10)) as tier:
        slots = [put(tier, *block(number, 5000)) for number in (1, 2, 3)]
        for slot in slots:
            assert slot is not None
            tier.quarantine(slot, "a flipped bit")
    with closing(NvmeTier.open(tmp_path, 3 << 20, slab_bytes=256 << 10)) as tier:
        first, second, third = tier.quarantined()
        assert set(tier.quarantined().values()) == {"quarantined before the last start"}
        tier.free(third)
        other_use = second._replace(generation=second.generation + 1)
        tier.explain_quarantined({first: "a flipped bit", other_use: "of another block", third: "freed since"})
        assert tier.quarantined() == {first: "a flipped bit", second: "quarantined before the last start"}


def test_a_slab_of_another_size_serves_once_it_is_empty(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, 1500 << 10, slab_bytes=256 << 10)) as tier:
        slots: list[Slot] = []
        while (slot := tier.allocate(12288)) is not None:
            slots.append(slot)
        assert tier.allocate(65536) is None
        assert not tier.convertible(12288)
        number = tier.convertible(65536)[0].container
        for slot in slots:
            if slot.container == number:
                tier.free(slot)
        assert put(tier, *block(1, 60_000)) is not None


def test_recovered_blocks_can_be_freed_while_recovery_yields_them(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, 3 << 20, slab_bytes=256 << 10)) as tier:
        store_numbers(tier, range(1, 8))
    with closing(NvmeTier.open(tmp_path, 3 << 20, slab_bytes=256 << 10)) as tier:
        reported = []
        for slot, header in tier.recover():
            reported.append(int.from_bytes(header.key, "big"))
            tier.free(slot)
            put(tier, *block(100 + reported[-1], 5000))
        assert sorted(reported) == list(range(1, 8))
        assert get(tier, tier.allocate(12288), b"k" * 16, 5000)[0].kind.value == "corrupt"  # type: ignore[arg-type]


@pytest.mark.parametrize("payload_bytes", [0, 1, 4095, 4096, 4097, 100_000])
def test_payloads_of_any_length_survive_a_restart(tmp_path: Path, payload_bytes: int) -> None:
    header, payload = block(3, payload_bytes)
    with closing(NvmeTier.open(tmp_path, 3 << 20)) as tier:
        assert put(tier, header, payload)
    with closing(NvmeTier.open(tmp_path, 3 << 20)) as tier:
        ((slot, reported),) = tier.recover()
        outcome, copy = get(tier, slot, header.key, payload_bytes)
        assert outcome.ok and outcome.header is not None
        assert outcome.header.tokens == header.tokens
        assert replace(outcome.header, tokens=b"") == reported
        assert (copy == payload).all()
