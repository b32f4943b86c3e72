"""What runs and their log need of an object store: whole objects by key, created only where there is none.

Every method raises OSError (ConnectionError where the store cannot be reached), never a library's exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple


class Listed(NamedTuple):
    """`changed_at` by the store's clock."""

    key: str
    changed_at: datetime


class Objects(ABC):
    """`span_bytes`: so many bytes are worth a request of their own, which others run beside."""

    span_bytes: int = 8 << 20

    @abstractmethod
    async def list(self, folder: str, after: str = "") -> list[Listed]:
        """All of a folder, in the order of their keys; those behind the key `after` alone."""

    @abstractmethod
    async def get(self, key: str) -> bytes | None:
        """None where there is no such object."""

    @abstractmethod
    async def get_range(self, key: str, start: int, end: int) -> memoryview | None:
        """Bytes [start, end), fewer where the object ends before; None where there is none."""

    @abstractmethod
    async def create(self, key: str, content: bytes) -> bool:
        """False where an object of this key is there already: it stays as it is."""

    @abstractmethod
    async def put(self, key: str, content: bytes) -> None: ...

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Those that are there."""
