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
    EARLY_REST,
    READ_REST,
    Bytes,
    EnteredPages,
    contiguous_runs,
    map_present,
    map_read_only,
    map_read_write,
    populate,
    prefault,
)

PREFAULT_ARENAS_BYTES = 1 << 30  # page tables for more would be some megabytes of each engine
EARLY_BYTES = 64 << 20  # of arenas to read, before staging: an engine gets the blocks of a prompt before it puts any
PREFAULT_GRANT_TIMEOUT_S = 1.0
PREFAULT_PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0)


class Mappings(Protocol):
    """A receiver of arenas (shared memory of the daemon): `add` gets each arena that is mapped, `drop` gets it again
    when its session ends. An engine uses it to register the memory with its GPU.
    """

    def add(self, memory: Bytes) -> None: ...
    def drop(self, memory: Bytes) -> None: ...


class OpenArena(NamedTuple):
    """A mapped arena (shared memory of the daemon) whose existing pages are still to be entered into this process's
    page table. `descriptor` is an open file descriptor of it. `entered` records the pages that were entered already, if
    the arena is written to. `rest` is the pause after each slice of pages, as a multiple of the time that the slice
    took.
    """

    memory: Bytes
    descriptor: int
    rest: int
    entered: EnteredPages | None


class Arenas:
    """The arenas (shared memory of the daemon) that one session has mapped to read. `announced` holds the numbers of
    the arenas that the daemon has now, and `mapped` the mapped arenas by number. If `mappings` is given, it receives
    each arena, and `map_announced` ignores its limit in bytes.
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
        """Return the memory of the arena with the number `arena_id`, and map it the first time. Return None if the
        daemon does not hand it over within `timeout_s` seconds or it cannot be mapped.
        """
        known = self.mapped.get(arena_id)
        if known is not None:
            return known
        grant = self._request(arena_id, timeout_s)
        return self._map(grant) if grant is not None else None

    def map_announced(
        self, descriptors: contextlib.ExitStack, timeout_s: float, most_bytes: int
    ) -> Iterator[OpenArena]:
        """Map the announced arenas that are not mapped yet, and yield up to `most_bytes` of them with an open
        descriptor, which the stack `descriptors` closes. An arena beyond `most_bytes` is mapped without a descriptor
        if the object has `mappings`; otherwise the iteration ends there. The daemon has `timeout_s` seconds to hand
        over each arena.
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
        """Report to `mappings` that each arena is no longer used, because the session has ended. The memory stays
        mapped as long as an array refers to it.
        """
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
    """The arenas (shared memory of the daemon) that one session has mapped to write, for puts in place. `announced`
    holds their numbers. `is_offered` says whether the daemon accepts blocks in place from this client.
    """

    def __init__(self, grants: Handshake, announced: Sequence[int], *, is_offered: bool) -> None:
        super().__init__(grants, announced if is_offered else ())
        self._entered: dict[int, EnteredPages] = {}
        self.is_offered = is_offered

    def refused(self) -> None:
        """Set `is_offered` to False, because the daemon no longer accepts blocks in place from this client."""
        self.is_offered = False

    def enter(self, arena_id: int, offsets: Sequence[int], length: int) -> None:
        """Enter the pages of slots of the arena `arena_id` into this process's page table, before the slots are first
        written. Each slot begins at one of `offsets` and has `length` bytes. One call for all slots takes a quarter
        of the time that the page faults would take.
        """
        entered, slots = self._entered[arena_id], [(offset, length) for offset in offsets]
        if not all(entered.has(*run) for run in contiguous_runs(slots)):
            populate(self.mapped[arena_id], [slot for slot in slots if entered.add(*slot)])

    def _open(self, arena_id: int, memory: Bytes, descriptor: int) -> OpenArena:
        return OpenArena(memory, descriptor, EARLY_REST, self._entered[arena_id])

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
    """Map the announced arenas and the pages of `staging` before they are needed, while a starting engine loads its
    model: some of the arenas to read, then staging, then the rest. The arenas of `readable` are mapped to read and, if
    there is staging, the arenas of `writable` to write. It blocks for some seconds, so it runs in its own thread, and
    it returns early once `is_wanted()` is False.
    """
    with contextlib.ExitStack() as descriptors:
        opened: list[OpenArena] = []
        for arenas in (writable, readable) if staging is not None else (readable,):
            for arena in arenas.map_announced(descriptors, PREFAULT_GRANT_TIMEOUT_S, PREFAULT_ARENAS_BYTES):
                opened.append(arena)
                if not is_wanted():
                    return
        early_bytes = EARLY_BYTES
        for arena in opened:
            if arena.entered is None:
                early_bytes -= map_present(
                    arena.memory, arena.descriptor, is_wanted, EARLY_REST, most_bytes=early_bytes
                )
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
