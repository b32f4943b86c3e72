"""Checksums of many records at once equal the ones that xxhash gives one by one, by compiled code and by NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore_cuda.host_copies import native
from kvstore_proto.arena import BlockHeader
from kvstore_tiers.nvme.layout import RecordState, pack_record
from kvstore_tiers.nvme.record_checksums import BATCH_RECORDS, RECORD_WORDS, RecordChecksums

MASK = (1 << 64) - 1
seeds = st.integers(0, MASK)


@pytest.fixture(autouse=True, scope="module", params=["compiled", "NumPy"])
def code(request: pytest.FixtureRequest) -> Iterator[None]:
    found = native.wait()
    if request.param == "compiled" and found is None:
        pytest.skip("no compiled code on this machine")
    native.library = found if request.param == "compiled" else None
    yield
    native.library = found


def digests(raw: bytes, of: list[int]) -> list[int]:
    records = np.frombuffer(raw, "<u8").reshape(-1, RECORD_WORDS)
    words, found = RecordChecksums().load(records, np.array(of, np.uint64))
    assert np.array_equal(words, records.T)
    return [int(each) for each in found]


@given(st.binary(min_size=256, max_size=256), seeds)
def test_a_digest_is_that_of_xxhash(raw: bytes, seed: int) -> None:
    assert digests(raw, [seed]) == [xxhash.xxh3_64_intdigest(raw[:248], seed=seed)]


@pytest.mark.parametrize("seed", [0, 1, MASK, 1 << 63])
@pytest.mark.parametrize("byte", [0, 0xFF])
def test_carries_and_borrows_at_the_edges(seed: int, byte: int) -> None:
    raw = bytes([byte]) * 256
    assert digests(raw, [seed]) == [xxhash.xxh3_64_intdigest(raw[:248], seed=seed)]


@pytest.mark.parametrize("count", [1, 2, 8, 4095, BATCH_RECORDS])
def test_each_record_has_its_own_seed(count: int) -> None:
    random = np.random.default_rng(count)
    raw = random.bytes(count * 256)
    given_seeds = [int(seed) for seed in random.integers(0, MASK, count, dtype=np.uint64)]
    expected = [xxhash.xxh3_64_intdigest(raw[i * 256 : i * 256 + 248], seed=seed) for i, seed in enumerate(given_seeds)]
    assert digests(raw, given_seeds) == expected


def test_records_apart_from_each_other_are_checked_too() -> None:
    raw = np.random.default_rng(5).integers(0, MASK, (20, RECORD_WORDS), np.uint64)
    every_other = RecordChecksums().load(raw[::2], np.arange(10, dtype=np.uint64))[1]
    assert every_other.tolist() == digests(np.ascontiguousarray(raw[::2]).tobytes(), list(range(10)))
    seeds = np.arange(40, dtype=np.uint64)[::2]
    assert RecordChecksums().load(raw, seeds)[1].tolist() == digests(raw.tobytes(), seeds.tolist())


def test_a_record_of_the_layout_holds() -> None:
    header = BlockHeader(b"k" * 16, b"p" * 16, b"f" * 32, b"t" * 16, 5000, depth=3, generation=9, checksum=7)
    raw = pack_record(header, RecordState.LIVE, 12, seed=77)
    assert digests(raw, [77]) == [int.from_bytes(raw[248:], "little")]
