"""An index whose file somebody else writes to or cuts while it is open: it is not touched again, and nothing is lost.

LMDB maps the file and checksums nothing: reading a page that lies behind the new end kills a process (SIGBUS).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.index import KeyIndex
from kvstore_tiers.nvme.slab import Location
from kvstore_tiers.testing.driving import block, finish, put

BUDGET_BYTES = 8 << 20


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def filled(path: Path) -> KeyIndex:
    index = KeyIndex(path, BUDGET_BYTES)
    index.apply([(key(number), Location(1, number, 1)) for number in range(200)], [], {(1, 7): "a flipped bit"}, 1)
    assert index.get(key(5)) == Location(1, 5, 1)
    assert not index.broken
    return index


def scribble(file: Path) -> None:
    with file.open("r+b", buffering=0) as opened:
        for page in range(0, file.stat().st_size, 4096):
            os.pwrite(opened.fileno(), os.urandom(512), page + 8)


def replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "scribbled": scribble,
    "cut": lambda file: os.truncate(file, 4096),
    "replaced": replace,
    "removed": lambda file: file.unlink(),
}


@pytest.fixture(params=DAMAGE)
def damage(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return DAMAGE[request.param]


ASKING: list[Callable[[KeyIndex], object]] = [
    lambda index: index.get(key(5)),
    lambda index: list(index.entries()),
    lambda index: index.reasons(),
    lambda index: index.apply([(key(999), Location(2, 1, 1))], [(key(1), Location(1, 1, 1))], {}, 2),
]


@pytest.mark.parametrize("ask", ASKING)
def test_it_is_off_until_the_next_start(
    tmp_path: Path, damage: Callable[[Path], None], ask: Callable[..., object]
) -> None:
    index = filled(tmp_path)
    damage(tmp_path / "data.mdb")
    assert not ask(index)
    assert "off until the next start" in index.broken
    assert (index.get(key(5)), list(index.entries()), index.reasons()) == (None, [], {})
    index.apply([(key(5), Location(2, 2, 2))], [], {}, 3)
    index.close()
    assert not (tmp_path / "seal").exists()
    with closing(KeyIndex(tmp_path, BUDGET_BYTES)) as again:
        assert again.is_fresh
        assert list(again.entries()) == []


def test_one_that_was_changed_before_it_is_closed_gets_no_seal(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    index = filled(tmp_path)
    damage(tmp_path / "data.mdb")
    index.close()
    assert not (tmp_path / "seal").exists()


def test_what_lmdb_finds_wrong_while_it_reads_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The medium may give other bytes for a page than were written; nothing tells but LMDB, where it notices."""
    index = filled(tmp_path)

    class Damaged:
        def begin(self, **_: object) -> object:
            raise lmdb.CorruptedError("located page was wrong type")

        def close(self) -> None:
            pass

    environment = index._environment
    assert environment is not None
    monkeypatch.setattr(index, "_environment", Damaged())
    environment.close()
    assert index.get(key(5)) is None
    assert "wrong type" in index.broken
    index.close()


def test_the_tier_goes_on_and_loses_nothing(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with closing(NvmeTier.open(tmp_path, BUDGET_BYTES, slab_bytes=1 << 20, io_threads=1)) as tier:
        for number in range(1, 30):
            assert put(tier, *block(number, 5000)) is not None
        assert finish(tier.sync).ok
        assert tier.locate(key(29)) is not None  # it has caught up: LMDB would not survive a cut while it writes
        damage(tmp_path / "index" / "data.mdb")
        for number in range(30, 60):
            assert put(tier, *block(number, 5000)) is not None
        assert finish(tier.sync).ok
        assert tier.locate(key(59)) is None  # the index comes behind the answer
        assert "the index is off until the next start" in tier.statistics().message
        assert tier.quarantined() == {}
    with closing(NvmeTier.open(tmp_path, BUDGET_BYTES, slab_bytes=1 << 20, io_threads=1)) as tier:
        assert {int.from_bytes(header.key, "big") for _, header in tier.recover()} == set(range(1, 60))
        assert all(tier.locate(header.key) == slot for slot, header in tier.recover())
