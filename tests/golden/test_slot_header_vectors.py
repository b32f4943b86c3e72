"""Golden vector of the slot header: the bytes in arenas and on NVMe (docs/format.md, docs/shm.md)."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.arena import (
    HEADER_BYTES,
    MAX_TOKENS,
    BlockHeader,
    Coded,
    pack_unsummed,
    read_header,
    slot_bytes,
    unjudged_header,
)
from kvstore_proto.identity import pack_tokens

HEADER = BlockHeader(
    key=bytes(range(16)),
    parent=bytes(range(16, 32)),
    extra=bytes(range(32, 48)),
    fingerprint=bytes(range(48, 80)),
    tenant=bytes(range(80, 96)),
    group=3,
    depth=17,
    tokens=pack_tokens(range(64)),
    payload_bytes=1_474_560,
    generation=9,
    checksum=0x0123456789ABCDEF,
    created_ns=1_700_000_000_000_000_000,
)
FIXED_PART = "4b56423102000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f030000004000000000801600000000000900000000000000efcdab896745230100002a36fe9c971711000000000000007650bffa6119b8160080160000000000efcdab8967452301"
SHA256 = "1d45e6ac7201760e9f5054a67aa4ea7c3c4166b2208b0a4d43bd3d975d08426b"
CODED = replace(HEADER, coded=Coded(codec=7, nbytes=1_200_001, checksum=0xFEDCBA9876543210))
CODED_PART = "4b56423102000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f030007004000000000801600000000000900000000000000efcdab896745230100002a36fe9c9717110000000000000066b09f38e092eed1814f1200000000001032547698badcfe"
CODED_SHA256 = "b5ff468136baa74b0116fbf27a95a87d3fa22deb0f849641047bcd7cb53c05a1"
LOSSY = replace(CODED, error=0.25)


def test_the_bytes_of_a_header() -> None:
    for header, fixed_part, sha256 in ((HEADER, FIXED_PART, SHA256), (CODED, CODED_PART, CODED_SHA256)):
        packed = header.pack()
        assert len(packed) == HEADER_BYTES
        assert packed[:176].hex() == fixed_part
        assert hashlib.sha256(packed).hexdigest() == sha256


def test_fields_are_at_the_offsets_of_the_document() -> None:
    packed = HEADER.pack()
    assert packed[:4] == b"KVB1"
    assert packed[8:24] == HEADER.key
    assert packed[24:40] == HEADER.parent
    assert int.from_bytes(packed[108:112], "little") == 64
    assert int.from_bytes(packed[112:120], "little") == HEADER.payload_bytes
    assert int.from_bytes(packed[120:128], "little") == HEADER.generation
    assert packed[106:108] == bytes(2) and packed[160:168] == packed[112:120] and packed[168:176] == packed[128:136]
    assert packed[256:260] == bytes(4)
    assert packed[260:264] == (1).to_bytes(4, "little")


@pytest.mark.parametrize("counts", [(64, 64, 64), (0, 64, 3), (0, 0, 0)])
def test_headers_of_a_run_differ_from_single_ones_by_their_checksums(counts: tuple[int, ...]) -> None:
    run = [
        replace(
            HEADER, key=bytes([number]) * 16, parent=bytes([number - 1]) * 16, extra=bytes([number + 9]) * 16,
            depth=HEADER.depth + number - 1, generation=HEADER.generation * number, tokens=pack_tokens(range(count)),
            checksum=0, kept=5,
        )
        for number, count in enumerate(counts, 1)
    ]  # fmt: skip
    found = np.zeros((len(run), HEADER_BYTES), np.uint8)
    pack_unsummed(
        found, keys=[each.key for each in run], parents=[each.parent for each in run],
        extras=[each.extra for each in run], fingerprint=HEADER.fingerprint, tenant=HEADER.tenant, group=HEADER.group,
        payload_bytes=HEADER.payload_bytes, tokens=[each.tokens for each in run], depth=HEADER.depth,
        generations=[each.generation for each in run], created_ns=HEADER.created_ns, kept=5,
    )  # fmt: skip
    for header, each in zip(found, run, strict=True):
        packed = bytearray(each.pack())
        packed[152:160] = bytes(8)
        assert header.tobytes() == packed
        assert unjudged_header(bytes(packed)) == each


def test_a_lossy_copy_is_exact_but_for_its_error_bound() -> None:
    packed, exact = LOSSY.pack(), CODED.pack()
    assert packed[148:152].hex() == "0000803e" and exact[148:152] == bytes(4)
    assert packed[:148] == exact[:148] and packed[160:] == exact[160:]


@pytest.mark.parametrize("error", [math.nan, math.inf, -1.0])
def test_an_error_that_is_no_bound_is_no_header(error: float) -> None:
    assert isinstance(read_header(replace(CODED, error=error).pack()), str)


def test_round_trip() -> None:
    assert read_header(HEADER.pack()) == HEADER
    assert read_header(CODED.pack()) == CODED
    assert read_header(LOSSY.pack()) == LOSSY
    assert (CODED.codec, CODED.stored_bytes, CODED.stored_checksum) == CODED.coded
    assert (HEADER.codec, HEADER.stored_bytes, HEADER.stored_checksum) == (0, HEADER.payload_bytes, HEADER.checksum)


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    raw = bytearray(HEADER.pack())
    raw[bit // 8] ^= 1 << bit % 8
    assert isinstance(read_header(raw), str)


@given(st.binary(max_size=HEADER_BYTES + 10))
def test_garbage_is_described_never_raised(raw: bytes) -> None:
    assert isinstance(read_header(raw), str)


def test_sizes() -> None:
    assert slot_bytes(1) == 8192
    assert slot_bytes(4096) == 8192
    assert slot_bytes(4097) == 12288


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 960"):
        BlockHeader(
            key=bytes(16), parent=bytes(16), fingerprint=bytes(32), tenant=bytes(16), payload_bytes=1,
            tokens=bytes(4 * (MAX_TOKENS + 1)),
        ).pack()  # fmt: skip
