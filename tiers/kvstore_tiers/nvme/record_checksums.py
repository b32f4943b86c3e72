"""The checksums of many records at once: xxh3_64 of 248 bytes under a seed of its own each.

Compiled code does it where the library of `host_copies` is loaded, else NumPy. A call of xxhash for each record costs
as much as NumPy, but holds the GIL all the time and makes two objects a record. The algorithm is frozen
(github.com/Cyan4973/xxHash, doc/xxhash_spec.md: inputs over 240 bytes, one block); what it yields is compared with
xxhash in the tests. It is written for this one length alone.

Owns the arithmetic and its scratch memory; never knows what a record means. Not thread-safe.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_cuda.host_copies import address_of, native

RECORD_WORDS = 32
DIGESTED_WORDS = RECORD_WORDS - 1  # the last one is the checksum
BATCH_RECORDS = 4096  # 3 MB of scratch: larger ones leave the cache, smaller ones pay for calls
_TRANSPOSED = 1024  # at once: each line of the cache is read while it is there
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    dtype="<u8",
)
_PRIME_1 = 0x9E3779B185EBCA87
_START = np.array(
    [0xC2B2AE3D, _PRIME_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77,
     0x27D4EB2F165667C5, 0x9E3779B1],
    dtype=np.uint64,
)[:, None]  # fmt: skip
_LENGTH_TERM = np.uint64(8 * DIGESTED_WORDS * _PRIME_1 & (1 << 64) - 1)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_LOW = np.uint64(0xFFFFFFFF)
_LANES = 8
_SECRET_WORDS = len(_SECRET)

Words = npt.NDArray[np.uint64]


def _shift(bits: int) -> np.uint64:
    return np.uint64(bits)


def words_of(records: memoryview, count: int) -> npt.NDArray[Any]:
    """Return the first `count` records in the memory `records` as little-endian 64-bit words, shape (count, 32),
    without a copy.
    """
    return np.frombuffer(records, "<u8", count * RECORD_WORDS).reshape(count, RECORD_WORDS)


class RecordChecksums:
    """A calculator of the checksums of up to 4096 records (`BATCH_RECORDS`) at a time, with its own scratch memory.
    Only one thread may use it.
    """

    def __init__(self) -> None:
        def scratch(words: int) -> Words:
            return np.empty((words, BATCH_RECORDS), np.uint64)

        self._data = scratch(RECORD_WORDS)
        self._secret = scratch(_SECRET_WORDS)
        self._lanes = scratch(_LANES)
        self._mixed = scratch(_LANES)
        self._other = scratch(_LANES)
        self._halves = [scratch(_LANES // 2) for _ in range(6)]

    def load(self, records: npt.NDArray[Any], seeds: Words) -> tuple[Words, Words]:
        """Copy `records`, at most `BATCH_RECORDS`, of the shape (n, 32), into scratch memory. `seeds`, uint64 (n,), are
        the record seeds of their slots. Return the records transposed, uint64 of the shape (32, n), valid until the
        next call, and the xxh3_64 checksum that each should have, uint64 (n,).
        """
        words = self._data[:, : len(records)]
        library = native.library
        if library is not None and records.flags.c_contiguous:
            digests, seeds = np.empty(len(records), np.uint64), np.ascontiguousarray(seeds)  # held during the call
            places = address_of(seeds), address_of(words), BATCH_RECORDS, address_of(digests)
            library.kv_load_records(address_of(records), len(records), *places)
            return words, digests
        for begin in range(0, len(records), _TRANSPOSED):
            part = slice(begin, begin + _TRANSPOSED)
            np.copyto(words[:, part], records[part].T)
        return words, self._digests(words, seeds)

    def _digests(self, words: Words, seeds: Words) -> Words:
        n = words.shape[1]
        data, secret = words[:DIGESTED_WORDS], self._secret[:, :n]
        lanes, mixed, other = self._lanes[:, :n], self._mixed[:, :n], self._other[:, :n]
        np.add(_SECRET[0::2, None], seeds, out=secret[0::2])
        np.subtract(_SECRET[1::2, None], seeds, out=secret[1::2])
        np.copyto(lanes, _START)
        for stripe in range(3):
            part = data[stripe * _LANES : (stripe + 1) * _LANES]
            np.bitwise_xor(part, secret[stripe : stripe + _LANES], out=mixed)
            _accumulate(lanes, part, mixed, other)
        _unaligned(secret, 15, 8, mixed, other)  # the last 64 bytes, with the secret from byte 121 on
        np.bitwise_xor(mixed, data[-_LANES:], out=mixed)
        _accumulate(lanes, data[-_LANES:], mixed, other)
        _unaligned(secret, 1, 24, mixed, other)  # and from byte 11 on for the merge
        np.bitwise_xor(lanes, mixed, out=lanes)
        folded = _fold_products(lanes[0::2], lanes[1::2], [half[:, :n] for half in self._halves])
        digest: Words = folded.sum(axis=0, dtype=np.uint64)
        digest += _LENGTH_TERM
        digest ^= digest >> _shift(37)
        digest *= _AVALANCHE
        digest ^= digest >> _shift(32)
        return digest


def _accumulate(lanes: Words, part: Words, mixed: Words, other: Words) -> None:
    np.add(lanes[0::2], part[1::2], out=lanes[0::2])
    np.add(lanes[1::2], part[0::2], out=lanes[1::2])
    np.bitwise_and(mixed, _LOW, out=other)
    np.right_shift(mixed, _shift(32), out=mixed)
    np.multiply(mixed, other, out=mixed)
    np.add(lanes, mixed, out=lanes)


def _unaligned(secret: Words, first: int, bits: int, out: Words, other: Words) -> None:
    """Write to `out` eight words of the secret that begin `bits` after its word `first`."""
    np.right_shift(secret[first : first + _LANES], _shift(bits), out=out)
    np.left_shift(secret[first + 1 : first + 1 + _LANES], _shift(64 - bits), out=other)
    np.bitwise_or(out, other, out=out)


def _fold_products(one: Words, two: Words, scratch: list[Words]) -> Words:
    """Return the two halves of the 128-bit products, xored."""
    one_low, one_high, two_low, two_high, low, cross = scratch
    np.bitwise_and(one, _LOW, out=one_low)
    np.right_shift(one, _shift(32), out=one_high)
    np.bitwise_and(two, _LOW, out=two_low)
    np.right_shift(two, _shift(32), out=two_high)
    np.multiply(one_low, two_low, out=low)
    np.multiply(one_high, two_low, out=cross)
    np.multiply(one_low, two_high, out=one_low)  # the other cross product
    np.multiply(one_high, two_high, out=one_high)  # the high product
    np.right_shift(low, _shift(32), out=two_low)
    np.bitwise_and(cross, _LOW, out=two_high)
    np.add(two_low, two_high, out=two_low)
    np.add(two_low, one_low, out=two_low)
    np.right_shift(cross, _shift(32), out=cross)
    np.add(one_high, cross, out=one_high)
    np.right_shift(two_low, _shift(32), out=two_high)
    np.add(one_high, two_high, out=one_high)
    np.left_shift(two_low, _shift(32), out=two_low)
    np.bitwise_and(low, _LOW, out=low)
    np.bitwise_or(two_low, low, out=two_low)
    np.bitwise_xor(two_low, one_high, out=two_low)
    return two_low
