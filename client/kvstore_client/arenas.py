"""The daemon's arenas as this client maps them: to read blocks, or, in a mapping of their own, to put blocks in place.

The module owns these mappings: an arena is requested and mapped once, when a block in it is first named or in the
background before that. It does not choose a place, read or write.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstore_client.handshake import GrantedArena, Handshake
from kvstore_client.memory import (
    READ_REST,
    WRITTEN_REST,
    Bytes,
    EnteredPages,
    map_present,
    map_read_only,
    map_read_write,
    populate,
    prefault,
)

PREFAULT_ARENAS_BYTES = 1 << 30  # page tables for more would be some megabytes of each engine
PREFAULT_GRANT_TIMEOUT_S = 1.0
PREFAULT_PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0)


class Mappings(Protocol):
    """A receiver of each arena that is mapped (`add`), and of the end of its session (`drop`)."""

    def add(self, memory: Bytes) -> None: ...
    def drop(self, memory: Bytes) -> None: ...


class OpenArena(NamedTuple):
    """A mapped arena and a descriptor of it. `entered` notes which pages are in this process's page table."""

    memory: Bytes
    descriptor: int
    rest: int
    entered: EnteredPages | None


class Arenas:
    """The daemon's arenas, mapped to read. `announced`: its present arenas; `mapped`: arenas that are mapped already.
    With `mappings`, which receives each of them, `map_announced` maps them all.
    """

    def __init__(
        self,
        grants: Handshake,
        announced: Collection[int],
        mapped: Mapping[int, Bytes] | None = None,
        mappings: Mappings | None = None,
    ) -> None:
        self._grants = grants
        self._announced = announced
        self.mapped = dict(mapped or {})
        self._mappings = mappings
        self._lock = threading.Lock()
        for memory in self.mapped.values():
            self._note(memory)

    def arena(self, arena_id: int, timeout_s: float) -> Bytes | None:
        """Return the mapped arena, mapping it the first time; None if the daemon does not hand it over in time."""
        known = self.mapped.get(arena_id)
        if known is not None:
            return known
        grant = self._request(arena_id, timeout_s)
        return self._map(grant) if grant is not None else None

    def map_announced(
        self, descriptors: contextlib.ExitStack, timeout_s: float, most_bytes: int
    ) -> Iterator[OpenArena]:
        """Map the announced arenas that are not mapped yet, and yield up to `most_bytes` of arenas, opened; their
        descriptors stay open until the stack ends. The others are not mapped, or not opened (see the class).
        """
        for arena_id in self._announced:
            if arena_id in self.mapped:
                continue
            grant = self._request(arena_id, timeout_s)
            if grant is None:
                return
            most_bytes -= grant.size_bytes
            kept = -1
            if most_bytes >= 0:
                with contextlib.suppress(OSError):
                    kept = os.dup(grant.descriptor)
            if kept < 0 and self._mappings is None:
                os.close(grant.descriptor)
                return
            memory = self._map(grant)
            if kept >= 0:
                descriptors.callback(os.close, kept)
                if memory is not None:
                    yield self._open(arena_id, memory, kept)

    def close(self) -> None:
        """End the use of arenas, as the session has ended. Mappings stay as long as something refers to them."""
        if self._mappings is not None:
            for memory in list(self.mapped.values()):
                self._mappings.drop(memory)

    def _note(self, memory: Bytes) -> None:
        if self._mappings is not None:
            self._mappings.add(memory)

    def _open(self, arena_id: int, memory: Bytes, descriptor: int) -> OpenArena:
        return OpenArena(memory, descriptor, READ_REST, None)

    def _request(self, arena_id: int, timeout_s: float) -> GrantedArena | None:
        return self._grants.request_arena(arena_id, timeout_s)

    def _map(self, grant: GrantedArena) -> Bytes | None:
        try:
            memory = map_read_only(grant.descriptor, grant.size_bytes)
        except (OSError, ValueError):
            return None
        with self._lock:
            memory = self.mapped.setdefault(grant.arena_id, memory)
        self._note(memory)
        return memory


class WritableArenas(Arenas):
    """Arenas mapped to write. `is_offered`: whether the daemon accepts blocks in place from this client."""

    def __init__(self, grants: Handshake, announced: Sequence[int], *, is_offered: bool) -> None:
        super().__init__(grants, announced if is_offered else ())
        self._entered: dict[int, EnteredPages] = {}
        self.is_offered = is_offered

    def refused(self) -> None:
        """Note that the daemon accepts no blocks in place any more."""
        self.is_offered = False

    def enter(self, arena_id: int, offsets: Sequence[int], length: int) -> None:
        """Enter the pages of slots of `length` bytes into this process's page table before they are first written: one
        call for all takes a quarter of the time of one page fault each.
        """
        entered = self._entered[arena_id]
        populate(self.mapped[arena_id], [(offset, length) for offset in offsets if entered.add(offset, length)])

    def _open(self, arena_id: int, memory: Bytes, descriptor: int) -> OpenArena:
        return OpenArena(memory, descriptor, WRITTEN_REST, self._entered[arena_id])

    def _request(self, arena_id: int, timeout_s: float) -> GrantedArena | None:
        return self._grants.request_arena(arena_id, timeout_s, writable=True)

    def _map(self, grant: GrantedArena) -> Bytes | None:
        try:
            memory = map_read_write(grant.descriptor, grant.size_bytes)
        except (OSError, ValueError):
            return None
        with self._lock:
            self._entered.setdefault(grant.arena_id, EnteredPages(grant.size_bytes))
            return self.mapped.setdefault(grant.arena_id, memory)


def prefault_all(
    readable: Arenas, writable: WritableArenas, staging: Bytes | None, is_wanted: Callable[[], bool]
) -> None:
    """Map memory for reading and writing before it is needed, while an engine that starts loads its model.

    It runs in a thread of its own, and ends when it is not wanted any more.
    """
    with contextlib.ExitStack() as descriptors:
        opened: list[OpenArena] = []
        for arenas in (writable, readable) if staging is not None else (readable,):
            for arena in arenas.map_announced(descriptors, PREFAULT_GRANT_TIMEOUT_S, PREFAULT_ARENAS_BYTES):
                opened.append(arena)
                if not is_wanted():
                    return
        if staging is not None:
            prefault(staging, is_wanted)
        left_bytes = sum(len(arena.memory) for arena in opened)
        for pause_s in PREFAULT_PAUSES_S:  # a daemon that has just started is touching its arenas meanwhile
            if not left_bytes or not is_wanted():
                return
            time.sleep(pause_s)
            left_bytes = 0
            for memory, descriptor, rest, entered in opened:
                left_bytes += len(memory) - map_present(memory, descriptor, is_wanted, rest, entered)
