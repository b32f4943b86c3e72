"""Nobody who is served waits for a large index: not commits, not the start, not who asks for quarantined slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme import index as index_module
from kvstore_tiers.nvme.index import KeyIndex
from kvstore_tiers.nvme.index_seal import seal_holds
from kvstore_tiers.nvme.slab import Location
from kvstore_tiers.testing.driving import block, finish, put

CAPACITY_BYTES = 8 << 20


def open_tier(path: Path) -> NvmeTier:
    return NvmeTier.open(path, CAPACITY_BYTES, slab_bytes=256 << 10, io_threads=1)


class SlowDisk:
    """A database file whose checksum takes until `is_read` is set."""

    def __init__(self) -> None:
        self.is_read = threading.Event()
        self.begun = threading.Event()

    def seal_holds(self, path: Path, seal: bytes | None = None) -> bool:
        self.begun.set()
        assert self.is_read.wait(60.0)
        return seal_holds(path, seal)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two slots of it are in quarantine."""
    with closing(open_tier(tmp_path)) as tier:
        slots = [put(tier, *block(number, 5000)) for number in range(1, 20)]
        for slot in slots[:2]:
            assert slot is not None
            tier.quarantine(slot, "a flipped bit")
    return tmp_path


@pytest.fixture
def disk(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr(index_module, "OPEN_AT_ONCE_BYTES", -1)
    monkeypatch.setattr(index_module, "MEND_AT_ONCE_BLOCKS", 0)
    monkeypatch.setattr(index_module, "MEND_DELAY_S", 0.0)
    monkeypatch.setattr(index_module, "seal_holds", disk.seal_holds)
    yield disk
    disk.is_read.set()


def test_commits_go_on_while_the_database_is_checked(directory: Path, disk: SlowDisk) -> None:
    inode = (directory / "index" / "data.mdb").stat().st_ino
    tier = open_tier(directory)
    assert disk.begun.wait(60.0)
    ((first, header), *_) = tier.recover()
    tier.free(first)
    second = put(tier, *block(100, 200_000))  # a slab more, so a larger index
    assert second is not None and finish(tier.sync).ok
    third = put(tier, *block(101, 5000))
    assert third is not None and finish(tier.sync).ok
    tier.quarantine(third, "of the first second")
    assert finish(tier.sync).ok
    disk.is_read.set()
    assert tier.locate(header.key) is None
    assert tier.locate(block(100, 0)[0].key) == second
    assert tier.locate(block(101, 0)[0].key) is None
    assert tier._index._budget_bytes == tier._space.index_budget_bytes
    tier.close()
    assert (directory / "index" / "data.mdb").stat().st_ino == inode, "a good index was kept"
    assert seal_holds(directory / "index")
    with closing(open_tier(directory)) as tier:
        tier._index.wait_mended()
        assert tier.quarantined()[third] == "of the first second"


def test_reasons_are_told_once_they_are_known(directory: Path, disk: SlowDisk) -> None:
    with closing(open_tier(directory)) as tier:
        assert set(tier.quarantined().values()) == {"quarantined before the last start"}
        disk.is_read.set()
        tier._index.wait_mended()
        assert list(tier.quarantined().values()) == ["a flipped bit"] * 2


def test_a_map_that_cannot_grow_costs_the_index_alone(tmp_path: Path) -> None:
    class Unyielding:
        def set_mapsize(self, nbytes: int) -> None:
            raise lmdb.Error("mdb_env_set_mapsize: Cannot allocate memory")

        def close(self) -> None: ...

    with closing(open_tier(tmp_path)) as tier:
        assert put(tier, *block(1, 5000)) and finish(tier.sync).ok
        assert tier.locate(block(1, 0)[0].key) is not None  # the index has caught up with the answer
        tier._index._environment.close()  # type: ignore[union-attr]
        tier._index._environment = Unyielding()
        assert put(tier, *block(2, 200_000)) and finish(tier.sync).ok
        assert tier.locate(block(2, 0)[0].key) is None
        assert "index is off" in tier.statistics().message
        assert put(tier, *block(3, 200_000)) and finish(tier.sync).ok
    with closing(open_tier(tmp_path)) as tier:
        assert len(list(tier.recover())) == 3


def test_an_index_asked_before_it_is_mended_is_opened_by_who_asks(tmp_path: Path) -> None:
    """Without a mender there is nobody to wait for."""
    with closing(KeyIndex(tmp_path, 1 << 20)) as index:
        index.apply([(b"k" * 16, Location(1, 2, 3))], [], {}, 1)
        assert index.get(b"k" * 16) == Location(1, 2, 3)


def test_an_answer_that_blocks_are_durable_does_not_wait_for_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    apply = KeyIndex.apply

    def slow(self: KeyIndex, *change: object) -> None:
        assert may_go_on.wait(60.0)
        apply(self, *change)  # type: ignore[arg-type]

    monkeypatch.setattr(KeyIndex, "apply", slow)
    with closing(open_tier(tmp_path)) as tier:
        header, payload = block(1, 5000)
        slot = put(tier, header, payload)
        try:
            assert finish(tier.sync).ok
        finally:
            may_go_on.set()
        assert tier.locate(header.key) == slot
