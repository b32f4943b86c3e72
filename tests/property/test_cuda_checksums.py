"""The kernel that checksums device memory computes what xxhash does, on the host."""

from __future__ import annotations

import ctypes as ct

import numpy as np
import pytest
import xxhash

from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.streams import _RANGE, _SHARED_BYTES, KERNEL, MOST_RANGES, PROGRAM, THREADS, ChecksumArgument
from kvstore_tiers.gpu.worker import MAX_TOGETHER
from tests.cuda_shim.launcher import placed, run_kernel

ROUND = 32 * 1024  # bytes that a thread block sums before it scrambles
LENGTHS = {
    "short": list(range(242)),
    "stripes": [241, 255, 256, 257, 319, 320, 321, 1023, 1024, 1025, 1087, 1088, 1089],
    "stretches": [2047, 2048, 2049, 4096, 9_999, ROUND - 1, ROUND, ROUND + 1, ROUND + 64, ROUND + 65, ROUND + 1024],
    "rounds": [2 * ROUND, 2 * ROUND + 1025, 5 * ROUND - 3, 300_001],
}


def checksums_of(ranges: list[np.ndarray], *, blocks: int, order: int) -> list[int]:
    rows = placed(np.zeros(len(ranges), _RANGE))
    rows["address"] = [each.ctypes.data for each in ranges]
    rows["nbytes"] = [each.nbytes for each in ranges]
    argument = ChecksumArgument(rows.ctypes.data, len(rows))
    options = {"threads": THREADS, "shared_bytes": _SHARED_BYTES, "order": order}
    run_kernel(PROGRAM, KERNEL, (blocks, 1, 1), argument, **options)
    return [int(each) for each in rows["sum"]]


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("order", [0, 1, 7])
def test_every_length_has_the_checksum_of_the_library(name: str, order: int) -> None:
    random = np.random.default_rng(order)
    ranges = [placed(random.integers(0, 256, nbytes, np.uint8)) for nbytes in LENGTHS[name]]
    found = checksums_of(ranges, blocks=3, order=order)
    wanted = [xxhash.xxh3_64_intdigest(each.tobytes()) for each in ranges]
    assert [hex(each) for each in found] == [hex(each) for each in wanted]


@pytest.mark.parametrize("byte", [0, 255])
def test_ranges_of_one_byte_over_and_over(byte: int) -> None:
    ranges = [placed(np.full(nbytes, byte, np.uint8)) for nbytes in (64, 240, 4096, 50_000)]
    assert checksums_of(ranges, blocks=8, order=0) == [xxhash.xxh3_64_intdigest(each.tobytes()) for each in ranges]


@pytest.mark.parametrize("at", [0, 4095, 16_384, 49_999])
def test_one_bit_changes_it(at: int) -> None:
    whole = placed(np.arange(50_000, dtype=np.uint64).astype(np.uint8))
    damaged = placed(whole)
    damaged[at] ^= 1
    first, second = checksums_of([whole, damaged], blocks=1, order=0)
    assert first != second


def test_what_a_worker_takes_together_fits_one_launch() -> None:
    assert MAX_TOGETHER * wire.MAX_CHECKED <= MOST_RANGES
    pieces = [wire.RegionPiece(1, 4096 * each, 0, 0, 4096) for each in range(wire.MAX_CHECKED + 1)]
    with pytest.raises(ValueError, match="65 pieces do not fit"):
        wire.pack_transfer(wire.CHECK, 7, pieces)
    assert wire.unpack_transfer(wire.pack_transfer(wire.CHECK, 7, pieces[:-1])) == (7, pieces[:-1])
    assert wire.unpack_sums(wire.pack_sums(7, [0, 2**64 - 1])) == [0, 2**64 - 1]


def test_its_argument_has_the_size_that_the_kernel_reads() -> None:
    assert ct.sizeof(ChecksumArgument) == 16 and _RANGE.itemsize == 24
