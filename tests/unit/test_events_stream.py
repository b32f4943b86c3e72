"""Records become events: for every change of a block, in both encodings, for who came late and who lost some."""

from __future__ import annotations

import struct

import pytest

pytest.importorskip("msgspec", reason="msgspec (pip install 'kvstored[events]') is not installed")

import msgspec

from kvstored.events.encoding import Place, encoder, hash_of
from kvstored.events.records import (
    CHANGES,
    CHANGES_HEAD,
    RESET,
    Changes,
    KindRecord,
    Record,
    ResetRecord,
    StoredBlock,
    pack_kind,
    unpack,
)
from kvstored.events.stream import LEAST_STALE, NO_PARENT, EventStream
from tests.reference.vllm_kv_events import Subscriber

CPU, STORAGE, REMOTE = Place("CPU"), Place("STORAGE"), Place("STORAGE", "REMOTE")
PLACES = (CPU, CPU, STORAGE, REMOTE)  # DRAM, slow memory, NVMe, a remote tier
TOPIC = b"kv@n.t@m"
KIND = KindRecord(0, 2, 0, TOPIC)


def key(number: int) -> bytes:
    return struct.pack("<QQ", 2 * number + 2, 7)


def tokens(number: int) -> bytes:
    return struct.pack("<ii", number, -number)


def stored(
    number: int, mask: int = 1, parent: int | None = None, *, with_tokens: bool = True, kind: int = 0
) -> Changes:
    above = NO_PARENT if parent is None else key(parent)
    block = StoredBlock(number, kind, mask, key(number), above, tokens(number) if with_tokens else b"")
    return Changes(stored=[block])


def changed(number: int, mask: int) -> Changes:
    return Changes(changed=[(number, mask)]) if mask else Changes(gone=[number])


def stream(encoding: str = "map", buffer: int = 100, kept_bytes: int = 1 << 20) -> EventStream:
    made = EventStream(PLACES, encoder(encoding), buffer, lambda: 1.5, kept_bytes=kept_bytes)
    made.apply([KIND])
    list(made.batches())
    return made


def events_of(made: EventStream, *records: Record) -> list[object]:
    made.apply(records)
    return [event for batch in made.batches() for event in msgspec.msgpack.decode(batch.payload)[1]]


def block_stored(*numbers: int, parent: int | None = None, medium: str = "CPU") -> dict[str, object]:
    return {
        "type": "BlockStored", "block_hashes": [hash_of(key(number)) for number in numbers],
        "parent_block_hash": None if parent is None else hash_of(key(parent)),
        "token_ids": [each for number in numbers for each in (number, -number)], "block_size": 2, "lora_id": None,
        "medium": medium, "lora_name": None,
    }  # fmt: skip


def block_removed(*numbers: int, medium: str = "CPU") -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [hash_of(key(number)) for number in numbers], "medium": medium}


def test_a_chain_is_one_event_and_a_branch_another() -> None:
    assert events_of(stream(), stored(1), stored(2, parent=1), stored(3, parent=2), stored(4, parent=1)) == [
        block_stored(1, 2, 3), block_stored(4, parent=1),
    ]  # fmt: skip


def test_a_medium_is_left_with_its_last_copy() -> None:
    made = stream()
    assert events_of(made, stored(1)) == [block_stored(1)]
    assert events_of(made, changed(1, 0b11)) == [], "slow memory is CPU as well"
    assert events_of(made, changed(1, 0b110)) == [block_stored(1, medium="STORAGE")]
    assert events_of(made, changed(1, 0b100)) == [block_removed(1)]
    assert events_of(made, changed(1, 0b1100)) == [{**block_stored(1, medium="STORAGE"), "locality": "REMOTE"}]
    assert events_of(made, changed(1, 0)) == [
        block_removed(1, medium="STORAGE"), {**block_removed(1, medium="STORAGE"), "locality": "REMOTE"},
    ]  # fmt: skip


def test_tokens_that_become_known_are_published_for_every_medium() -> None:
    made = stream()
    assert events_of(made, stored(1, 0b100, with_tokens=False)) == [
        {**block_stored(1, medium="STORAGE"), "token_ids": []}
    ]
    assert events_of(made, stored(1, 0b101)) == [block_stored(1), block_stored(1, medium="STORAGE")]


def test_a_batch_of_either_encoding_byte_for_byte() -> None:
    made = {name: stream(name) for name in ("map", "array")}
    for each in made.values():
        each.apply([stored(1), stored(2, 0b1000, parent=1), changed(1, 0)])
    (as_map,), (as_array,) = ([batch.payload for batch in each.batches()] for each in made.values())
    one, two = hash_of(key(1)), hash_of(key(2))
    assert msgspec.msgpack.decode(as_array) == [
        1.5,
        [
            ["BlockStored", [one], None, [1, -1], 2, None, "CPU", None],
            ["BlockStored", [two], one, [2, -2], 2, None, "STORAGE", None, None, None, None, None, "REMOTE"],
            ["BlockRemoved", [one], "CPU"],
        ],
        0,
    ]
    assert msgspec.msgpack.decode(as_map)[1][1]["locality"] == "REMOTE"
    subscriber = Subscriber("array")
    subscriber.apply(0, as_array)
    assert subscriber.held() == {("STORAGE", ""): {two: (one, (2, -2))}}, "what old decoders do not know they skip"


def test_groups_of_layers_are_apart() -> None:
    made = stream()
    made.apply([KindRecord(1, 2, 3, TOPIC)])
    events = events_of(made, stored(1), stored(2, parent=1, kind=1))
    assert events == [block_stored(1), {**block_stored(2, parent=1), "group_idx": 3}]


def test_a_block_that_is_stored_again_elsewhere_is_not_removed() -> None:
    made = stream()
    events_of(made, stored(1))
    again = StoredBlock(9, 0, 1, key(1), NO_PARENT, tokens(1))
    assert events_of(made, Changes(stored=[again])) == [], "it never left"
    assert events_of(made, changed(1, 0)) == [], "its old row did"
    assert events_of(made, changed(9, 0)) == [block_removed(1)]


def test_messages_survive_any_cut() -> None:
    changes = (
        CHANGES_HEAD.pack(CHANGES, 1, 1, 2, 1, 2) + struct.pack("<I", 8) + struct.pack("<IB", 7, 4)
        + struct.pack("<II", 1, 2) + struct.pack("<II", 0, 0) + bytes([1, 3]) + struct.pack("<HH", 0, 2)
        + bytes([0, 1]) + key(1) + key(2) + NO_PARENT + tokens(2)
    )  # fmt: skip
    raw = pack_kind(0, 2, 0, TOPIC) + changes + bytes([RESET])
    blocks = [StoredBlock(1, 0, 1, key(1), NO_PARENT, b""), StoredBlock(2, 0, 3, key(2), key(1), tokens(2))]
    for cut in range(len(raw) + 1):
        data = bytearray(raw[:cut])
        found = list(unpack(data))
        data += raw[cut:]
        kind, middle, end = found + list(unpack(data))
        assert (kind, end) == (KIND, ResetRecord()) and not data
        assert isinstance(middle, Changes)
        assert (list(middle.gone), middle.changed, middle.stored) == ([8], [(7, 4)], blocks)


def test_batches_for_replay_are_bounded_by_their_bytes() -> None:
    made = stream(kept_bytes=1000)
    made.apply([KindRecord(1, 2, 0, b"kv@n.other@m")])
    for number in range(1, 40):
        events_of(made, stored(number, kind=number % 2))
        assert made.kept_bytes <= 1000
        for topic in made.topics:
            kept = made.replay(1, topic)
            assert len(kept) == 1 or sum(len(batch.payload) for batch in kept) <= 1000
    late = Subscriber()
    for batch in made.replay(0, TOPIC):
        late.apply(batch.number, batch.payload)
    assert set(late.held()["CPU", ""]) == {hash_of(key(number)) for number in range(2, 40, 2)}


def test_the_order_of_all_batches_forgets_those_that_are_not_kept() -> None:
    made = stream(buffer=3)
    made.apply([KindRecord(1, 2, 0, b"kv@n.idle@m")])
    events_of(made, stored(1, kind=1))  # the oldest of all, and kept
    for number in range(3 * LEAST_STALE):
        events_of(made, changed(2, 0) if number % 2 else stored(2))
    assert len(made._kept) <= 2 * LEAST_STALE
    assert [batch.number for batch in made.replay(0, b"kv@n.idle@m")] == [0]


def test_replay_has_the_batches_or_the_whole_state() -> None:
    made = stream(buffer=3)
    for number in range(1, 6):
        events_of(made, stored(number))
    assert [batch.number for batch in made.replay(4)] == [4, 5]
    assert made.replay(6) == [], "nothing is missed"
    (whole,) = made.replay(0)
    assert whole.number == 5 and made.snapshots == 1
    late = Subscriber()
    late.apply(whole.number, whole.payload)
    assert late.held() == {("CPU", ""): {hash_of(key(n)): (None, (n, -n)) for n in range(1, 6)}}
    (restarted,) = made.replay(4000)
    assert msgspec.msgpack.decode(restarted.payload)[1][0] == {"type": "AllBlocksCleared"}


def test_a_replay_without_a_topic_is_of_the_only_one() -> None:
    made = stream()
    assert [batch.topic for batch in made.replay(0)] == [TOPIC]
    made.apply([KindRecord(1, 2, 0, b"kv@n.other@m")])
    list(made.batches())
    assert made.replay(0) == [], "another tenant's events would be taken for this one's"
    assert [batch.topic for batch in made.replay(0, b"kv@n.other@m")] == [b"kv@n.other@m"]
    assert made.replay(0, b"kv@n") == []


def test_after_a_reset_everything_is_cleared_first() -> None:
    made = stream()
    events_of(made, stored(1))
    assert events_of(made, stored(2), ResetRecord(), KIND, stored(3)) == [
        {"type": "AllBlocksCleared"}, block_stored(3),
    ]  # fmt: skip


def test_the_real_decoder_of_vllm() -> None:
    """vLLM's own classes, where it is installed."""
    kv_events = pytest.importorskip("vllm.distributed.kv_events", reason="vllm is not installed")
    decoded = []
    for encoding in ("map", "array"):
        made = stream(encoding)
        made.apply([stored(1), stored(2, 0b100, parent=1), changed(1, 0)])
        (batch,) = made.batches()
        try:
            decoded.append(msgspec.msgpack.decode(batch.payload, type=kv_events.KVEventBatch))
        except msgspec.ValidationError:  # of the other encoding's time
            continue
    (batch_of_one,) = decoded
    assert [type(event).__name__ for event in batch_of_one.events] == ["BlockStored", "BlockStored", "BlockRemoved"]
    assert batch_of_one.events[0].token_ids == [1, -1]
