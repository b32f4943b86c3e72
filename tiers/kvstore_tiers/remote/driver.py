"""The contract of a driver: values by name in a store on another machine, or in another process of this one.

A driver runs in a worker process of its tier (`worker.py`), never in the daemon: its library may hold the GIL, hang or
crash. It knows names and bytes. What a name or a value means, whether a value is whole and whose it is, is judged by
its caller, who believes nothing that a driver returns.

Obligations
- Methods are called from several threads at once and wait. A call takes no longer than the `timeout_s` that the driver
  was opened with; then it raises TimeoutError, MemoryHeld where a library cannot be stopped.
- A call that fails as a whole raises OSError (ConnectionError where the store cannot be reached). A driver connects
  again by itself: a later call succeeds once the store is back, without help.
- The store may forget values at any time. A value is never seen half written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

NAME_CHARACTERS = 48  # lower-case hexadecimal digits


class MemoryHeld(TimeoutError):
    """A read was given up, and its library may still write to the memory: the process must end before that memory is
    used again.
    """


class CannotOpen(ValueError):
    """The library understands the URL, and cannot open the store with it: a credential or a variable of the environment
    may be missing.
    """


class Placed(NamedTuple):
    """A value's name, and the memory that it is read into or written from."""

    name: str
    memory: memoryview


class WriteResult(Enum):
    STORED = "stored"
    EXISTS = "exists"  # a value of this name was there, and still is
    NO_ROOM = "no room"  # the store is full, and refused this one
    BEGUN = "begun"  # another writer began this name and has not ended: nothing can be read, perhaps ever


class Driver(ABC):
    """A driver of one kind of remote store. `largest_value_bytes`: no longer value is ever written. `evicts`: the store
    makes room by itself; otherwise the caller removes the values that leave its tier. `reads_at_once`: more calls of
    `read` than this at once are no faster than one with all their values.
    """

    largest_value_bytes: int
    evicts: bool
    reads_at_once: int = 2

    def lend(self, memory: memoryview) -> None:  # noqa: B027  # optional
        """Give the driver the memory of all later `Placed.memory`, once before all else, so that a library may register
        it.
        """

    def follow(self, owner: str, generation: int) -> None:  # noqa: B027  # optional
        """Name the caller, once before the first call: processes of this `owner` and of lower generations are dead. The
        store may still carry out their operations; a removal has to end these, or wait for them, before it returns.
        """

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of each value; 0 for a missing one."""

    @abstractmethod
    def read(self, wanted: Sequence[Placed]) -> list[int]:
        """Copy each value to the front of its memory. Return the bytes of each value, 0 for a missing one. A value
        longer than its memory is not copied, but its length is returned.
        """

    @abstractmethod
    def write(self, values: Sequence[Placed]) -> list[WriteResult]:
        """Store each value whose name is not taken; `values` are in the order of their chain. Of several writers of one
        name exactly one gets STORED. The driver keeps no view of the memory.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Forget these values, if they exist: once this returns, no read of this or another client finds them, and the
        store keeps no bytes of them that a client could ask for.
        """

    def evict(self, names: Sequence[str]) -> None:
        """Forget these values to make room. This client does not find them any more, other clients soon; the store may
        keep their bytes for a while if that is cheaper. A later order to remove them is still carried out.
        """
        self.remove(names)

    @abstractmethod
    def probe(self) -> None:
        """Raise OSError unless the store answers."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; values stay. Idempotent."""
