"""Golden vectors of the unary service: what other languages send and read, byte for byte.

Only ever add vectors. Changing one means breaking every client out there.
"""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from kvstore_proto.v1 import kvstore_pb2 as kv
from kvstore_proto.v1 import unary_pb2 as pb
from tests.reference.vectors import assert_encoded, assert_later_fields_are_skipped

KEYS = bytes(range(32))
TOKENS = pb.Chain(fingerprint=b"{}", group=1, token_ids=[7, 300], first_block=2, extras=KEYS[:16])
OBJECT = pb.Chain(object="an object", object_blocks=2, first_block=1)

VECTORS: dict[str, tuple[Message, str]] = {
    "lookup": (
        pb.UnaryLookupRequest(chain=TOKENS, match=kv.MATCH_WINDOW, window_blocks=4),
        "0a1f0a027b7d10011a0307ac0220022a10000102030405060708090a0b0c0d0e0f10011804",
    ),
    "lookup_reply": (
        pb.UnaryLookupReply(
            usable_blocks=1, statuses=[pb.KEY_STATUS_PRESENT, pb.KEY_STATUS_MISS],
            miss_reasons=[kv.MISS_REASON_UNSPECIFIED, kv.MISS_REASON_EVICTED],
            tiers=[kv.TIER_CODE_HOST, kv.TIER_CODE_ABSENT], load_us=[1, 0], payload_bytes=[1_474_560, 0], keys=KEYS,
        ),
        "0801120201001a020002220202002a020100320480805a003a20000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    "put": (
        pb.UnaryPutRequest(
            chain=OBJECT, payloads=[b"a", b"bc"], durability=kv.DURABILITY_MODE_ALWAYS, answer_early=True
        ),
        "0a0f20014a09616e206f626a65637450021201611202626318032001",
    ),
    "put_reply": (
        pb.UnaryPutReply(
            statuses=[pb.KEY_STATUS_STORED, pb.KEY_STATUS_NO_ROOM],
            durability=[kv.DURABILITY_DURABLE, kv.DURABILITY_VOLATILE], retry_after_ms=10, keys=KEYS,
        ),
        "0a02040612020200180a2220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    "get": (pb.UnaryGetRequest(chain=pb.Chain(keys=KEYS), max_wait_ms=300, max_blocks=2, max_bytes=1 << 22), "0a223220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f10ac0218022080808002"),
    "get_reply": (
        pb.UnaryGetReply(
            statuses=[pb.KEY_STATUS_SENT, pb.KEY_STATUS_OMITTED],
            miss_reasons=[kv.MISS_REASON_UNSPECIFIED, kv.MISS_REASON_UNSPECIFIED], payloads=[b"a"],
            promoted_blocks=1, keys=KEYS,
        ),
        "0a020203120200001a016120012a20000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    "prefetch": (pb.UnaryPrefetchRequest(chain=pb.Chain(keys=KEYS), budget_bytes=1 << 28), "0a223220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f108080808001"),
    "prefetch_reply": (
        pb.UnaryPrefetchReply(
            statuses=[pb.KEY_STATUS_SCHEDULED, pb.KEY_STATUS_MISS],
            miss_reasons=[kv.MISS_REASON_UNSPECIFIED, kv.MISS_REASON_CORRUPT], keys=KEYS,
        ),
        "0a020900120200061a20000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    "touch": (
        pb.UnaryTouchRequest(chain=pb.Chain(keys=KEYS), terms=kv.Terms(ttl_s=60, priority=-1, pin="a")),
        "0a223220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f1207083c10011a0161",
    ),
    "touch_reply": (
        pb.UnaryTouchReply(
            statuses=[pb.KEY_STATUS_PRESENT, pb.KEY_STATUS_MISS],
            miss_reasons=[kv.MISS_REASON_UNSPECIFIED, kv.MISS_REASON_EVICTED], keys=KEYS,
        ),
        "0a020100120200021a20000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    "delete": (pb.UnaryDeleteRequest(chain=pb.Chain(keys=KEYS)), "0a223220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"),
    "delete_reply": (
        pb.UnaryDeleteReply(
            statuses=[pb.KEY_STATUS_DELETED, pb.KEY_STATUS_CONTINUED, pb.KEY_STATUS_IN_USE],
            miss_reasons=[kv.MISS_REASON_UNSPECIFIED] * 3, deleted_bytes=1_474_560, keys=KEYS,
        ),
        "0a030a0c0b12030000001880805a2220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
}  # fmt: skip
# Numbers that other languages have compiled in.
STATUSES = {
    "MISS": 0, "PRESENT": 1, "SENT": 2, "OMITTED": 3, "STORED": 4, "ORPHANED": 5, "NO_ROOM": 6, "PENDING": 7,
    "REFUSED": 8, "SCHEDULED": 9, "DELETED": 10, "IN_USE": 11, "CONTINUED": 12,
    "OVER_QUOTA": 13, "DECLINED": 14,
}  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_vector(name: str) -> None:
    assert_encoded(*VECTORS[name])


@pytest.mark.parametrize("name", VECTORS)
def test_fields_of_a_later_release_are_passed_over(name: str) -> None:
    assert_later_fields_are_skipped(*VECTORS[name])


def test_the_numbers_of_statuses() -> None:
    assert {f"KEY_STATUS_{name}": number for name, number in STATUSES.items()} == dict(pb.KeyStatus.items())


def test_every_message_has_a_vector() -> None:
    covered = {type(message).DESCRIPTOR.name for message, _ in VECTORS.values()} | {"Chain"}
    assert covered == set(pb.DESCRIPTOR.message_types_by_name)
