"""Records that were read, and judged, before the tier was opened: used when they are still true, and left alone when
not."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore_tiers.nvme import DirectoryInUse, NvmeTier, judging, reading_ahead
from kvstore_tiers.nvme.judging_ahead import JudgingAhead
from kvstore_tiers.nvme.layout import RECORD_BYTES, SUPERBLOCK_BYTES, Superblock
from kvstore_tiers.nvme.reading_ahead import ReadAhead
from kvstore_tiers.nvme.slab_file import SlabFile, find_superblock
from kvstore_tiers.nvme.verdicts import Verdicts
from kvstore_tiers.testing.driving import block, finish, put

CAPACITY_BYTES = 8 << 20
SLAB_BYTES = 1 << 20
BLOCKS = range(1, 201)  # of three slabs


@contextmanager
def opened(path: Path, ahead: JudgingAhead | None = None) -> Iterator[NvmeTier]:
    with closing(NvmeTier.open(path, CAPACITY_BYTES, slab_bytes=SLAB_BYTES, io_threads=1, ahead=ahead)) as tier:
        yield tier


def store(tier: NvmeTier, *numbers: int) -> None:
    for number in numbers:
        assert put(tier, *block(number, 5000)) is not None
    assert finish(tier.sync).ok


def recovered(tier: NvmeTier) -> set[int]:
    columns = tier.recover_columns()
    return {int.from_bytes(columns.key[at].tobytes(), "big") for at in range(len(columns))}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with opened(tmp_path) as tier:
        store(tier, *BLOCKS)
    assert len(list((tmp_path / "slabs").iterdir())) == 3
    return tmp_path


@pytest.fixture
def read_later(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slabs whose records are read when the tier is opened."""
    read: list[int] = []
    original = SlabFile.read_records_into

    def watched(self: SlabFile, buffer: memoryview, first: int) -> None:
        read.append(self.superblock.number)
        original(self, buffer, first)

    monkeypatch.setattr(SlabFile, "read_records_into", watched)
    return read


@pytest.fixture(params=["judged", "only read"], autouse=True)
def judged_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slabs that were judged before the tier was opened; in half of the tests the judge comes to none."""
    judged: list[int] = []
    original = JudgingAhead._judge

    def watched(self: JudgingAhead, number: int) -> object:
        if request.param == "only read":
            return None
        judged.append(number)
        return original(self, number)

    monkeypatch.setattr(JudgingAhead, "_judge", watched)
    return judged


def begun(directory: Path) -> JudgingAhead:
    """Everything that can be read and judged ahead has been."""
    reading = ReadAhead.begin(directory)
    assert reading is not None
    reading._threads.shutdown(wait=True)
    ahead = JudgingAhead(reading)
    ahead._thread.shutdown(wait=True)
    return ahead


def test_what_was_read_ahead_is_not_read_again(
    directory: Path, read_later: list[int], judged_ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = begun(directory)
    judged_later: list[int] = []
    original = judging.judge

    def watched(superblock: Superblock, *arguments: Any) -> list[Verdicts]:
        judged_later.append(superblock.number)
        return original(superblock, *arguments)

    monkeypatch.setattr(judging, "judge", watched)
    with opened(directory, ahead) as tier:
        assert recovered(tier) == set(BLOCKS)
        assert read_later == []
        assert sorted([*judged_ahead, *judged_later]) == [1, 2, 3], "each of them once"
        store(tier, 1000)
    with opened(directory) as tier:
        assert recovered(tier) == {*BLOCKS, 1000}
        assert read_later == [1, 2, 3]


def test_judged_ahead_and_judged_late_are_the_same(directory: Path) -> None:
    """Column by column, whatever numbers the origins were given."""

    def columns(ahead: JudgingAhead | None) -> list[bytes]:
        with opened(directory, ahead) as tier:
            found = tier.recover_columns()
            origins = [found.origins[number] for number in found.origin]
            named = [origin.fingerprint + origin.tenant for origin in origins]
            return [*named, *(getattr(found, name).tobytes() for name in ("key", "parent", "depth", "offset"))]

    assert columns(begun(directory)) == columns(None)


def test_a_reading_that_has_hardly_begun_is_shared(directory: Path, read_later: list[int]) -> None:
    """Slabs that nobody has come to are read by who opens, the others are waited for."""
    with opened(directory, JudgingAhead.begin(directory)) as tier:
        assert recovered(tier) == set(BLOCKS)
        assert len(read_later) == len(set(read_later))


def test_what_somebody_changed_meanwhile_is_read_anew(directory: Path, read_later: list[int]) -> None:
    ahead = begun(directory)
    with opened(directory) as tier:
        store(tier, 1000)
        columns = tier.recover_columns()
        tier.free(columns.slot_of(0))
        assert finish(tier.sync).ok
    read_later.clear()
    with opened(directory, ahead) as tier:
        assert recovered(tier) == {*BLOCKS, 1000} - {int.from_bytes(columns.key[0].tobytes(), "big")}
        assert read_later == [1, 2, 3]


@pytest.mark.parametrize("by", ["rename", "writing"])
def test_what_was_restored_meanwhile_is_read_anew(directory: Path, read_later: list[int], by: str) -> None:
    """By somebody who copies slabs back and asks for no lock, so that its mark is as it was."""
    slab = directory / "slabs" / "00000002.slab"
    backup = slab.read_bytes()
    with opened(directory) as tier:
        columns = tier.recover_columns()
        freed = next(at for at in range(len(columns)) if columns.container[at] == 2)
        tier.free(columns.slot_of(freed))
        assert finish(tier.sync).ok
    ahead = begun(directory)
    if by == "rename":
        (directory / "restored").write_bytes(backup)
        (directory / "restored").rename(slab)
    else:
        slab.write_bytes(backup)
    read_later.clear()
    with opened(directory, ahead) as tier:
        assert recovered(tier) == set(BLOCKS)
        assert read_later == [2]


def test_another_directory_is_not_taken_for_this_one(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    with opened(other) as tier:
        store(tier, 5)
    with opened(other, begun(directory)) as tier:
        assert recovered(tier) == {5}


def test_there_is_nothing_to_read_ahead(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert ReadAhead.begin(empty / "absent") is None
    with opened(empty):
        assert ReadAhead.begin(empty) is None, "somebody has it"
    assert ReadAhead.begin(empty) is None, "no slabs"


def test_more_than_the_limit_is_left_to_who_opens(
    directory: Path, read_later: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    superblock = find_superblock(directory / "slabs" / "00000001.slab")
    assert not isinstance(superblock, str)
    monkeypatch.setattr(reading_ahead, "LIMIT_BYTES", superblock.slots_offset)
    with opened(directory, begun(directory)) as tier:
        assert recovered(tier) == set(BLOCKS)
        assert len(read_later) == 2


@pytest.mark.parametrize("damage", ["superblocks", "cut", "slots", "gone"])
def test_damage_is_found_as_without_it(directory: Path, damage: str) -> None:
    slab = directory / "slabs" / "00000002.slab"
    superblock = find_superblock(slab)
    assert not isinstance(superblock, str)
    expected = set(BLOCKS)
    if damage == "cut":
        os.truncate(slab, SUPERBLOCK_BYTES + 40 * RECORD_BYTES)
    with open(slab, "r+b", buffering=0) as file:
        if damage in ("superblocks", "slots"):  # the front one; in the latter its count of slots alone
            at = 48 if damage == "slots" else 0
            os.pwrite(file.fileno(), b"\xff" * (8 if damage == "slots" else SUPERBLOCK_BYTES), at)
    ahead = begun(directory)
    if damage == "gone":
        slab.unlink()
    with opened(directory, ahead) as tier:
        found = recovered(tier)
    second = {*BLOCKS} - found
    if damage in ("cut", "gone"):
        assert len(second) == superblock.slots, "those of the second slab"
    else:
        assert found == expected


def test_where_the_superblock_says_how_many_slots_there_are(directory: Path) -> None:
    superblock = find_superblock(directory / "slabs" / "00000001.slab")
    assert not isinstance(superblock, str)
    at = reading_ahead._SLOTS_AT
    assert int.from_bytes(superblock.pack()[at : at + 8], "little") == superblock.slots
    assert (reading_ahead._BEGIN, reading_ahead._RECORD_BYTES) == (SUPERBLOCK_BYTES, RECORD_BYTES)


def test_who_only_looks_is_in_nobody_s_way(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(directory / "lock", "rb", buffering=0) as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        naps: list[float] = []
        monkeypatch.setattr(time, "sleep", naps.append)
        with pytest.raises(DirectoryInUse, match="another process"), opened(directory):
            pass  # it looks for longer than anybody does
        assert sum(naps) >= 0.5

        def sleep(_: float) -> None:
            naps.append(0)
            if len(naps) == 10:  # it had lost its core meanwhile
                fcntl.flock(looker, fcntl.LOCK_UN)

        naps.clear()
        monkeypatch.setattr(time, "sleep", sleep)
        with opened(directory) as tier:
            assert recovered(tier) == set(BLOCKS)
            naps.clear()
            with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}"), opened(directory):
                pass
            assert not naps, "who has it keeps it: that is said at once"
