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
    """An error: a read took too long and was given up, but the store's library may still write to the memory for the
    value. The process must end before that memory is used again.
    """


class CannotOpen(ValueError):
    """An error: the store's library understands the URL but cannot open the store, for example because a credential is
    missing.
    """


class Placed(NamedTuple):
    """A value of a remote store: its `name`, and the `memory` to read it into or write it from."""

    name: str
    memory: memoryview


class WriteResult(Enum):
    STORED = "stored"
    EXISTS = "exists"  # a value of this name was there, and still is
    NO_ROOM = "no room"  # the store is full, and refused this one
    BEGUN = "begun"  # another writer began this name and has not ended: nothing can be read, perhaps ever


class Driver(ABC):
    """A client of one kind of remote store that reads and writes named values. No value may exceed
    `largest_value_bytes`. `evicts` says that the store makes room by itself. `reads_at_once` is the number of parallel
    reads beyond which more are no faster.
    """

    largest_value_bytes: int
    evicts: bool
    reads_at_once: int = 2

    def lend(self, memory: memoryview) -> None:  # noqa: B027  # optional
        """Receive the `memory` in which all values of later calls are, so that the library may register it. The caller
        calls it once, before all other methods.
        """

    def follow(self, owner: str, generation: int) -> None:  # noqa: B027  # optional
        """Receive the name `owner` of the tier that this process works for, and the number `generation` of this
        process. The owner's processes with lower numbers are dead. The caller calls it once, before the first
        operation. A removal must also stop the writes that those dead processes left under way.
        """

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the length in bytes of each value that `names` lists, in that order; 0 for a value that the store does
        not have.
        """

    @abstractmethod
    def read(self, wanted: Sequence[Placed]) -> list[int]:
        """Copy each value of `wanted` to the beginning of its memory. Return the length in bytes of each value, 0 for
        one that the store does not have. A value that is longer than its memory is not copied, but its length is
        returned.
        """

    @abstractmethod
    def write(self, values: Sequence[Placed]) -> list[WriteResult]:
        """Store each of `values` whose name has no value yet, and return a result for each. If several writers write
        one name, exactly one of them gets STORED. The driver keeps no reference to the memory.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Delete the values called `names`. After this call no client can read them, and the store keeps no bytes of
        them.
        """

    def evict(self, names: Sequence[str]) -> None:
        """Drop the values called `names` to make room in the store. This client no longer finds them; the store may
        keep the bytes for a while.
        """
        self.remove(names)

    @abstractmethod
    def probe(self) -> None:
        """Raise OSError unless the store answers."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection to the store. The values stay. A second call does nothing."""
