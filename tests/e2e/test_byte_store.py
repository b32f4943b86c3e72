"""The byte store of LangChain against the real daemon, beside a dict; its own suite of tests where it is installed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_connectors.byte_store import LISTS_A_READ, KVStoreByteStore
from kvstore_proto.errors import KVStoreError
from tests.reference.examples import examples
from tests.reference.running_daemon import RunningDaemon, running_daemon

FRESH = count()
KEYS = st.sampled_from(["a", "ab", "b", "ü", "k" * 300])
VALUES = st.binary(max_size=20) | st.just(bytes(300_000))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("mset"), st.lists(st.tuples(KEYS, VALUES), max_size=3)),
        st.tuples(st.just("mdelete"), st.lists(KEYS, max_size=2)),
    ),
    max_size=6,
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("limits.max_clients=64") as running:
        yield running


@pytest.fixture
def store(daemon: RunningDaemon) -> Iterator[KVStoreByteStore]:
    opened = KVStoreByteStore(daemon.socket_dir, namespace=f"model {next(FRESH)}", deadline_s=30)
    yield opened
    opened.close()


@settings(max_examples=examples(30), deadline=None)
@given(STEPS)
def test_it_is_a_mapping(daemon: RunningDaemon, steps: list[tuple[str, list[Any]]]) -> None:
    namespace, plain = f"property {next(FRESH)}", dict[str, bytes]()
    stores = [KVStoreByteStore(daemon.socket_dir, namespace=namespace, deadline_s=30) for _ in range(2)]
    try:
        for number, (kind, given_to) in enumerate(steps):
            getattr(stores[number % 2], kind)(given_to)
            plain.update(given_to if kind == "mset" else {})
            for key in given_to if kind == "mdelete" else []:
                plain.pop(key, None)
            reader = stores[(number + 1) % 2]
            asked = ["a", "missing", "ab", "b", "ü", "k" * 300, "a"]
            assert reader.mget(asked) == [plain.get(key) for key in asked]
            assert sorted(reader.yield_keys()) == sorted(plain)
            assert sorted(reader.yield_keys(prefix="a")) == sorted(key for key in plain if key.startswith("a"))
    finally:
        for each in stores:
            each.close()


def test_keys_of_many_lists_are_yielded_once(store: KVStoreByteStore) -> None:
    wanted = [f"key {number}" for number in range(LISTS_A_READ + 9)]
    for key in wanted:
        store.mset([(key, key.encode()), ("again", key.encode())])
    store.mdelete(["key 3"])
    store.mset([("key 3", b"new")])
    assert sorted(store.yield_keys()) == sorted([*wanted, "again"])


def test_namespaces_cannot_collide_nor_be_left_out(daemon: RunningDaemon, store: KVStoreByteStore) -> None:
    store.mset([("key", b"value")])
    other = KVStoreByteStore(daemon.socket_dir, namespace="another model", deadline_s=30)
    assert other.mget(["key"]) == [None] and list(other.yield_keys()) == []
    other.close()
    with pytest.raises(KVStoreError, match="namespace= must name the model"):
        KVStoreByteStore(daemon.socket_dir, namespace="")
    with pytest.raises(TypeError):
        KVStoreByteStore(daemon.socket_dir)  # type: ignore[call-arg]


def test_async_calls_and_no_daemon(store: KVStoreByteStore, tmp_path: Path) -> None:
    async def all_of(one: KVStoreByteStore) -> tuple[Any, Any, Any]:
        await one.amset([("x", b"1"), ("y", b"2")])
        await one.amdelete(["y"])
        return await one.amget(["x", "y"]), [key async for key in one.ayield_keys()], list(one.yield_keys(prefix="y"))

    assert asyncio.run(all_of(store)) == ([b"1", None], ["x"], [])
    alone = KVStoreByteStore(tmp_path, namespace="m")
    assert asyncio.run(all_of(alone)) == ([None, None], [], [])
    alone.close()


def test_langchain_is_not_needed() -> None:
    code = "import sys; sys.modules['langchain_core'] = None; import kvstore_connectors.byte_store as b; " \
        "print(b.KVStoreByteStore.__bases__)"  # fmt: skip
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "(<class 'object'>,)"


def test_langchain_caches_embeddings_in_it(store: KVStoreByteStore) -> None:
    stores = pytest.importorskip("langchain_core.stores", reason="needs langchain-core")
    from langchain_core.embeddings import DeterministicFakeEmbedding

    assert isinstance(store, stores.BaseStore)
    model = DeterministicFakeEmbedding(size=8)
    try:
        from langchain_classic.embeddings import CacheBackedEmbeddings
    except ImportError:
        pytest.skip("needs langchain-classic")
    cached = CacheBackedEmbeddings.from_bytes_store(model, store, namespace="m", key_encoder="sha256")
    assert cached.embed_documents(["a", "b"]) == model.embed_documents(["a", "b"])
    assert len(list(store.yield_keys(prefix="m"))) == 2
    assert cached.embed_documents(["b", "a", "c"]) == model.embed_documents(["b", "a", "c"])
