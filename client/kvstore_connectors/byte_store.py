"""A byte store for LangChain, such as its cache of embeddings needs, over the items of the store.

    store = KVStoreByteStore(namespace="all-MiniLM-L6-v2, weights of 2026-02")
    cached = CacheBackedEmbeddings.from_bytes_store(model, store)

The namespace is part of the fingerprint, and it cannot be left out: values of two models never meet. Values are kept
as blocks are: evicted and expired ones are not found any more. Keys are yielded from lists that each `mset` leaves: a
key is not yielded once its list was evicted, though its value may be there.

The class has LangChain's interface, and is a `BaseStore` where langchain_core is installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore_client.entry import DEFAULT_CONNECT_TIMEOUT_S
from kvstore_client.errors import invalid
from kvstore_client.items import Item, item_digest, item_fingerprint
from kvstore_connectors.engine_session import CurrentItems
from kvstore_proto.errors import ErrorKind, KVStoreError

if TYPE_CHECKING:
    _Base = object
else:
    try:
        from langchain_core.stores import BaseStore as _Base
    except ImportError:
        _Base = object

LISTS_A_READ: Final = 64  # as many missing ones in a row end the lists
_REPLACE_S, _PAUSE_S = 1.0, 0.005


class KVStoreByteStore(_Base):
    """A mapping of text to bytes in the daemon whose directory is `socket`. `namespace` names the model that the values
    come from, with a name for its weights: stores of one namespace share values. `ttl` is the number of seconds after
    which values expire, None for the tenant's. Connecting, and each lookup, take at most `deadline_s` seconds.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] = "",
        *,
        namespace: str,
        ttl: float | None = None,
        deadline_s: float = DEFAULT_CONNECT_TIMEOUT_S,
    ) -> None:
        if not isinstance(namespace, str) or not namespace:
            raise invalid("namespace= must name the model and its weights: values of two models would be confused")
        fingerprint = item_fingerprint("bytes", model=namespace, weights=namespace, dtype="u8", library="", settings={})
        self._items = CurrentItems(os.fspath(socket), "byte store", deadline_s)
        self._store = self._items.store(fingerprint)
        self._ttl, self._next_list = ttl, 0

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the value of each key, or None where there is none."""
        if self._store is None:
            return [None] * len(keys)
        found = self._store.get([_digest("value", key) for key in keys])
        return [None if item is None else item.data.tobytes() for item in found]

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        """Store values under keys, in place of the values there. Nothing is stored without a daemon, or where there is
        no room. Raises KVStoreError if an old value is being read for over a second.
        """
        pairs = dict(key_value_pairs)
        if self._store is None or not pairs:
            return
        digests = {key: _digest("value", key) for key in pairs}
        before = dict(zip(pairs, self._store.get(list(digests.values())), strict=True))
        changed = {key: item for key, item in before.items() if item is None or item.data.tobytes() != pairs[key]}
        self._remove([digests[key] for key, item in changed.items() if item is not None])
        self._store.put(((digests[key], _item(pairs[key])) for key in changed), ttl=self._ttl)
        if new := [key for key, item in changed.items() if item is None]:
            self._list(new)

    def mdelete(self, keys: Sequence[str]) -> None:
        """Delete the values of `keys`. Raises KVStoreError if one is being read for over a second."""
        self._remove([_digest("value", key) for key in keys])

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """Yield the keys that have a value and begin with `prefix`, in no order."""
        seen, number = set[str](), 0
        while lists := self._lists(number):
            number += LISTS_A_READ
            keys = [key for names in lists.values() for key in names if key.startswith(prefix or "")]
            keys = [key for key in dict.fromkeys(keys) if key not in seen]
            seen.update(keys)
            assert self._store is not None
            there = self._store.contains([_digest("value", key) for key in keys])
            yield from (key for key, is_there in zip(keys, there, strict=True) if is_there)

    async def amget(self, keys: Sequence[str]) -> list[bytes | None]:
        return await asyncio.to_thread(self.mget, keys)

    async def amset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        await asyncio.to_thread(self.mset, key_value_pairs)

    async def amdelete(self, keys: Sequence[str]) -> None:
        await asyncio.to_thread(self.mdelete, keys)

    async def ayield_keys(self, *, prefix: str | None = None) -> AsyncIterator[str]:
        for key in await asyncio.to_thread(lambda: list(self.yield_keys(prefix=prefix))):
            yield key

    def close(self) -> None:
        self._items.close()

    def _remove(self, digests: Sequence[bytes]) -> None:
        """Delete values, of which some may be under lease for a moment."""
        until = time.monotonic() + _REPLACE_S
        while self._store is not None and digests:
            self._store.delete(digests)
            digests = [
                digest for digest, is_there in zip(digests, self._store.contains(digests), strict=True) if is_there
            ]
            if digests and time.monotonic() >= until:
                raise KVStoreError(ErrorKind.THROTTLED, "an old value is being read and cannot be deleted: try again")
            if digests:
                time.sleep(_PAUSE_S)

    def _list(self, keys: list[str]) -> None:
        """Append a list of keys: under the next number that no other writer has taken."""
        store, item = self._store, _item(json.dumps(keys).encode())
        assert store is not None
        while store.session.state == "connected":
            lists = self._lists(self._next_list)
            number = max(lists, default=self._next_list - 1) + 1
            self._next_list = number
            if len(lists) == LISTS_A_READ:
                continue
            digest = _digest("keys", str(number))
            stored = store.put([(digest, item)], priority=1)
            (found,) = store.get([digest])
            if not stored or found is None or found.data.tobytes() == item.data.tobytes():
                return

    def _lists(self, first: int) -> dict[int, list[str]]:
        """Return the lists of keys among the next `LISTS_A_READ` numbers from `first` on."""
        if self._store is None:
            return {}
        numbers = range(first, first + LISTS_A_READ)
        found = self._store.get([_digest("keys", str(number)) for number in numbers])
        lists = zip(numbers, found, strict=True)
        return {number: json.loads(item.data.tobytes()) for number, item in lists if item is not None}


def _digest(kind: str, key: str) -> bytes:
    return item_digest(kind.encode(), key.encode("utf-8", "surrogatepass"))


def _item(value: bytes) -> Item:
    return Item("bytes", (len(value),), np.frombuffer(value, np.uint8))
