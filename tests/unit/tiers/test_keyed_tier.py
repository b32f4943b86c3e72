"""A key-addressed tier by itself: names, the order of operations on one name, objects that are lost or damaged."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.base import Outcome, OutcomeKind
from kvstore_tiers.keyed import UNKNOWN, KeyedTier
from kvstore_tiers.objects import object_name
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing.lossy_store import LossyStore
from kvstore_tiers.testing.transfers import block, finish, get, put
from tests.reference.running_daemon import eventually
from tests.reference.stored_blocks import stored_slot

CAPACITY_BYTES = 1 << 20
PAYLOAD_BYTES = 5000
PATIENCE_S = 30.0


def found(tier: KeyedTier, tenant: bytes, keys: list[bytes]) -> list[int]:
    answers: list[list[int]] = []
    answered = threading.Event()

    def note(answer: list[int]) -> None:
        answers.append(answer)
        answered.set()

    tier.find(tenant, keys, note)
    assert answered.wait(PATIENCE_S)
    return answers[0]


def test_what_one_process_stored_another_finds_and_reads() -> None:
    store = LossyStore()
    with closing(KeyedTier(store, CAPACITY_BYTES)) as ours:
        header, payload = block(1, PAYLOAD_BYTES)
        assert put(ours, header, payload) is not None
    with closing(KeyedTier(store, CAPACITY_BYTES)) as theirs:
        assert found(theirs, header.tenant, [header.key, b"?" * 16]) == [PAYLOAD_BYTES, -1]
        slot = theirs.allocate(12288)
        assert slot is not None
        theirs.adopt(slot, header.tenant, header.key)
        outcome, copy = get(theirs, slot, header.key, PAYLOAD_BYTES)
        assert outcome.ok and np.array_equal(copy, payload)


def test_another_tenants_block_of_the_same_key_is_another_object() -> None:
    store = LossyStore()
    with closing(KeyedTier(store, CAPACITY_BYTES)) as tier:
        header, payload = block(1, PAYLOAD_BYTES)
        assert put(tier, header, payload) is not None
        stranger = b"stranger".ljust(16, b"\0")
        assert found(tier, stranger, [header.key]) == [-1]
        store.objects[object_name(stranger, header.key)] = store.objects[object_name(header.tenant, header.key)]
        slot = tier.allocate(12288)
        assert slot is not None
        tier.adopt(slot, stranger, header.key)
        assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].kind is OutcomeKind.CORRUPT, "it says whose it is"


def test_what_the_store_has_forgotten_is_missing_and_not_damaged() -> None:
    store = LossyStore(lost=1.0)
    with closing(KeyedTier(store, CAPACITY_BYTES)) as tier:
        header, payload = block(1, PAYLOAD_BYTES)
        slot = stored_slot(tier, header, payload)
        assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].kind is OutcomeKind.MISSING
        assert tier.statistics().corrupt == 0


def test_no_flipped_bit_is_served() -> None:
    store = LossyStore()
    with closing(KeyedTier(store, CAPACITY_BYTES)) as tier:
        header, payload = block(1, PAYLOAD_BYTES)
        slot = stored_slot(tier, header, payload)
        name = object_name(header.tenant, header.key)
        whole = store.objects[name]
        # After the token ids the header page is padding, of which no byte means anything.
        covered = [*range(0, 256, 7), *range(HEADER_BYTES, len(whole), 97)]
        for at in covered:
            store.objects[name] = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
            assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].kind is OutcomeKind.CORRUPT, at
        for cut in (0, 10, HEADER_BYTES, len(whole) - 1):
            store.objects[name] = whole[:cut]
            assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].kind is OutcomeKind.CORRUPT, cut


@pytest.mark.parametrize("memory", [None, 3, 1])
def test_reads_that_wait_together_go_to_the_store_together(memory: int | None) -> None:
    """Each has its own bytes, or its own damage, also where the store has memory for a few of a call alone."""
    store, outcomes = LossyStore(), dict[int, Outcome]()
    blocks = [block(number, PAYLOAD_BYTES) for number in range(60)]
    copies = np.zeros((60, PAYLOAD_BYTES), np.uint8)
    with closing(KeyedTier(store, CAPACITY_BYTES, readers=2)) as tier:
        slots = [stored_slot(tier, *each) for each in blocks]
        for number, (header, _) in enumerate(blocks):
            name = object_name(header.tenant, header.key)
            if number % 10 == 3:
                del store.objects[name]
            elif number % 10 == 6:
                store.objects[name] = store.objects[object_name(header.tenant, blocks[0][0].key)]
        store.memory, store.calls = memory, 0
        store.hang()
        for number, (slot, (header, _)) in enumerate(zip(slots, blocks, strict=True)):
            tier.read(slot, header.key, [segment_of(copies[number])], partial(outcomes.__setitem__, number))
        store.let_go()
        assert eventually(lambda: len(outcomes) == 60)
    for number, (_, payload) in enumerate(blocks):
        kind = {3: OutcomeKind.MISSING, 6: OutcomeKind.CORRUPT}.get(number % 10, OutcomeKind.DONE)
        assert outcomes[number].kind is kind
        if kind is OutcomeKind.DONE:
            assert np.array_equal(copies[number], payload)
    most = {None: 12, 3: 24, 1: 60}[memory]  # calls: of eight each, but for the first two
    assert 60 / min(8, memory or 8) <= store.calls <= most


def test_operations_on_one_name_keep_their_order() -> None:
    """A block that leaves and comes again at once: its removal must not overtake its second write."""
    store = LossyStore(latency_s=0.001)
    with closing(KeyedTier(store, CAPACITY_BYTES)) as tier:
        header, payload = block(1, PAYLOAD_BYTES)
        for _ in range(50):
            slot = stored_slot(tier, header, payload)
            assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].ok
            tier.free(slot)
        assert finish(tier.sync).ok
        assert store.objects == {}


def test_removals_that_failed_are_tried_again_and_of_many_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_tiers.keyed.MOST_UNREMOVED", 2)
    store = LossyStore(refused=1.0)
    keys = [bytes([number]) * 16 for number in range(4)]
    with closing(KeyedTier(store, CAPACITY_BYTES, writers=1)) as tier:
        store.hang()
        for key in keys:
            store.objects[object_name(b"t" * 16, key)] = b"x"
            tier.remove(b"t" * 16, [key])
        ended: list[Outcome] = []
        tier.sync(ended.append)
        store.let_go()
        assert eventually(lambda: bool(ended)) and not ended[0].ok
        store.refused = 0.0
        assert finish(tier.sync).ok
        assert sorted(name[16:] for name in store.objects) == keys[:2]
        tier.remove(b"t" * 16, keys)
        assert finish(tier.sync).ok and not store.objects, "an order that is given again is carried out"


def test_sync_waits_for_what_came_before_and_for_nothing_else() -> None:
    store = LossyStore()
    with closing(KeyedTier(store, CAPACITY_BYTES)) as tier:
        header, payload = block(1, PAYLOAD_BYTES)
        slot = stored_slot(tier, header, payload)
        assert finish(tier.sync).ok
        store.hang()
        tier.free(slot)
        ended: list[Outcome] = []
        synced = threading.Event()

        def note(outcome: Outcome) -> None:
            ended.append(outcome)
            synced.set()

        tier.sync(note)
        assert not ended
        store.let_go()
        assert synced.wait(PATIENCE_S) and ended[0].ok and store.objects == {}


def test_a_store_that_refuses_is_an_outcome() -> None:
    store = LossyStore(refused=1.0)
    with closing(KeyedTier(store, CAPACITY_BYTES)) as tier:
        header, payload = block(1, PAYLOAD_BYTES)
        slot = tier.allocate(12288)
        assert slot is not None
        outcome = finish(lambda done: tier.write(slot, header, [segment_of(payload)], done))
        assert outcome.kind is OutcomeKind.FAILED and outcome.errno == 111
        assert finish(tier.probe).kind is OutcomeKind.FAILED
        assert found(tier, header.tenant, [header.key]) == [UNKNOWN]
        store.refused = 0.0
        assert finish(tier.probe).ok
