"""No store at all: the copies that any store in memory of its own has to make, and nothing else.

    python copies_client.py

What a client puts must be copied out of its memory, and once more out of its reach; what it gets is copied once. Here a
put is both copies at the same time, by two threads that wait for nothing and hash nothing, between memory of the kinds
that kvstored uses: no put that ends where the client cannot write is faster. `memcpy` is one thread's copy between
plain arrays, the yardstick. All memory has been touched; a put goes where the last ones did not, as into fresh slots.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

import numpy as np
from serving import Bytes, serve

STAGING_BYTES = 32 << 20  # as much as is between client and daemon at a time
ARENAS_BYTES = 128 << 20  # at least: more than a processor's caches hold


class Copies:
    """Copies as a contender (see `kvstored_client`), without names: nothing is kept."""

    def __init__(self) -> None:
        self._places: dict[int, _Places] = {}

    def prepare(self, values: int, value_bytes: int) -> None:
        self._places[value_bytes] = _Places(values * value_bytes)

    def put(self, number: int, value_bytes: int) -> float:
        return self._places[value_bytes].put(number)

    def get(self, number: int, value_bytes: int) -> float:
        return self._places[value_bytes].get(number)

    def memcpy(self, number: int, value_bytes: int) -> float:
        return self._places[value_bytes].memcpy()


class _Places:
    def __init__(self, nbytes: int) -> None:
        self._source, self._target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._staging = [_shared_memory(min(nbytes, STAGING_BYTES)) for _ in range(2)]
        self._arenas = [_shared_memory(nbytes) for _ in range(max(1, ARENAS_BYTES // nbytes))]

    def put(self, number: int) -> float:
        written, read = self._staging
        arena = self._arena(number)
        into_staging = lambda: _copy(self._source, written)  # noqa: E731
        into_arena = lambda: _copy(arena, read, into_large=True)  # noqa: E731
        return _slower_of(into_staging, into_arena)

    def get(self, number: int) -> float:
        arena = self._arena(number)
        started = time.perf_counter()
        np.copyto(self._target, arena)
        return time.perf_counter() - started

    def memcpy(self) -> float:
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started

    def _arena(self, number: int) -> Bytes:
        return self._arenas[number % len(self._arenas)]


def _copy(large: Bytes, small: Bytes, into_large: bool = False) -> None:
    """Copy between large memory and small memory that is used again and again: out of the large one, or into it."""
    for start in range(0, large.nbytes, small.nbytes):
        part = large[start : start + small.nbytes]
        source, target = (small[: part.nbytes], part) if into_large else (part, small[: part.nbytes])
        np.copyto(target, source)


def _slower_of(*actions: Callable[[], None]) -> float:
    """Seconds that the slowest of these takes, begun at the same time on threads that are there already."""
    start = threading.Barrier(len(actions))
    ended: list[float] = []

    def run(action: Callable[[], None]) -> None:
        start.wait()
        began = time.perf_counter()
        action()
        ended.append(time.perf_counter() - began)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(ended)


def _shared_memory(nbytes: int) -> Bytes:
    memory = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_SHARED), np.uint8)
    memory[:] = 1
    return memory


if __name__ == "__main__":
    copies = Copies()
    serve({name: getattr(copies, name) for name in ("prepare", "put", "get", "memcpy")})
