"""A large index is mended while its tier is used: what is committed meanwhile is newer, and stays."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme import index as index_module
from kvstore_tiers.nvme.index import KeyIndex
from kvstore_tiers.nvme.index_mending import IndexColumns, PackedEntries
from kvstore_tiers.nvme.index_seal import read_sealed, seal_holds
from kvstore_tiers.nvme.slab import Location
from kvstore_tiers.recovered import as_words
from kvstore_tiers.testing.driving import block, finish, put

BUDGET_BYTES = 4 << 20
BLOCKS = 40
KEYS = [np.random.default_rng(number).bytes(16) for number in range(BLOCKS + 4)]
OLD = {key: Location(1, number, 1) for number, key in enumerate(KEYS[:BLOCKS])}


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MEND_AT_ONCE_BLOCKS", 4)
    monkeypatch.setattr(index_module, "OPEN_AT_ONCE_BYTES", -1)
    monkeypatch.setattr(index_module, "MEND_DELAY_S", 0.0)
    monkeypatch.setattr(index_module, "_MEND_SLICE", 8)
    monkeypatch.setattr(index_module, "_MEND_STEP", 3)


def columns(blocks: dict[bytes, Location]) -> IndexColumns:
    places = list(blocks.values())
    return IndexColumns(
        as_words(b"".join(blocks)),
        np.array([at.slab for at in places]),
        np.array([at.index for at in places]),
        np.array([at.generation for at in places]),
    )


def test_an_index_is_rebuilt_beside_its_user_and_sealed_when_it_is_whole(tmp_path: Path) -> None:
    with closing(KeyIndex(tmp_path, BUDGET_BYTES)) as index:
        assert index.mend(columns(OLD), BUDGET_BYTES, untouched=True) is False
        assert index.get(KEYS[7]) == OLD[KEYS[7]], "an answer waits for it"
        assert dict(index.entries()) == OLD and not index.broken
    assert read_sealed(tmp_path) == OLD


def test_a_sealed_index_that_says_the_same_is_kept(tmp_path: Path) -> None:
    with closing(KeyIndex(tmp_path, BUDGET_BYTES)) as index:
        index.mend(columns(OLD), BUDGET_BYTES, untouched=True)
        index.wait_mended()
    inode = (tmp_path / "data.mdb").stat().st_ino
    with closing(KeyIndex(tmp_path, BUDGET_BYTES)) as index:
        assert index.was_sealed
        index.mend(columns(OLD), BUDGET_BYTES, untouched=True)
        assert dict(index.entries()) == OLD
        assert not index.is_fresh
    assert (tmp_path / "data.mdb").stat().st_ino == inode
    assert seal_holds(tmp_path)


def test_stopped_before_it_was_mended_it_is_not_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MEND_DELAY_S", 600.0)
    index = KeyIndex(tmp_path, BUDGET_BYTES)
    index.mend(columns(OLD), BUDGET_BYTES, untouched=True)
    index.apply([(KEYS[BLOCKS], Location(9, 9, 9))], [], {}, 1)
    index.close()
    assert not seal_holds(tmp_path)
    monkeypatch.setattr(index_module, "MEND_DELAY_S", 0.0)
    with closing(KeyIndex(tmp_path, BUDGET_BYTES)) as index:
        index.mend(columns(OLD), BUDGET_BYTES, untouched=True)
        assert dict(index.entries()) == OLD


def test_a_stale_index_that_lost_blocks_meanwhile_is_unsealed_at_once(tmp_path: Path) -> None:
    with closing(KeyIndex(tmp_path, BUDGET_BYTES)) as index:
        index.mend(columns(OLD), BUDGET_BYTES, untouched=True)
        index.wait_mended()
    fewer = dict(list(OLD.items())[3:])
    index = KeyIndex(tmp_path, BUDGET_BYTES)
    assert seal_holds(tmp_path)
    index.unseal()
    index.mend(columns(fewer), BUDGET_BYTES, untouched=False)
    assert dict(index.entries()) == fewer
    index.close()


changes = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from(["publish", "withdraw"]), st.integers(0, BLOCKS + 3)), max_size=30
)


@given(changes, st.booleans())
def test_what_is_committed_meanwhile_stays(todo: list[tuple[int, str, int]], was_sealed: bool) -> None:
    """`todo`: before which slice, what, to which block."""
    with TemporaryDirectory() as name:
        path = Path(name)
        if was_sealed:
            with closing(KeyIndex(path, BUDGET_BYTES)) as index:
                index.mend(columns(dict(list(OLD.items())[:30])), BUDGET_BYTES, untouched=True)
                index.wait_mended()
        index = KeyIndex(path, BUDGET_BYTES)
        expected, generation, fill, slices = dict(OLD), 1, index._fill, 0

        def commit(when: int) -> None:
            nonlocal generation
            for at, what, number in todo:
                key = KEYS[number]
                if at == when and what == "publish":
                    generation += 1
                    expected[key] = Location(2, number, generation)
                    index.apply([(key, expected[key])], [], {}, generation)
                elif at == when and key in expected:
                    index.apply([], [(key, expected.pop(key))], {}, generation)

        def fill_after_commits(entries: PackedEntries, first: int, last: int) -> bool:
            nonlocal slices
            slices += 1
            commit(slices)
            return fill(entries, first, last)

        index._fill = fill_after_commits  # type: ignore[method-assign]
        index._mended.clear()  # as `mend` does before its thread begins
        commit(0)
        index.mend(columns(OLD), BUDGET_BYTES, untouched=True)
        assert dict(index.entries()) == expected
        commit(6)
        assert dict(index.entries()) == expected
        index.close()
        assert read_sealed(path) == expected


def test_a_tier_works_before_its_index_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(NvmeTier.open(tmp_path, 8 << 20, slab_bytes=256 << 10)) as tier:
        slots = {number: put(tier, *block(number, 5000)) for number in range(1, 20)}
        assert finish(tier.sync).ok
    (tmp_path / "index" / "seal").unlink()
    monkeypatch.setattr(index_module, "MEND_DELAY_S", 600.0)
    with closing(NvmeTier.open(tmp_path, 8 << 20, slab_bytes=256 << 10)) as tier:
        assert {slot for slot, _ in tier.recover()} == set(slots.values())
        slots[50] = put(tier, *block(50, 5000))
        first = slots.pop(1)
        assert first is not None
        tier.free(first)
        assert finish(tier.sync).ok
    monkeypatch.setattr(index_module, "MEND_DELAY_S", 0.0)
    with closing(NvmeTier.open(tmp_path, 8 << 20, slab_bytes=256 << 10)) as tier:
        found = tier.recover_columns()
        assert {found.slot_of(position) for position in range(len(found))} == set(slots.values())
        assert all(tier.locate(block(number, 0)[0].key) == slot for number, slot in slots.items())
        assert tier.locate(block(1, 0)[0].key) is None


def test_columns_leave_out_what_was_freed_or_quarantined_before_they_were_asked_for(tmp_path: Path) -> None:
    with closing(NvmeTier.open(tmp_path, 8 << 20, slab_bytes=256 << 10)) as tier:
        slots = [put(tier, *block(number, 5000)) for number in range(1, 6)]
    with closing(NvmeTier.open(tmp_path, 8 << 20, slab_bytes=256 << 10)) as tier:
        assert slots[0] is not None and slots[1] is not None
        tier.free(slots[0])
        tier.quarantine(slots[1], "bad")
        found = tier.recover_columns()
        assert [found.slot_of(position) for position in range(len(found))] == slots[2:]
        assert len(tier.recover_columns()) == 3, "a second time, from the medium"


@pytest.mark.parametrize("how", ["free", "quarantine"])
def test_columns_leave_out_a_single_block_that_is_gone(tmp_path: Path, how: str) -> None:
    with closing(NvmeTier.open(tmp_path, 8 << 20, slab_bytes=256 << 10)) as tier:
        slots = [put(tier, *block(number, 5000)) for number in range(1, 4)]
    with closing(NvmeTier.open(tmp_path, 8 << 20, slab_bytes=256 << 10)) as tier:
        assert slots[0] is not None
        if how == "free":
            tier.free(slots[0])
        else:
            tier.quarantine(slots[0], "bad")
        found = tier.recover_columns()
        assert [found.slot_of(position) for position in range(len(found))] == slots[1:]
