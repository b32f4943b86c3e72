"""Golden vectors of the wire: a message encoded by any earlier release is decoded the same by this one.

Only ever add vectors. Changing one means breaking every client out there.
"""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from kvstore_proto.errors import ErrorKind
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from tests.reference.vectors import assert_encoded, assert_later_fields_are_skipped

KEYS = bytes(range(32))

VECTORS: dict[str, tuple[Message, str]] = {
    "lookup": (
        pb.Request(
            request_id=7, deadline_ms=250,
            lookup=pb.Lookup(sets=[pb.KeySet(group=1, keys=KEYS, match=pb.MATCH_WINDOW, window_blocks=4)]),
        ),
        "080710fa015a2a0a2808011220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f18012004",
    ),
    "presence": (
        pb.Response(
            request_id=7,
            lookup=pb.LookupReply(
                sets=[
                    pb.Presence(
                        usable_blocks=1, tiers=b"\x02\x00", load_us=[1, 300], miss_reason=pb.MISS_REASON_EVICTED
                    )
                ]
            ),
        ),
        "08075a0f0a0d0801120202001a0301ac022002",
    ),
    "stored_and_pending": (
        pb.Response(
            request_id=9,
            store=pb.StoreReply(
                statuses=bytes([pb.STORE_STATUS_STORED, pb.STORE_STATUS_PRESENT]),
                durability=bytes([pb.DURABILITY_DURABLE, pb.DURABILITY_PENDING]),
            ),
        ),
        "08096a080a02010212020201",
    ),
    "acquired": (
        pb.Response(
            request_id=10,
            acquire=pb.AcquireReply(
                lease_id=5, blocks=1, arena_ids=[2], offsets=[4096], payload_bytes=[1_474_560], generations=[3],
                expires_in_ms=30_000, promoted_bytes=1_478_656, promoted_blocks=1,
            ),
        ),
        "080a7a1d080510011a0102220280202a0380805a32010338b0ea014880a05a5001",
    ),
    "acquire_mapped": (
        pb.Request(
            request_id=12, acquire=pb.Acquire(set=pb.KeySet(keys=KEYS), max_wait_ms=200, mapped_only=True)
        ),
        "080c7a290a221220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f10c8011801",
    ),
    "acquired_mapped": (
        pb.Response(
            request_id=12,
            acquire=pb.AcquireReply(
                lease_id=6, blocks=1, arena_ids=[2], offsets=[4096], payload_bytes=[64], generations=[3],
                expires_in_ms=30_000, resident_blocks=2, load_us=900,
            ),
        ),
        "080c7a1a080610011a0102220280202a014032010338b0ea015802608407",
    ),
    "error": (
        pb.Response(
            request_id=11, error=pb.Error(kind=pb.ERROR_KIND_THROTTLED, message="full", retry_after_ms=5)
        ),
        "080b4a0a0805120466756c6c1805",
    ),
    "hello": (
        hs.ClientPacket(
            hello=hs.Hello(protocol_version=1, client_name="vllm", fingerprint=b"{}", staging_bytes=1 << 26)
        ),
        "0a1108011204766c6c6d1a027b7d2080808020",
    ),
    "hello_on_a_device": (
        hs.ClientPacket(hello=hs.Hello(protocol_version=1, client_name="vllm", device_identity=0x0807060504030201)),
        "0a1108011204766c6c6d390102030405060708",
    ),
    "welcome": (
        hs.DaemonPacket(
            welcome=hs.Welcome(
                protocol_version=1, session_token=KEYS[:16], tenant="chat", roots=[KEYS[16:]], staging_bytes=1 << 26,
                lease_ttl_ms=30_000, daemon_epoch=KEYS[:16], data_socket="/run/kvstored/data.sock", max_keys=4096,
                max_block_bytes=1 << 26,
            )
        ),
        "0a6808011210000102030405060708090a0b0c0d0e0f1a04636861742210101112131415161718191a1b1c1d1e1f288080802030b0ea013a10000102030405060708090a0b0c0d0e0f42172f72756e2f6b7673746f7265642f646174612e736f636b4880205080808020",
    ),
    "delete": (
        pb.Request(request_id=11, delete=pb.Delete(set=pb.KeySet(group=1, keys=KEYS))),
        "080b9a01260a2408011220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    "deleted": (
        pb.Response(
            request_id=11, delete=pb.DeleteReply(deleted=3, deleted_bytes=4_423_680, leased=1, continued=2, missing=300)
        ),
        "080b9a010e08031080808e021801200228ac02",
    ),
    "welcome_with_an_index": (
        hs.DaemonPacket(welcome=hs.Welcome(protocol_version=1, arena_ids=[1, 2], lookup_index=True)),
        "0a0808015a0201026001",
    ),
    "lookup_index_wanted": (hs.ClientPacket(lookup_index=hs.LookupIndexRequest()), "1a00"),
    "lookup_index": (hs.DaemonPacket(lookup_index=hs.LookupIndexGrant(size_bytes=2_101_248)), "22050880a08001"),
    "no_lookup_index": (hs.DaemonPacket(lookup_index=hs.LookupIndexGrant(reason="none")), "220612046e6f6e65"),
    "welcome_with_a_direct_stream": (
        hs.DaemonPacket(welcome=hs.Welcome(protocol_version=1, direct_stream=True)),
        "0a0408017801",
    ),
    "direct_stream_wanted": (hs.ClientPacket(direct_stream=hs.DirectStreamRequest()), "2200"),
    "direct_stream": (hs.DaemonPacket(direct_stream=hs.DirectStreamGrant()), "2a00"),
    "lend": (
        pb.Request(request_id=13, lend=pb.Lend()),
        "080da20100",
    ),
    "lent": (
        pb.Response(request_id=13, lend=pb.LendReply(loan=2)),
        "080da201020802",
    ),
    "store": (
        pb.Request(
            request_id=14,
            store=pb.Store(
                loan=2, group=1, keys=KEYS, parents=bytes(16) + KEYS[:16], payload_bytes=1_474_560, pages=[3, 0],
                durability=pb.DURABILITY_MODE_BATCH,
            ),
        ),
        "080eaa0152080210011a20000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f222000000000000000000000000000000000000102030405060708090a0b0c0d0e0f3080805a3a0203004002",
    ),
    "stored": (
        pb.Response(
            request_id=14,
            store=pb.StoreReply(
                statuses=bytes([pb.STORE_STATUS_WANTED, pb.STORE_STATUS_AGAIN]), durability=bytes(2), final=True
            ),
        ),
        "080e6a0a0a020708120200001801",
    ),
    "hint": (
        pb.Request(
            request_id=15,
            hint=pb.Hint(
                set=pb.KeySet(group=1, keys=KEYS), will_continue=0.0, due_in_ms=1500, next_step=pb.NEXT_STEP_TOOL_CALL,
                answer_tokens=300,
            ),
        ),
        "080fb201330a2408011220000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f150000000018dc0b200128ac02",
    ),
    "hinted": (pb.Response(request_id=15, hint=pb.HintReply(known_blocks=2)), "080fb201020802"),
    "acquire_of_a_prompt": (
        pb.Request(request_id=16, acquire=pb.Acquire(set=pb.KeySet(keys=KEYS[:16]), prompt_tokens=77)),
        "08107a160a121210000102030405060708090a0b0c0d0e0f204d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_vector(name: str) -> None:
    assert_encoded(*VECTORS[name])


@pytest.mark.parametrize("name", VECTORS)
def test_fields_of_a_later_release_are_passed_over(name: str) -> None:
    assert_later_fields_are_skipped(*VECTORS[name])


def test_error_kinds_are_the_wires() -> None:
    on_the_wire = {name.removeprefix("ERROR_KIND_"): number for name, number in pb.ErrorKind.items()}
    assert on_the_wire == {kind.name: kind.value for kind in ErrorKind}
