"""A dict that forgets old entries: it keeps the entries set or found last, in two generations."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Generations(Generic[K, V]):
    """A dict that forgets old entries. It keeps at least the last `most` / 2 and at most `most` of the entries that
    were set or renewed. The time of a call does not grow with the number of entries.
    """

    def __init__(self, most: int) -> None:
        self._half = max(most // 2, 1)
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, key: K) -> bool:
        return key in self._young or key in self._old

    def get(self, key: K) -> V | None:
        found = self._young.get(key)
        return self._old.get(key) if found is None else found

    def renewed(self, key: K) -> V | None:
        """Return the value of `key`, or None, as `get` does, and make it one of the youngest entries."""
        found = self._young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self[key] = found
        return found

    def pop(self, key: K) -> V | None:
        old = self._old.pop(key, None)
        return self._young.pop(key, old)

    def __setitem__(self, key: K, value: V) -> None:
        self._old.pop(key, None)
        self._young[key] = value
        if len(self._young) > self._half:
            self._old, self._young = self._young, {}

    def names(self) -> list[K]:
        """Return a list of the keys, the older ones first."""
        return [*self._old, *self._young]

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield pairs of key and value, the older ones first."""
        yield from self._old.items()
        yield from self._young.items()
