"""A dict that forgets: what was set or found last is kept, in two generations."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Generations(Generic[K, V]):
    """At least `most` / 2 and at most `most` entries are known. A call takes the same time however many there are."""

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
        """As `get`; it is among the youngest from now on."""
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
        """A copy, the older ones first."""
        return [*self._old, *self._young]

    def items(self) -> Iterator[tuple[K, V]]:
        """The older ones first."""
        yield from self._old.items()
        yield from self._young.items()
