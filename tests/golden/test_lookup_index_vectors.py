"""Golden vectors of the lookup index: memory written by any release is read the same by every other.

Only ever add vectors. Changing one means a new version of the layout.
"""

from __future__ import annotations

import hashlib

from kvstore_proto.lookup_index import (
    ABSENT,
    BUCKET_BYTES,
    HEADER_BYTES,
    MAX_BUCKETS,
    UNKNOWN,
    IndexLayout,
    IndexState,
    bucket_offset,
    buckets_for,
    find,
    key_tag,
    pack_bucket,
    read_layout,
    read_state,
    with_overflow,
    with_tier,
)
from tests.reference.index_memory import TENANT, image_of, key_of, table_of

SEED = 0x0123456789ABCDEF
HEADER = "4b564931010040000010000004000000efcdab8967452301000102030405060708090a0b0c0d0e0f000000000000000000000000000000008577f01b64bbe697"
TAGS = {0: 0xB209CF2B74B4002B, 1: 0x5024ABF6E4ABE074, 2: 0xE4784B7FDE7C1F52}
BUCKET_OF_TWO = "06de369509878c360200000400000300050000000000000000000000000000000000000000000000000000000000008000000000000000000000000000000000"
LIVE = "02000000000000000b0000000000000000000000000000000d000000000000000000000000000000000000000000000000000000000000000000000000000000"
WHOLE = "7ea5feadcaf5833ebd1e3160adf0d4d54ec8d3cf9dd4c3b2eebb55965d94c793"


def test_header() -> None:
    layout = IndexLayout(4, SEED, TENANT)
    assert layout.pack().hex() == HEADER
    raw = layout.pack().ljust(layout.size_bytes, b"\0")
    assert read_layout(raw) == layout
    assert read_state(raw) == IndexState.CLOSED
    assert layout.size_bytes == HEADER_BYTES + 4 * BUCKET_BYTES


def test_tags_and_places() -> None:
    assert {number: key_tag(key_of(number), SEED) for number in TAGS} == TAGS
    assert [bucket_offset(tag, 4) for tag in TAGS.values()] == [4096 + 64 * (tag % 4) for tag in TAGS.values()]


def test_bucket() -> None:
    control = with_overflow(with_tier(with_tier(0, 0, 2), 3, 4), 3)
    checksum, body = pack_bucket(control, [5, 0, 0, 1 << 63, 0, 0])
    assert (checksum.to_bytes(8, "little") + body).hex() == BUCKET_OF_TWO
    assert pack_bucket(0, [0] * 6) == (0, bytes(56)), "memory that was never written is a whole, empty bucket"
    assert pack_bucket(with_overflow(0, 1 << 20), [0] * 6)[1][6:8] == b"\xff\xff"


def test_whole_memory() -> None:
    table = table_of(4, SEED)
    for number in range(12):
        table.put([key_of(number)], 4 if number % 3 else 2)
    table.remove([key_of(11)])
    image = image_of(table).tobytes()
    assert image[64:128].hex() == LIVE
    assert hashlib.sha256(image).hexdigest() == WHOLE
    assert [find(image, 3, SEED, key_of(number)) for number in (0, 1, 10, 11, 99)] == [2, 4, 4, ABSENT, ABSENT]
    table.close()


def test_a_layout_that_this_code_cannot_read_is_reported() -> None:
    good = IndexLayout(4, SEED, TENANT).pack().ljust(HEADER_BYTES + 4 * BUCKET_BYTES, b"\0")
    for damaged, why in (
        (b"KVI2" + good[4:], "magic"),
        (good[:4] + b"\x02" + good[5:], "version 2"),
        (good[:20] + b"\xff" + good[21:], "checksum"),
        (good[:-1], "cut short"),
        (good[:100], "cut short"),
    ):
        result = read_layout(damaged)
        assert isinstance(result, str) and why in result
    odd = IndexLayout(3, SEED, TENANT).pack().ljust(1 << 16, b"\0")
    assert isinstance(read_layout(odd), str)


def test_sizes() -> None:
    assert buckets_for(0, 1 << 30) == buckets_for(100, HEADER_BYTES + 63) == 0
    assert buckets_for(1, 1 << 30) == buckets_for(6, 1 << 30) == buckets_for(6, HEADER_BYTES + 64) == 1
    assert buckets_for(7, 1 << 30) == 2
    assert buckets_for(393_216, 1 << 30) == 65_536
    assert buckets_for(393_216, HEADER_BYTES + 1000 * 64) == 512
    assert buckets_for(1 << 40, 1 << 50) == MAX_BUCKETS


def test_a_damaged_bucket_is_unknown() -> None:
    table = table_of(1, SEED)
    table.put([key_of(0)], 2)
    for place in range(BUCKET_BYTES):
        image = image_of(table)
        image[HEADER_BYTES + place] ^= 1
        assert find(image.data, 0, SEED, key_of(0)) == find(image.data, 0, SEED, key_of(1)) == UNKNOWN
    table.close()
