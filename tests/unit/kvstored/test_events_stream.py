"""Records become events: for every change of a block, in both encodings, for who came late and who lost some."""

from __future__ import annotations

import struct
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="msgspec (pip install '.[events]') is not installed")

import msgspec

from kvstored.events.encoding import CopyPlace, encoder
from kvstored.events.records import (
    CHANGES,
    CHANGES_HEAD,
    RESET,
    Changes,
    KindRecord,
    Record,
    ResetRecord,
    pack_kind,
    unpack,
)
from kvstored.events.stream import LEAST_STALE, MAX_RUN, EventStream
from tests.reference.event_records import StoredBlock, blocks_of, changes_of, hash_of
from tests.reference.vllm_kv_events import Subscriber

CPU, STORAGE, REMOTE = CopyPlace("CPU"), CopyPlace("STORAGE"), CopyPlace("STORAGE", "REMOTE")
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
    above = 0 if parent is None else hash_of(key(parent))
    block = StoredBlock(number, kind, mask, hash_of(key(number)), above, tokens(number) if with_tokens else b"")
    return changes_of(stored=[block])


def changed(number: int, mask: int) -> Changes:
    return changes_of(changed=[(number, mask)]) if mask else changes_of(gone=[number])


def stream(encoding: str = "map", buffer: int = 100, kept_bytes: int = 1 << 20) -> EventStream:
    made = EventStream(PLACES, encoder(encoding), buffer, lambda: 1.5, kept_bytes=kept_bytes)
    made.apply([KIND])
    list(made.batches())
    return made


def events_of(made: EventStream, *records: Record) -> list[Any]:
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


def test_a_message_has_what_is_gone_first_then_what_changed_then_what_is_stored() -> None:
    made = stream()
    events_of(made, stored(1), stored(2))
    again = StoredBlock(9, 0, 1, hash_of(key(1)), 0, tokens(1))
    everything = changes_of(gone=[1], changed=[(2, 0b100)], stored=[again])
    assert events_of(made, everything) == [
        block_removed(1, 2), block_stored(2, medium="STORAGE"), block_stored(1),
    ]  # fmt: skip
    assert events_of(made, changed(9, 0)) == [block_removed(1)]


def test_columns_of_many_blocks_say_what_single_messages_say() -> None:
    count = MAX_RUN + 200
    chain = [
        StoredBlock(n, 0, 0b101 if n in (50, 51) else 1, hash_of(key(n)), hash_of(key(n - 1)), tokens(n))
        for n in range(1, count)
    ]
    apart = [
        StoredBlock(count + n, n % 2, 0b1000, hash_of(key(count + n)), 0, b"" if n % 3 else tokens(n))
        for n in range(40)
    ]
    events = []
    for messages in ([changes_of(stored=[*chain, *apart])], [changes_of(stored=[each]) for each in (*chain, *apart)]):
        made = stream()
        made.apply([KindRecord(1, 2, 0, b"kv@n.other@m")])
        list(made.batches())
        made.apply(messages)
        found = {batch.topic: msgspec.msgpack.decode(batch.payload)[1] for batch in made.batches()}
        made.apply([changes_of(gone=[each.row for each in (*chain, *apart)])])
        found |= {batch.topic + b" gone": msgspec.msgpack.decode(batch.payload)[1] for batch in made.batches()}
        events.append(found)
    at_once, one_by_one = events
    assert at_once.keys() == one_by_one.keys()
    for topic, of_topic in one_by_one.items():
        assert _named(at_once[topic]) == _named(of_topic)
    longest = max(len(each["block_hashes"]) for each in at_once[TOPIC])
    assert longest == MAX_RUN


def _named(events: list[dict[str, Any]]) -> list[tuple[str, str, int, list[int]]]:
    """Return what each event says of each of its blocks."""
    found = []
    for event in events:
        ids, hashes = event.get("token_ids", []), event["block_hashes"]
        of_each = len(ids) // len(hashes)
        for at, number in enumerate(hashes):
            above = hashes[at - 1] if at else event.get("parent_block_hash")
            found.append((event["type"], event["medium"], number, [above, *ids[at * of_each : (at + 1) * of_each]]))
    return found


@pytest.mark.parametrize("ids", [(), (0, 65535), (0, 65536), (7, 2**31 - 1), (-1, 5), (-(2**31), 65535)])
def test_token_ids_of_every_width(ids: tuple[int, ...]) -> None:
    packed = struct.pack(f"<{len(ids)}i", *ids)
    made = stream()
    made.apply([KindRecord(0, 0, 0, TOPIC)])
    (event,) = events_of(made, changes_of(stored=[StoredBlock(1, 0, 1, 5, 0, packed)]))
    assert event["token_ids"] == list(ids) and event["block_size"] == len(ids)


def test_messages_survive_any_cut() -> None:
    changes = (
        CHANGES_HEAD.pack(CHANGES, 1, 1, 2, 1, 2) + struct.pack("<I", 8) + struct.pack("<IB", 7, 4)
        + struct.pack("<II", 1, 2) + struct.pack("<II", 0, 0) + bytes([1, 3]) + struct.pack("<HH", 0, 2)
        + bytes([0, 1]) + key(1) + key(2) + key(9) + tokens(2)
    )  # fmt: skip
    raw = pack_kind(0, 2, 0, TOPIC) + changes + bytes([RESET])
    one, two, nine = (hash_of(key(number)) for number in (1, 2, 9))
    blocks = [StoredBlock(1, 0, 1, one, nine, b""), StoredBlock(2, 0, 3, two, one, tokens(2))]
    for cut in range(len(raw) + 1):
        data = bytearray(raw[:cut])
        found = list(unpack(data))
        data += raw[cut:]
        kind, middle, end = found + list(unpack(data))
        assert (kind, end) == (KIND, ResetRecord()) and not data
        assert isinstance(middle, Changes)
        assert ([*middle.gone], [*middle.changed], [*middle.masks], blocks_of(middle)) == ([8], [7], [4], blocks)


def test_batches_for_replay_are_bounded_by_their_bytes() -> None:
    made = stream(kept_bytes=1000)
    made.apply([KindRecord(1, 2, 0, b"kv@n.other@m")])
    for number in range(1, 40):
        events_of(made, stored(number, kind=number % 2))
        assert made.kept_bytes <= 1000
        for topic in made.topics:
            kept = list(made.replay(1, topic))
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
    assert list(made.replay(6)) == [], "nothing is missed"
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
    assert list(made.replay(0)) == [], "another tenant's events would be taken for this one's"
    assert [batch.topic for batch in made.replay(0, b"kv@n.other@m")] == [b"kv@n.other@m"]


def test_of_an_unknown_topic_a_replay_says_that_nothing_is_stored() -> None:
    made = EventStream(PLACES, encoder("map"), 10, lambda: 0.0, first_number=1 << 31)
    (cleared,) = made.replay(7, b"kv@n.former@m")
    assert msgspec.msgpack.decode(cleared.payload)[1] == [{"type": "AllBlocksCleared"}]
    assert cleared.number == (1 << 31) - 1, "above every number before, and below the topic's first, should it come"
    assert list(made.replay(7)) == []


def test_topics_of_a_process_before_are_cleared_at_once() -> None:
    made = EventStream(PLACES, encoder("map"), 10, lambda: 0.0, first_number=5, former_topics=["kv@n.former@m"])
    made.apply([KIND])
    assert [(batch.topic, batch.number) for batch in made.batches()] == [(b"kv@n.former@m", 5), (TOPIC, 5)]
    assert [batch.topic for batch in made.replay(0)] == [TOPIC], "the only one that is published now"


def test_a_silent_topic_goes_on_counting() -> None:
    made = stream()
    assert list(made.beats()) == [], "it had a batch since the last call"
    (beat,) = made.beats()
    assert beat.number == 1 and msgspec.msgpack.decode(beat.payload)[1] == []
    assert [batch.number for batch in made.replay(0)] == [0, 1], "without a gap"
    events_of(made, stored(1))
    assert list(made.beats()) == []


def test_a_snapshot_has_parents_first_in_whichever_place() -> None:
    made = stream(buffer=1)
    made.apply([KindRecord(1, 2, 3, TOPIC)])
    events_of(made, stored(3, 0b101, parent=2), stored(1, 0b100), stored(2, 0b100, parent=1), stored(4, 1, parent=3))
    events_of(made, stored(11, 0b100, kind=1), stored(12, 1, parent=11, kind=1), stored(21, 1, parent=20))
    (whole,) = made.replay(0)
    known: set[int | None] = {None, hash_of(key(20))}  # which is stored nowhere
    places: dict[str, set[int]] = {}
    for event in msgspec.msgpack.decode(whole.payload)[1][1:]:
        assert event["parent_block_hash"] in known
        known |= set(event["block_hashes"])
        places.setdefault(event["medium"], set()).update(event["block_hashes"])
    assert places == {
        "CPU": {hash_of(key(number)) for number in (3, 4, 12, 21)},
        "STORAGE": {hash_of(key(number)) for number in (1, 2, 3, 11)},
    }


def test_a_chain_in_two_places_is_two_events_of_a_snapshot() -> None:
    made = stream(buffer=1)
    events_of(made, stored(1, 0b101))
    events_of(made, stored(2, 0b101, parent=1))
    (whole,) = made.replay(0)
    events = msgspec.msgpack.decode(whole.payload)[1]
    assert events == [{"type": "AllBlocksCleared"}, block_stored(1, 2), block_stored(1, 2, medium="STORAGE")]


def test_a_replay_that_is_read_slowly_ends_with_what_is_stored() -> None:
    made = stream(buffer=3)
    for number in range(1, 4):
        events_of(made, stored(number))
    slow = made.replay(1)
    late = Subscriber()
    first = next(slow)
    for number in range(4, 9):
        events_of(made, stored(number))
    for batch in (first, *slow):
        late.apply(batch.number, batch.payload)
    assert set(late.held()["CPU", ""]) == {hash_of(key(number)) for number in range(1, 9)} and late.last == 8


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
