"""The interface of an object store for runs and their log: whole objects by key, created only if the key is free.

Every method raises OSError (ConnectionError if the store cannot be reached), never a library's exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple


class Listed(NamedTuple):
    """An object in the listing of an object store: its `key`, and the time of its last change by the store's clock."""

    key: str
    changed_at: datetime


class Objects(ABC):
    """A store of objects by key, such as a bucket. `span_bytes` is the number of bytes that one read request should
    fetch at most.
    """

    span_bytes: int = 8 << 20

    @abstractmethod
    async def list(self, folder: str, after: str = "") -> list[Listed]:
        """Return all objects whose key is in `folder`, in the order of their keys. With `after`, only objects whose key
        comes after that key.
        """

    @abstractmethod
    async def get(self, key: str) -> bytes | None:
        """Return the content of the object `key`; None if it does not exist."""

    @abstractmethod
    async def get_range(self, key: str, start: int, end: int) -> memoryview | None:
        """Return the bytes of the object `key` from offset `start` to before `end`, or fewer if the object ends
        earlier. Return None if the object does not exist.
        """

    @abstractmethod
    async def create(self, key: str, content: bytes) -> bool:
        """Create the object `key` with `content`, and return True. If the object exists already, it stays unchanged and
        the result is False.
        """

    @abstractmethod
    async def put(self, key: str, content: bytes) -> None: ...

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects with these `keys`. Keys that do not exist are ignored."""
