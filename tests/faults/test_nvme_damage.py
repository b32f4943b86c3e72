"""Damaged directories: flipped bits, truncated slabs, newer formats. Never served wrong, never a traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore_tiers.base import OutcomeKind, Slot
from kvstore_tiers.nvme import DirectoryUnusable, FormatUnsupported, NvmeTier
from kvstore_tiers.nvme.check import Severity, check_directory
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES, read_superblock
from kvstore_tiers.testing.transfers import block, finish, get, put
from tests.reference.stored_blocks import store_numbers

CAPACITY_BYTES = 3 << 20
PAYLOAD_BYTES = 10_000
NUMBERS = range(1, 21)


@contextmanager
def opened(path: Path, **options: object) -> Iterator[NvmeTier]:
    with closing(NvmeTier.open(path, CAPACITY_BYTES, slab_bytes=512 << 10, io_threads=2, **options)) as tier:  # type: ignore[arg-type]
        yield tier


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A cleanly closed directory with blocks 1..20, all in slab 1."""
    with opened(tmp_path / "d") as tier:
        store_numbers(tier, NUMBERS, PAYLOAD_BYTES)
        assert finish(tier.sync).ok
    return tmp_path / "d"


def slab_path(directory: Path) -> Path:
    return directory / "slabs" / "00000001.slab"


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def slot_offset(directory: Path, index: int) -> int:
    superblock = read_superblock(slab_path(directory).read_bytes()[:SUPERBLOCK_BYTES])
    assert not isinstance(superblock, int | str)
    return superblock.slot_offset(index)


def recovered(tier: NvmeTier) -> dict[int, Slot]:
    return {int.from_bytes(header.key, "big"): slot for slot, header in tier.recover()}


def served(tier: NvmeTier, slots: dict[int, Slot]) -> set[int]:
    """Return the blocks that are served; assert that each of those is right and each other one is called CORRUPT."""
    good = set()
    for number, slot in slots.items():
        header, payload = block(number, PAYLOAD_BYTES)
        outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
        if outcome.ok:
            assert np.array_equal(copy, payload)
            good.add(number)
        else:
            assert outcome.kind is OutcomeKind.CORRUPT, outcome
    return good


@pytest.mark.parametrize("where", [4096, 4096 + 9_999, 8, 100, 152, 260])
def test_a_flipped_bit_in_a_slot_costs_that_block_alone(directory: Path, where: int) -> None:
    flip(slab_path(directory), slot_offset(directory, 4) + where)
    assert [f.severity for f in check_directory(directory, verify_payloads=True)] == [Severity.DAMAGE]
    with opened(directory) as tier:
        slots = recovered(tier)
        assert served(tier, slots) == set(NUMBERS) - {5}
        assert tier.statistics().corrupt == 1
        tier.quarantine(slots[5], "flipped bit")
        assert finish(tier.sync).ok
    with opened(directory) as tier:
        assert list(tier.quarantined()) == [slots[5]]
        assert served(tier, recovered(tier)) == set(NUMBERS) - {5}
        tier.free(slots[5])
        assert put(tier, *block(5, PAYLOAD_BYTES))
        assert finish(tier.sync).ok
    assert check_directory(directory, verify_payloads=True) == []


def test_swapped_slots_are_not_served(directory: Path) -> None:
    """Both images are whole and carry sound checksums; only key and generation differ."""
    first, second = slot_offset(directory, 0), slot_offset(directory, 1)
    raw = bytearray(slab_path(directory).read_bytes())
    length = second - first
    raw[first : first + 2 * length] = raw[second : second + length] + raw[first:second]
    slab_path(directory).write_bytes(raw)
    with opened(directory) as tier:
        assert served(tier, recovered(tier)) == set(NUMBERS) - {1, 2}


def test_a_stale_image_of_the_same_key_is_not_served(directory: Path) -> None:
    raw = slab_path(directory).read_bytes()
    offset = slot_offset(directory, 0)
    with opened(directory) as tier:
        former = recovered(tier)[1]
        tier.free(former)
        assert finish(tier.sync).ok, "so that the slot is taken again first"
        slot = put(tier, *block(1, PAYLOAD_BYTES))
        assert slot is not None and slot.offset == offset and slot.generation == former.generation + 1
        assert finish(tier.sync).ok
    with open(slab_path(directory), "r+b") as file:
        file.seek(offset)
        file.write(raw[offset : offset + slot.nbytes])
    with opened(directory) as tier:
        assert served(tier, recovered(tier)) == set(NUMBERS) - {1}


def test_a_former_image_of_a_block_that_was_stored_again_is_not_served(directory: Path) -> None:
    """Stored again, with other bytes, in the same use of another slot; then a write of the former slot goes astray."""
    with opened(directory) as tier:
        former = recovered(tier)[1]
        tier.free(former)
        slot = put(tier, block(1, PAYLOAD_BYTES)[0], block(99, PAYLOAD_BYTES)[1])
        assert slot is not None and slot.offset != former.offset
        assert finish(tier.sync).ok
    with open(slab_path(directory), "r+b") as file:
        image = os.pread(file.fileno(), former.nbytes, former.offset)
        assert image != os.pread(file.fileno(), slot.nbytes, slot.offset)
        os.pwrite(file.fileno(), image, slot.offset)
    assert Severity.DAMAGE in [finding.severity for finding in check_directory(directory)]
    with opened(directory) as tier:
        assert recovered(tier)[1].offset == slot.offset
        assert served(tier, recovered(tier)) == set(NUMBERS) - {1}


def test_slots_whose_records_were_lost_count_on_apart_from_each_other(directory: Path) -> None:
    with opened(directory) as tier:
        before = {slot.offset: slot.generation for slot in recovered(tier).values()}
    for index in range(3):
        flip(slab_path(directory), SUPERBLOCK_BYTES + index * RECORD_BYTES + 8)
    with opened(directory) as tier:
        lost = before.keys() - {slot.offset for slot in recovered(tier).values()}
        again = [put(tier, *block(100 + number, PAYLOAD_BYTES)) for number in range(3)]
        assert {slot.offset for slot in again if slot} == lost
        generations = {slot.generation for slot in again if slot}
        assert len(generations) == 3 and min(generations) > max(before.values())


@pytest.mark.parametrize("where", [0, 6, 8, 24, 136, 250])
def test_a_flipped_bit_in_a_record_costs_that_block_alone(directory: Path, where: int) -> None:
    flip(slab_path(directory), SUPERBLOCK_BYTES + 4 * RECORD_BYTES + where)
    with opened(directory) as tier:
        assert tier.recovery_report.damaged_records == 1
        assert "damaged records" in tier.statistics().message
        assert served(tier, recovered(tier)) == set(NUMBERS) - {5}
    assert check_directory(directory, verify_payloads=True) == []


def test_exchanged_records_do_not_hold(directory: Path) -> None:
    raw = bytearray(slab_path(directory).read_bytes())
    first, second = SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + RECORD_BYTES
    raw[first : second + RECORD_BYTES] = raw[second : second + RECORD_BYTES] + raw[first:second]
    slab_path(directory).write_bytes(raw)
    with opened(directory) as tier:
        assert tier.recovery_report.damaged_records == 2
        assert served(tier, recovered(tier)) == set(NUMBERS) - {1, 2}


def test_one_lost_superblock_is_replaced_by_the_other(directory: Path) -> None:
    flip(slab_path(directory), 20)
    assert [f.severity for f in check_directory(directory)] == [Severity.DAMAGE]
    with opened(directory) as tier:
        assert served(tier, recovered(tier)) == set(NUMBERS)
    assert check_directory(directory) == []


def test_a_slab_without_superblocks_is_put_aside_and_counted(directory: Path) -> None:
    size_bytes = slab_path(directory).stat().st_size
    flip(slab_path(directory), 20)
    flip(slab_path(directory), size_bytes - SUPERBLOCK_BYTES + 20)
    with opened(directory) as tier:
        assert recovered(tier) == {}
        assert tier.statistics().used_by["damaged"] >= size_bytes
        assert put(tier, *block(1, PAYLOAD_BYTES))
        assert tier.statistics().used_bytes <= CAPACITY_BYTES
        assert finish(tier.sync).ok
    assert slab_path(directory).with_suffix(".damaged").exists()


@pytest.mark.parametrize("kept_slots", [7, 0])
def test_a_truncated_slab_loses_what_lay_behind_its_end(directory: Path, kept_slots: int) -> None:
    os.truncate(slab_path(directory), slot_offset(directory, kept_slots) + 100)
    with opened(directory) as tier:
        assert tier.recovery_report.truncated_blocks == len(NUMBERS) - kept_slots
        assert served(tier, recovered(tier)) == set(list(NUMBERS)[:kept_slots])
    assert check_directory(directory, verify_payloads=True) == []


def test_a_slab_truncated_within_its_records_keeps_nothing_and_works_on(directory: Path) -> None:
    os.truncate(slab_path(directory), SUPERBLOCK_BYTES + 2 * RECORD_BYTES)
    with opened(directory) as tier:
        assert recovered(tier) == {}
        assert put(tier, *block(1, PAYLOAD_BYTES))
        assert finish(tier.sync).ok
    assert check_directory(directory, verify_payloads=True) == []


def test_a_newer_directory_or_slab_is_refused(directory: Path) -> None:
    (directory / "format").write_text("format_version: 3\n")
    with pytest.raises(FormatUnsupported, match="run that version"), opened(directory):
        pass


def test_a_smaller_capacity_gives_slabs_up(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        numbers = [n for n in range(1, 200) if put(tier, *block(n, PAYLOAD_BYTES))]
        assert finish(tier.sync).ok
    smaller_bytes = CAPACITY_BYTES // 2
    with closing(NvmeTier.open(tmp_path, smaller_bytes, slab_bytes=512 << 10)) as tier:
        kept = recovered(tier)
        assert 0 < len(kept) < len(numbers)
        assert served(tier, kept) == set(kept)
        assert tier.statistics().used_bytes <= smaller_bytes
        assert "beyond the capacity" in tier.statistics().message
    assert check_directory(tmp_path, capacity_bytes=smaller_bytes, verify_payloads=True) == []


def test_an_impossible_capacity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DirectoryUnusable, match="hold no block"):
        NvmeTier.open(tmp_path, 10_000)
