"""The arenas in which this client puts blocks in place: asked for and mapped once each, to be written.

Owns these mappings; to read, an arena is mapped another time, read-only. Never does: choose a place, or write.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

from kvstore_client.handshake import Handshake
from kvstore_client.memory import Bytes, EnteredPages, map_read_write, populate


class WritableArenas:
    """`is_offered`: whether the daemon takes blocks in place from us. `announced`: arenas that it has for that now."""

    def __init__(self, handshake: Handshake, *, is_offered: bool, announced: Sequence[int]) -> None:
        self._handshake = handshake
        self._announced = announced
        self._mapped: dict[int, Bytes] = {}
        self._entered: dict[int, EnteredPages] = {}
        self._lock = threading.Lock()
        self.is_offered = is_offered

    def refused(self) -> None:
        """The daemon takes none any more."""
        self.is_offered = False

    def arena(self, arena_id: int, timeout_s: float) -> Bytes | None:
        """The mapped arena, mapping it the first time; None when the daemon does not hand it over in time."""
        known = self._mapped.get(arena_id)
        if known is not None:
            return known
        granted = self._granted(arena_id, timeout_s)
        if granted is None:
            return None
        descriptor, size_bytes = granted
        return self._map(arena_id, descriptor, size_bytes)

    def enter(self, arena_id: int, offsets: Sequence[int], length: int) -> None:
        """Enter the pages of slots into our page table, the first time that they are written: in one call for all they
        take a quarter of the time of one fault a page. Each slot is `length` bytes."""
        entered = self._entered[arena_id]
        populate(self._mapped[arena_id], [(offset, length) for offset in offsets if entered.add(offset, length)])

    def map_announced(
        self, descriptors: contextlib.ExitStack, timeout_s: float, most_bytes: int
    ) -> Iterator[tuple[Bytes, int, EnteredPages]]:
        """Map what was announced, up to so many bytes: each arena with a descriptor of it until the stack ends."""
        for arena_id in self._announced if self.is_offered else ():
            granted = None if arena_id in self._mapped else self._granted(arena_id, timeout_s)
            if granted is None:
                continue
            descriptor, size_bytes = granted
            most_bytes -= size_bytes
            if most_bytes < 0:
                os.close(descriptor)
                return
            try:
                kept = os.dup(descriptor)
            except OSError:
                os.close(descriptor)
                return
            descriptors.callback(os.close, kept)
            arena = self._map(arena_id, descriptor, size_bytes)
            if arena is not None:
                yield arena, kept, self._entered[arena_id]

    def _granted(self, arena_id: int, timeout_s: float) -> tuple[int, int] | None:
        grant = self._handshake.request_arena(arena_id, timeout_s, writable=True)
        return None if grant is None else (grant.descriptor, grant.size_bytes)

    def _map(self, arena_id: int, descriptor: int, size_bytes: int) -> Bytes | None:
        try:
            mapped = map_read_write(descriptor, size_bytes)
        except (OSError, ValueError):
            return None
        with self._lock:
            self._entered.setdefault(arena_id, EnteredPages(size_bytes))
            return self._mapped.setdefault(arena_id, mapped)
