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
    """An error: a read was given up, but its library may still write to the memory. The process must end before that
    memory is used again.
    """


class CannotOpen(ValueError):
    """An error: the library understands the URL but cannot open the store, for example because a credential is
    missing.
    """


class Placed(NamedTuple):
    """The name of a value in a remote store, and the memory to read it into or write it from."""

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
        """Give the driver the `memory` in which all later values lie, so that its library may register it. It is called
        once, before all else.
        """

    def follow(self, owner: str, generation: int) -> None:  # noqa: B027  # optional
        """Tell the driver that this process acts for `owner` with number `generation`, and that the owner's processes
        with lower numbers are dead. It is called once, before the first operation. A removal must also end what those
        processes left under way.
        """

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of the value of each name, in the order of `names`; 0 for a missing one."""

    @abstractmethod
    def read(self, wanted: Sequence[Placed]) -> list[int]:
        """Copy each value of `wanted` to the front of its memory. Return the length of each, 0 for a missing one. A
        value longer than its memory is not copied.
        """

    @abstractmethod
    def write(self, values: Sequence[Placed]) -> list[WriteResult]:
        """Store each of `values` whose name is free, and return a result for each. Of several writers of one name,
        exactly one gets STORED. The driver keeps no view of the memory.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Delete the values `names`. After this call no client can read them, and the store keeps no bytes of them."""

    def evict(self, names: Sequence[str]) -> None:
        """Drop the values `names` to make room. This client no longer finds them; the store may keep the bytes for a
        while.
        """
        self.remove(names)

    @abstractmethod
    def probe(self) -> None:
        """Raise OSError unless the store answers."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection to the store. The values stay. A second call does nothing."""
