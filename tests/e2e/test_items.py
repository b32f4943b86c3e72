"""Items against the real daemon: arrays of any size and type, hits in any order, and what a broken put leaves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvstore_client import Fingerprint, KVStoreError
from kvstore_client.items import ITEM_BLOCK_BYTES, Item, ItemStore, item_digest, item_fingerprint, item_of
from kvstore_proto.objects import object_tokens
from tests.reference.examples import examples
from tests.reference.running_daemon import RunningDaemon, running_daemon

FRESH = count()


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture(scope="module")
def store(daemon: RunningDaemon) -> Iterator[ItemStore]:
    with daemon.connect(fingerprint()) as session:
        yield ItemStore(session)


def fingerprint(weights: str = "w", library: str = "lib 1", **settings: str) -> Fingerprint:
    return item_fingerprint("test", model="m", weights=weights, dtype="f32", library=library, settings=settings)


def digest() -> bytes:
    return item_digest(str(next(FRESH)).encode())


def numbers(seed: int, size: int) -> Item:
    return item_of(np.random.default_rng(seed).standard_normal(size).astype(np.float32))


def same(found: Item | None, item: Item) -> bool:
    return (
        found is not None and (found.dtype, found.shape) == (item.dtype, item.shape) and (found.data == item.data).all()
    )


LONG = ITEM_BLOCK_BYTES // 4  # of float32: with its head, two blocks


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.one_of(
            hnp.arrays(st.sampled_from(["<f4", "<f8", "<i2", "|u1"]), hnp.array_shapes(min_dims=0, min_side=0)).map(
                item_of
            ),
            st.builds(numbers, st.integers(0, 99), st.sampled_from([LONG - 25, LONG - 24, LONG, 3 * LONG])),
            st.builds(lambda data: Item("bfloat16", (len(data),), np.frombuffer(data, np.uint8)), st.binary()),
        ),
        max_size=6,
    ),
    st.randoms(),
)
def test_items_are_got_as_they_were_put(store: ItemStore, items: list[Item], order: object) -> None:
    stored = [(digest(), item) for item in items]
    asked = [*stored, *stored[:1], (digest(), None)]
    order.shuffle(asked)  # type: ignore[attr-defined]
    assert store.get([name for name, _ in asked]) == [None] * len(asked)
    assert store.put(stored) == len(stored)
    for (_, item), found in zip(asked, store.get([name for name, _ in asked]), strict=True):
        assert found is None if item is None else same(found, item)


def test_the_first_item_of_a_digest_stays(store: ItemStore) -> None:
    name, first = digest(), numbers(1, 3 * LONG)
    store.put([(name, first)])
    assert store.put([(name, numbers(2, 3 * LONG))]) == 1
    assert same(store.get([name])[0], first)
    store.delete([name])
    assert store.get([name]) == [None]
    store.put([(name, numbers(2, 3 * LONG))])
    assert same(store.get([name])[0], numbers(2, 3 * LONG))


def test_an_item_that_lacks_a_block_is_a_miss_and_can_be_put_again(store: ItemStore) -> None:
    name, item, other = digest(), numbers(3, 3 * LONG), digest()
    store.put([(name, item), (other, item)])
    head = store.session.get(object_tokens(name.hex(), 1)).payload(0)[:32].tobytes()
    checksum = int.from_bytes(head[24:32], "little")
    store.session.delete(object_tokens(f"{name.hex()} {checksum:016x}", 1, first=2))
    assert store.get([name, other])[0] is None and same(store.get([other])[0], item)
    store.put([(name, item)])
    assert same(store.get([name])[0], item)


def test_bytes_that_are_no_item_are_a_miss(store: ItemStore) -> None:
    for junk in (bytes(4096), b"KVO1" + bytes(range(200)) * 20):
        name = digest()
        store.session.put(object_tokens(name.hex(), 1), payloads=[junk])
        assert store.get([name]) == [None]
        store.put([(name, numbers(4, 9))])
        assert same(store.get([name])[0], numbers(4, 9))


def test_what_is_missing_is_computed_once_in_one_call(store: ItemStore) -> None:
    names, calls = [digest() for _ in range(5)], list[list[int]]()

    def compute(missing: list[int]) -> list[Item]:
        calls.append(missing)
        return [numbers(place, 5) for place in missing]

    store.put([(names[3], numbers(33, 5))])
    asked = [*names, names[0], names[3]]
    found = store.through(asked, compute)
    assert calls == [[0, 1, 2, 4]]
    assert all(map(same, found, [numbers(seed, 5) for seed in (0, 1, 2, 33, 4, 0, 33)]))
    assert all(map(same, store.through(asked, compute), found)) and len(calls) == 1


def test_nothing_is_shared_between_fingerprints(daemon: RunningDaemon, store: ItemStore) -> None:
    name = digest()
    store.put([(name, numbers(1, 5))])
    for other in (fingerprint("v"), fingerprint(library="lib 2"), fingerprint(pooling="cls")):
        with daemon.connect(other) as session:
            assert ItemStore(session).get([name]) == [None]


def test_items_survive_a_kill(daemon: RunningDaemon) -> None:
    stored = [(digest(), numbers(seed, size)) for seed, size in enumerate([10, 10, 2 * LONG])]
    with daemon.connect(fingerprint()) as session:
        ItemStore(session).put(stored)
        session.put(object_tokens("last", 1), payloads=[bytes(16)], durability="always", wait="settled")
    daemon.kill9()
    daemon.restart()
    with daemon.connect(fingerprint()) as session:
        found = ItemStore(session, deadline_s=30).get([name for name, _ in stored])
    assert all(map(same, found, [item for _, item in stored]))


def test_without_a_daemon_nothing_is_found_and_nothing_raises(tmp_path: object) -> None:
    from kvstore_client import connect

    with connect(str(tmp_path), fingerprint=fingerprint()) as session:
        store = ItemStore(session)
        assert same(store.through([digest()], lambda missing: [numbers(1, 5)])[0], numbers(1, 5))
        assert store.contains([digest()]) == [False]


def test_wrong_calls_say_what_is_wrong(daemon: RunningDaemon, store: ItemStore) -> None:
    with pytest.raises(KVStoreError, match="32 bytes"):
        store.get([b"short"])
    with pytest.raises(KVStoreError, match="8 dimensions"):
        store.put([(digest(), Item("<f4", (1,) * 9, np.zeros(4, np.uint8)))])
    with daemon.connect() as session, pytest.raises(KVStoreError, match="kind 'items'"):
        ItemStore(session)
