"""Compiled copies and hashes give what memmove, numpy and xxhash give, of every length and alignment."""

from __future__ import annotations

import ctypes as ct
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore_cuda import host_copies, native_build, side_thread
from kvstore_cuda.host_copies import (
    HASHED_MIN_BYTES,
    PAST_CACHES_BYTES,
    address_of,
    copy_array,
    copy_runs,
    native,
)
from kvstore_cuda.native_library import NativeLibrary
from kvstore_proto.arena import HEADER_BYTES, Bytes, slot_bytes
from kvstore_tiers.base import Outcome, Slot
from kvstore_tiers.codecs import native as native_codecs
from kvstore_tiers.host import HostTier
from kvstore_tiers.nvme.shared_columns import SlabScanner
from kvstore_tiers.segments import Segment, gather_and_checksum, segment_of
from kvstore_tiers.testing.transfers import block, image_run
from tests.reference.skips import skip_without_compiler

LENGTHS = st.one_of(st.integers(HASHED_MIN_BYTES, 5000), st.integers(PAST_CACHES_BYTES - 70, PAST_CACHES_BYTES + 5000))


@pytest.fixture(autouse=True, scope="module")
def library() -> ct.CDLL:
    skip_without_compiler()
    found = native.wait()
    if found is None:
        pytest.skip("no compiled copies on this processor")
    return found


@given(nbytes=LENGTHS, shift=st.integers(0, 70), seed=st.integers(0, 2**32 - 1))
def test_a_copy_and_its_hash(nbytes: int, shift: int, seed: int) -> None:
    source = np.random.default_rng(seed).integers(0, 256, nbytes + 70, np.uint8)[shift : shift + nbytes]
    for offset in (0, 70 - shift):
        around = np.zeros(nbytes + 140, np.uint8)
        target = around[offset : offset + nbytes]
        assert gather_and_checksum(target.ctypes.data, [segment_of(source)], nbytes) == xxhash.xxh3_64_intdigest(source)
        assert np.array_equal(target, source)
        target[:] = 0
        copy_array(target, source)
        assert np.array_equal(target, source)
        assert not around[:offset].any() and not around[offset + nbytes :].any(), "nothing beside it is written"


@given(stripes=st.lists(st.integers(1, 40), min_size=1, max_size=5), shift=st.sampled_from([0, 8, 32]))
def test_a_hash_of_bytes_that_come_in_pieces(library: ct.CDLL, stripes: list[int], shift: int) -> None:
    stripes[-1] += HASHED_MIN_BYTES // 64 + 1
    ends = np.cumsum(stripes) * 64
    source = np.random.default_rng(ends).integers(0, 256, int(ends[-1]), np.uint8)
    around, hashed, words, begin = np.zeros(source.nbytes + 128, np.uint8), 0, (ct.c_uint64 * 9)(), 0
    target = around[shift : shift + source.nbytes]
    library.kv_hash_begin(words)
    for end in ends.tolist():
        hashed = library.kv_hash_more(
            words, target[begin:].ctypes.data, source[begin:].ctypes.data, end - begin, begin < end == source.nbytes
        )
        begin = end
    assert hashed == xxhash.xxh3_64_intdigest(source.data) and np.array_equal(target, source)
    assert not around[:shift].any() and not around[shift + source.nbytes :].any(), "nothing beside it is written"


def test_a_copy_refuses_what_does_not_fit(library: ct.CDLL) -> None:
    with pytest.raises(ValueError, match="broadcast"):
        copy_array(np.zeros(PAST_CACHES_BYTES, np.uint8), np.zeros(PAST_CACHES_BYTES + 1, np.uint8))


@given(nbytes=st.sampled_from([1, 511, 512, 4096, 20_000]), count=st.integers(0, 20), shift=st.integers(0, 70))
def test_runs_of_equal_length(nbytes: int, count: int, shift: int, library: ct.CDLL) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, (count, nbytes + 7), np.uint8)
    stride = nbytes + 70
    order = np.random.default_rng(count).permutation(count)
    for found in (library, None):
        around = np.zeros((count, stride), np.uint8)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(native, "library", found)
            copy_runs(
                address_of(around) + shift + order * stride,
                address_of(source) + np.arange(count) * source.strides[0],
                nbytes,
            )
        written = around[order]
        assert np.array_equal(written[:, shift : shift + nbytes], source[:, :nbytes])
        assert not written[:, :shift].any() and not written[:, shift + nbytes :].any(), "nothing beside it is written"


@pytest.mark.parametrize(("count", "nbytes"), [(1, 3 * 2**20 + 1), (7, 700_001), (300, 10_240), (2, 2**20)])
def test_runs_that_two_threads_copy(count: int, nbytes: int, library: ct.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread takes lots of bytes that begin and end anywhere in a run, and no byte is left out."""
    both = threading.Barrier(2)

    def beside_another(*places: object) -> None:
        both.wait(20.0)
        library.kv_copy_runs(*places)

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    side_thread._queue.cache_clear()
    monkeypatch.setattr(native, "library", SimpleNamespace(kv_copy_runs=beside_another))
    source = np.random.default_rng(count).integers(0, 256, (count, nbytes), np.uint8)
    target = np.zeros((count, nbytes + 64), np.uint8)
    rows = np.arange(count)
    targets = address_of(target) + 32 + rows * target.strides[0]
    copy_runs(targets, address_of(source) + rows * source.strides[0], nbytes, shares=True)
    assert np.array_equal(target[:, 32:-32], source)
    assert not target[:, :32].any() and not target[:, -32:].any(), "nothing beside it is written"
    side_thread._queue.cache_clear()


def test_runs_without_a_source_each_are_refused() -> None:
    with pytest.raises(ValueError, match="2 targets for 1 sources"):
        copy_runs(np.zeros(2, np.int64), np.zeros(1, np.int64), 1)


@pytest.mark.parametrize("payload_bytes", [HASHED_MIN_BYTES, 4096, 12_000, 3 * 2**20 + 4096])
def test_slots_are_equal_to_the_bit(payload_bytes: int, monkeypatch: pytest.MonkeyPatch, library: ct.CDLL) -> None:
    """Blocks from elsewhere, and blocks whose payload is in its slot already."""
    images: list[list[bytes]] = []
    for found in (library, None):
        monkeypatch.setattr(native, "library", found)
        with closing(HostTier(64 << 20, arena_bytes=32 << 20)) as tier:
            images.append(_stored(tier, payload_bytes))
    assert images[0] == images[1]


def test_threads_that_store_a_run_together_write_the_same_headers(
    monkeypatch: pytest.MonkeyPatch, library: ct.CDLL
) -> None:
    both, one_stores, concatenate = threading.Barrier(2), threading.Event(), np.concatenate
    store, handed = library.kv_store_images, list[int]()

    def concatenate_beside_another(arrays: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            if threading.current_thread() is not threading.main_thread() and both.wait(1.0) == 0:
                one_stores.wait(1.0)
        return concatenate(arrays)

    def store_images(*given: int) -> None:
        handed.append(given[-1])
        one_stores.set()
        store(*given)

    monkeypatch.setattr(np, "concatenate", concatenate_beside_another)
    monkeypatch.setattr(library, "kv_store_images", store_images)
    with closing(HostTier(64 << 20, arena_bytes=32 << 20)) as tier:
        _stored(tier, 3 * 2**20 + 4096)
    assert len(handed) == 2 and len(set(handed)) == 1


def _stored(tier: HostTier, payload_bytes: int) -> list[bytes]:
    writes, slots, handed = [], list[Slot](), list[Sequence[Outcome]]()
    for number in range(5):
        header, payload = block(number, payload_bytes)
        slot = tier.allocate(slot_bytes(payload_bytes))
        assert slot is not None
        slots.append(slot)
        segment = segment_of(payload)
        if number % 2:
            tier.view(slot)[HEADER_BYTES : HEADER_BYTES + payload_bytes] = payload
            segment = tier.slot_segment(slot).part(HEADER_BYTES, payload_bytes)
        writes.append((slot, header, segment))
    ended = threading.Event()
    tier.write_many(image_run(writes), lambda outcomes: (handed.append(outcomes), ended.set()))
    assert ended.wait(30.0)
    assert all(outcome.ok for outcome in handed[0]) and tier.statistics().writes == 5
    for slot, header, _ in writes:
        written = header.stamped(slot.generation, xxhash.xxh3_64_intdigest(_payload(tier, slot, payload_bytes)))
        assert tier.view(slot)[:HEADER_BYTES].tobytes() == written.pack()
    return [tier.view(slot).tobytes() for slot in slots]


def _payload(tier: HostTier, slot: Slot, payload_bytes: int) -> Bytes:
    return tier.view(slot)[HEADER_BYTES : HEADER_BYTES + payload_bytes]


def test_the_hash_is_of_what_was_stored() -> None:
    """The source's last byte changes between two copies of it; each hash belongs to its own copy."""
    source, target = np.zeros(PAST_CACHES_BYTES + 64, np.uint8), np.ones(PAST_CACHES_BYTES + 64, np.uint8)
    for value in range(3):
        source[-1] = value
        found = gather_and_checksum(target.ctypes.data, [Segment(source.ctypes.data, len(source))], len(source))
        assert found == xxhash.xxh3_64_intdigest(target)


def test_nothing_is_made_where_the_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_copies.NATIVE_VARIABLE, "0")
    again = NativeLibrary("none", host_copies.NATIVE_VARIABLE, "", lambda: pytest.fail("made"))
    assert again.wait(1.0) is None
    monkeypatch.setattr(host_copies, "native", again)
    host_copies.load_if_compiled()
    assert again.library is None


def test_a_start_loads_what_is_compiled_and_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh = NativeLibrary("again", host_copies.NATIVE_VARIABLE, "", host_copies._made)
    monkeypatch.setattr(host_copies, "native", fresh)
    host_copies.load_if_compiled()
    assert fresh.library is None and not list(tmp_path.rglob("*")), "nothing is there yet, and nothing is made"
    assert fresh.wait() is not None, "the attempt to compile is still to come"
    again = NativeLibrary("once more", host_copies.NATIVE_VARIABLE, "", lambda: pytest.fail("made"))
    monkeypatch.setattr(host_copies, "native", again)
    host_copies.load_if_compiled()
    assert again.library is not None and again.get() is again.wait() is again.library


def test_the_early_scan_checks_records_by_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    again = NativeLibrary("early", host_copies.NATIVE_VARIABLE, "", lambda: pytest.fail("made"))
    monkeypatch.setattr(host_copies, "native", again)
    SlabScanner(-1, [])
    assert again.library is not None


@pytest.mark.parametrize("module", [host_copies, pytest.param(native_codecs, marks=pytest.mark.slow)])
def test_a_machine_without_a_compiler_uses_what_a_package_ships(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that differs from the shipped library's is not served by it."""
    shutil.copytree(module._FOLDER, tmp_path / "package")
    monkeypatch.setattr(module, "_FOLDER", tmp_path / "package")
    monkeypatch.setattr(native_build, "FLAGS", tuple(flag.replace("-O3", "-O0") for flag in native_build.FLAGS))
    module.ship()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native_build, "find_spec", lambda name: None)
    assert Path(module._made()._name).parent == tmp_path / "package"
    for source in (tmp_path / "package").glob("*.cpp"):
        source.write_text(source.read_text() + "// changed")
    with pytest.raises(native_build.BuildError, match=r"no C\+\+ compiler"):
        module._made()
