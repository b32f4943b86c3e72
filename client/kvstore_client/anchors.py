"""What a lease, and arrays of its blocks, hold on to, so that it is given back when the last of them has gone.

A finalizer may run inside of any call of any thread, so it only notes the lease; the next request gives it back. A note
is taken once, and never for a lease that was released or is a parent process's.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import numpy as np

from kvstore_client.memory import Bytes

_dropped: deque[Callable[[], None]] = deque()  # what releases each of them; of all sessions of this process


class Anchor:
    """The object that one lease and its views hold on to. `release` gives the lease back; None: not yet."""

    __slots__ = ("_pid", "_release")

    def __init__(self, release: Callable[[], None] | None = None) -> None:
        self._release = release
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, and none that was forked from that one."""
        return self._pid == os.getpid()

    def give_back(self, release: Callable[[], None]) -> None:
        """Have `release` called once nothing holds on to this any more."""
        self._release = release

    def let_go(self) -> None:
        """The lease was released, or never used."""
        self._release = None

    def __del__(self) -> None:
        if self._release is not None and self.is_ours:  # in a forked child it is the parent's
            _dropped.append(self._release)


class _Anchored:
    """Memory that keeps an anchor as long as a NumPy array shows it."""

    __slots__ = ("__array_struct__", "_anchor", "_memory")

    def __init__(self, memory: Bytes, anchor: Anchor) -> None:
        self.__array_struct__ = memory.__array_struct__  # a third of the time of __array_interface__
        self._memory, self._anchor = memory, anchor


def anchored(memory: Bytes, anchor: Anchor) -> Bytes:
    """Return the same bytes as an array that keeps `anchor`, as every view of it does."""
    view: Bytes = np.asarray(_Anchored(memory, anchor))
    return view


def give_back_dropped() -> None:
    """Release what was dropped so far."""
    while _dropped:
        try:
            release = _dropped.popleft()
        except IndexError:  # another thread was first
            return
        release()


os.register_at_fork(after_in_child=_dropped.clear)
