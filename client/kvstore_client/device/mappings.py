"""The arenas that sessions of a device have mapped: what copies from them learns of each before its first use.

Owns no memory: mappings are remembered weakly. Never registers anything. May be used from any thread.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from kvstore_client.memory import Bytes


class Follower(Protocol):
    """Is called with the array over a whole mapping. Never waits."""

    def mapped(self, memory: Bytes) -> None: ...
    def given_up(self, memory: Bytes) -> None: ...


class HostMappings:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()  # by address
        self._followers: list[Follower] = []

    def add(self, memory: Bytes) -> None:
        """A session has mapped it, or goes on using it."""
        with self._lock:
            self._known[_address(memory)] = memory
            for follower in self._followers:
                follower.mapped(memory)

    def drop(self, memory: Bytes) -> None:
        """Its session has ended."""
        with self._lock:
            self._known.pop(_address(memory), None)
            for follower in self._followers:
                follower.given_up(memory)

    def follow(self, follower: Follower) -> None:
        """Call `follower` with every mapping: those that are known now, and later ones."""
        with self._lock:
            self._followers.append(follower)
            for memory in list(self._known.values()):
                follower.mapped(memory)

    def leave(self, follower: Follower) -> None:
        """End `follow`. Idempotent."""
        with self._lock:
            self._followers = [each for each in self._followers if each is not follower]


def _address(memory: Bytes) -> int:
    return int(memory.__array_interface__["data"][0])
