"""An anchor is the object that a lease, and the arrays of its blocks, refer to; when the last of them is freed, the
lease is given back.

A finalizer may run inside any call of any thread, so it only notes the lease; the next request gives the lease back. A
lease is noted once, and never if it was released or belongs to a parent process.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import numpy as np

from kvstore_client.memory import Bytes

_dropped: deque[Callable[[], None]] = deque()  # what releases each of them; of all sessions of this process


class Anchor:
    """An object that a lease and all arrays over its blocks refer to, so that the lease is given back after the last of
    them is freed. The next request to the daemon then calls `release`, which gives the lease back. If `release` is
    None, nothing is given back.
    """

    __slots__ = ("_pid", "_release")

    def __init__(self, release: Callable[[], None] | None = None) -> None:
        self._release = release
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Return whether this process made the anchor. The result is False in a process that was forked from it."""
        return self._pid == os.getpid()

    def give_back(self, release: Callable[[], None]) -> None:
        """Have `release` called at the next request after the last reference to this anchor is gone."""
        self._release = release

    def let_go(self) -> None:
        """Forget the function that gives the lease back, because the lease was already released or was never used."""
        self._release = None

    def __del__(self) -> None:
        if self._release is not None and self.is_ours:  # in a forked child it is the parent's
            _dropped.append(self._release)


class _Anchored:
    """Memory that refers to an anchor as long as a NumPy array shows the memory."""

    __slots__ = ("__array_struct__", "_anchor", "_memory")

    def __init__(self, memory: Bytes, anchor: Anchor) -> None:
        self.__array_struct__ = memory.__array_struct__  # a third of the time of __array_interface__
        self._memory, self._anchor = memory, anchor


def anchored(memory: Bytes, anchor: Anchor) -> Bytes:
    """Return an array over the bytes of `memory`, without a copy. The array and all of its views refer to `anchor`, so
    the lease of that anchor is given back only after they are freed.
    """
    view: Bytes = np.asarray(_Anchored(memory, anchor))
    return view


def give_back_dropped() -> None:
    """Release the leases of all anchors that were freed so far in this process. Each request calls it, because a
    finalizer may not send one.
    """
    while _dropped:
        try:
            release = _dropped.popleft()
        except IndexError:  # another thread was first
            return
        release()


os.register_at_fork(after_in_child=_dropped.clear)
