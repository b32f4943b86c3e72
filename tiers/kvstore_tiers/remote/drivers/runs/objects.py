"""The interface of an object store for runs and their log: whole objects by key, created only if the key is free.

Every method raises OSError (ConnectionError if the store cannot be reached), never a library's exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple


class Listed(NamedTuple):
    """An object in a listing. `changed_at` by the store's clock."""

    key: str
    changed_at: datetime


class Objects(ABC):
    """The objects of a store. `span_bytes`: the size of a read that is worth a request of its own, beside others."""

    span_bytes: int = 8 << 20

    @abstractmethod
    async def list(self, folder: str, after: str = "") -> list[Listed]:
        """Return all objects of a folder, in the order of their keys; with `after`, only the objects behind that
        key.
        """

    @abstractmethod
    async def get(self, key: str) -> bytes | None:
        """Return the content of an object; None if it does not exist."""

    @abstractmethod
    async def get_range(self, key: str, start: int, end: int) -> memoryview | None:
        """Return bytes [start, end), fewer if the object ends before; None if it does not exist."""

    @abstractmethod
    async def create(self, key: str, content: bytes) -> bool:
        """Create an object; return False if the key is taken: the old object stays unchanged."""

    @abstractmethod
    async def put(self, key: str, content: bytes) -> None: ...

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects that exist."""
