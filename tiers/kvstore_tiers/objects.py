"""The contract of a store that knows objects by name, for a key-addressed tier (`keyed.py`).

A name is the tenant's digest and the block's key, 32 bytes. An object is a block's image: its header page, then its
payload. A store may forget objects, and is not believed: the tier verifies what it returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

DIGEST_BYTES = 16


class DamagedObject(Exception):
    """The bytes that the store has under a name are not the object of that name, or too large; the message says how
    that shows.
    """


Found = memoryview | DamagedObject | None  # None: there is none


def object_name(tenant: bytes, key: bytes) -> bytes:
    """Return an object's name. `tenant` is the digest in the header of its blocks, 16 bytes."""
    return tenant + key


class ObjectStore(ABC):
    """A store of named objects, which `KeyedTier` writes blocks to. Methods wait, are called from several threads at
    once, and raise OSError when they fail. `largest_bytes`: no larger object can be stored.
    """

    name: str
    largest_bytes: int

    @property
    def is_ready(self) -> bool:
        """False while it starts: an operation would wait for that."""
        return True

    @abstractmethod
    def sizes(self, names: Sequence[bytes]) -> list[int]:
        """Return the bytes of each object; 0 for a missing one."""

    @abstractmethod
    def read(self, wanted: Sequence[tuple[bytes, int]]) -> AbstractContextManager[Sequence[Found]]:
        """Return a context manager over the leading objects of `wanted` for which there is memory, at least one. Each
        is given by its name and its most bytes. The objects are valid within the context.
        """

    @abstractmethod
    def write(self, name: bytes, nbytes: int, fill: Callable[[memoryview], None]) -> None:
        """Store an object of `nbytes`, unless there is one of that name. `fill` writes it into the memory that it
        gets.
        """

    @abstractmethod
    def evict(self, names: Sequence[bytes]) -> None:
        """Note that this tier keeps these objects no longer. A store that makes room by itself, and that others use
        too, may keep them.
        """

    @abstractmethod
    def remove(self, names: Sequence[bytes]) -> None:
        """Forget these objects for good: once this returns, `read` finds none of them."""

    def probe(self) -> None:
        """Raise OSError unless the store can be used."""
        self.sizes([bytes(2 * DIGEST_BYTES)])

    def abort(self) -> None:  # noqa: B027  # optional
        """Let operations under way end soon, with OSError: the caller is about to close the store. Idempotent."""

    @abstractmethod
    def close(self) -> None: ...
