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
    """An error: the bytes that a store has under a name are not the object of that name, or are too many for it. The
    message names the fault.
    """


Found = memoryview | DamagedObject | None  # None: there is none


def object_name(tenant: bytes, key: bytes) -> bytes:
    """Return the 32-byte name of a block's object: the tenant's digest (16 bytes), then the block's `key`."""
    return tenant + key


class ObjectStore(ABC):
    """A remote store of named objects, in which a `KeyedTier` keeps blocks. Its methods may wait, are called from
    several threads at once and raise OSError when they fail. No object may have more than `largest_bytes`.
    """

    name: str
    largest_bytes: int

    @property
    def is_ready(self) -> bool:
        """True unless the store is still starting, so that an operation would wait for the start."""
        return True

    @abstractmethod
    def sizes(self, names: Sequence[bytes]) -> list[int]:
        """Return the size in bytes of the object of each name, in the order of `names`; 0 for an object that the store
        does not have.
        """

    @abstractmethod
    def read(self, wanted: Sequence[tuple[bytes, int]]) -> AbstractContextManager[Sequence[Found]]:
        """Read objects for the time of a `with` block. `wanted` has the name of each object and the most bytes that it
        may have. The block gets a list with the bytes of the first objects of `wanted`: as many as memory is free for,
        at least one. An entry is None for a missing object and a DamagedObject for a damaged one. The bytes are valid
        until the block ends.
        """

    @abstractmethod
    def write(self, name: bytes, nbytes: int, fill: Callable[[memoryview], None]) -> None:
        """Store an object of `nbytes` bytes under `name`, unless the store has one. `fill` is called with the memory
        for the object, to write the bytes into it.
        """

    @abstractmethod
    def evict(self, names: Sequence[bytes]) -> None:
        """Notify the store that this tier no longer needs the objects `names`. A store that other daemons use, and that
        makes room by itself, may keep them.
        """

    @abstractmethod
    def remove(self, names: Sequence[bytes]) -> None:
        """Delete the objects `names`. After this call `read` finds none of them."""

    def probe(self) -> None:
        """Raise OSError unless the store answers a request now."""
        self.sizes([bytes(2 * DIGEST_BYTES)])

    def abort(self) -> None:  # noqa: B027  # optional
        """Make operations that are under way fail soon with OSError, because the store is about to be closed. A second
        call does nothing.
        """

    @abstractmethod
    def close(self) -> None: ...
