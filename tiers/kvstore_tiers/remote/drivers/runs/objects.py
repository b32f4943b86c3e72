"""The interface of an object store for runs and their log: whole objects by key, created only if the key is free.

Every method raises OSError (ConnectionError if the store cannot be reached), never a library's exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple


class Listed(NamedTuple):
    """One object in the listing of an object store. `changed_at` is the time of its last change by the store's
    clock.
    """

    key: str
    changed_at: datetime


class Objects(ABC):
    """A store of objects by key, such as a bucket. `span_bytes` is the size from which a read is better made as a
    request of its own.
    """

    span_bytes: int = 8 << 20

    @abstractmethod
    async def list(self, folder: str, after: str = "") -> list[Listed]:
        """Return all objects whose key is in `folder`, ordered by key; only those after the key `after`, if it is
        given.
        """

    @abstractmethod
    async def get(self, key: str) -> bytes | None:
        """Return the content of the object `key`; None if it does not exist."""

    @abstractmethod
    async def get_range(self, key: str, start: int, end: int) -> memoryview | None:
        """Return the bytes from `start` to before `end` of the object `key`, fewer if it is shorter; None if it does
        not exist.
        """

    @abstractmethod
    async def create(self, key: str, content: bytes) -> bool:
        """Create the object `key` with `content`, and return True. If it exists, leave it unchanged and return
        False.
        """

    @abstractmethod
    async def put(self, key: str, content: bytes) -> None: ...

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects `keys`; missing ones are ignored."""
