"""The chunks of device memory that one session of the daemon may read.

The module owns which chunks are mapped, and for how long: from when a lease first names one until no lease of this
process refers to it and none has named it for `IDLE_S`. The daemon does not say when it gives a chunk up, and a mapping
keeps the memory on the device, beyond the tier's capacity; mapping a chunk again takes well under a millisecond. It
copies no payload. Invariants: a place outside its chunk is never read; after an import failed or was refused none is
tried for `RETRY_S`, and the session gets its blocks in host memory meanwhile. A late grant is no failure: it is kept
for the next lease (`Handshake`).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore_client.device.memory import DeviceChunk, DeviceError
from kvstore_client.handshake import Handshake
from kvstore_client.memory import Bytes
from kvstore_proto.arena import ALIGNMENT_BYTES, DEVICE_ARENAS, HEADER_BYTES

IDLE_S = 5.0  # longer than the pause between two gets of a busy engine
RETRY_S = 30.0  # a failed import costs a round trip and a second request


class ChunkSource(Protocol):
    """An importer of chunks (device memory of the daemon's GPU tier). It declares the methods of `DeviceMemory` that
    `DeviceArenas` calls.
    """

    def import_chunk(self, descriptor: int, nbytes: int) -> DeviceChunk: ...
    def read(self, places: Sequence[tuple[int, int]]) -> list[Bytes]: ...


class DeviceArenas:
    """The chunks (device memory of the daemon's GPU tier) that one session may read. A chunk is mapped when a lease
    first names it, and unmapped when no lease refers to it and none has named it for `IDLE_S` seconds. `grants`
    hands chunks over, `memory` imports them, and `clock` returns seconds.
    """

    def __init__(self, grants: Handshake, memory: ChunkSource, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._grants = grants
        self._memory = memory
        self._clock = clock
        self._lock = threading.Lock()  # of what follows
        self._mapped: weakref.WeakValueDictionary[int, DeviceChunk] = weakref.WeakValueDictionary()
        self._kept: dict[int, tuple[DeviceChunk, float]] = {}  # beside the leases, and when a lease last named it
        self._is_timed = False  # a timer is under way that will drop idle chunks
        self._off_until = float("-inf")

    @property
    def is_off(self) -> bool:
        """True while no chunks of device memory can be imported after a failure, so that leases should name host memory
        alone.
        """
        return self._clock() < self._off_until

    def headers(
        self, arena_ids: Sequence[int], offsets: Sequence[int], timeout_s: float
    ) -> Mapping[int, tuple[DeviceChunk, Bytes]] | None:
        """Return the blocks of a lease that are on the device: by position in the lease, the chunk of each block and
        its header page. Block i is at `offsets[i]` in the arena `arena_ids[i]`; a block in host memory, or outside
        its chunk, is left out. Return None if a chunk is not granted within `timeout_s` seconds or cannot be
        imported.
        """
        until = self._clock() + timeout_s
        found: dict[int, DeviceChunk] = {}
        for at, (arena_id, offset) in enumerate(zip(arena_ids, offsets, strict=True)):
            if arena_id < DEVICE_ARENAS:
                continue
            chunk = None if self.is_off else self._chunk(arena_id, until)
            if chunk is None:
                return None
            if offset % ALIGNMENT_BYTES == 0 and offset + HEADER_BYTES <= chunk.nbytes:
                found[at] = chunk
        if not found:
            return {}
        try:
            pages = self._memory.read([(chunk.address + offsets[at], HEADER_BYTES) for at, chunk in found.items()])
        except DeviceError:
            self._turn_off()
            return None
        return {at: (chunk, page) for (at, chunk), page in zip(found.items(), pages, strict=True)}

    def drop_idle(self) -> None:
        """Forget the chunks of device memory that no lease has named for `IDLE_S` seconds. Each is unmapped once no
        lease refers to it either.
        """
        dropped = []  # they end outside of the lock: unmapping takes a while
        with self._lock:
            now = self._clock()
            for number, (chunk, used) in list(self._kept.items()):
                if now - used >= IDLE_S:
                    dropped.append(chunk)
                    del self._kept[number]

    def _turn_off(self) -> None:
        self._off_until = self._clock() + RETRY_S

    def _chunk(self, arena_id: int, until: float) -> DeviceChunk | None:
        known = self._mapped.get(arena_id)
        return self._keep(arena_id, known or self._import(arena_id, until))

    def _import(self, arena_id: int, until: float) -> DeviceChunk | None:
        grant = self._grants.request_arena(arena_id, max(until - self._clock(), 0.001))
        if grant is None:
            if self._clock() < until:  # refused, not late
                self._turn_off()
            return None
        try:
            return self._memory.import_chunk(grant.descriptor, grant.size_bytes)
        except DeviceError:
            self._turn_off()
            return None
        finally:
            os.close(grant.descriptor)

    def _keep(self, arena_id: int, chunk: DeviceChunk | None) -> DeviceChunk | None:
        if chunk is None:
            return None
        with self._lock:
            chunk = self._mapped.setdefault(arena_id, chunk)  # another thread may have imported it meanwhile
            self._kept[arena_id] = (chunk, self._clock())
        self._start_timer()
        return chunk

    def _start_timer(self) -> None:
        with self._lock:
            if self._is_timed or not self._kept:
                return
            timer = threading.Timer(IDLE_S, self._tick)
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # the interpreter is ending
                return
            self._is_timed = True

    def _tick(self) -> None:
        self.drop_idle()
        with self._lock:
            self._is_timed = False
        self._start_timer()
