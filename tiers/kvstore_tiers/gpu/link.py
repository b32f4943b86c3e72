"""The way from a tier to its worker: packets to it, and its answers.

The module owns the things that a worker must know after a restart: regions, chunks and their descriptors. `worker_life`
knows which worker is at the other end, and whether there is one; its thread receives answers and ends transfers.
`outbox` holds packets that wait to be sent. Invariants: each transfer ends once, with a failure if its worker died or
did not answer for too long; a transfer that no worker has seen yet waits for the next, unless workers keep dying; a
chunk whose descriptor has come is never made again, only mapped again; a region is dropped when no process of this
daemon has it mapped any more.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore_tiers.arena import ChunkWitness
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.outbox import Greeting, Outbox, Outgoing
from kvstore_tiers.gpu.regions import Regions
from kvstore_tiers.gpu.worker_life import GpuWorkerLife, GpuWorkerSettings

Done = Callable[[wire.End], None]


@dataclass
class WorkerTransfer:
    """A transfer that the GPU tier has ordered from its worker process. With `waits`, it waits for the next worker if
    there is none. After `patience_s` seconds without an end the worker counts as hanging.
    """

    ended: Done
    since_s: float
    patience_s: float
    waits: bool
    is_sent: bool = False


class Pending:
    """The list of the transfers that the GPU worker process has not ended. Any thread may use it."""

    def __init__(self) -> None:
        self._transfers: dict[int, WorkerTransfer] = {}
        self._last = 0
        self._lock = threading.Lock()

    def begin(self, ended: Done, patience_s: float, *, waits: bool, may: Callable[[], bool]) -> int | None:
        """Add a transfer to the list and return its number. `may` is called under the lock; if it returns False,
        nothing is added and None is returned. `ended` is called once with the transfer's end. `patience_s` and `waits`
        are explained at `WorkerTransfer`.
        """
        with self._lock:
            if not may():
                return None
            self._last += 1
            self._transfers[self._last] = WorkerTransfer(ended, time.monotonic(), patience_s, waits)
            return self._last

    def send(self, number: int) -> bool:
        """Mark transfer `number` as sent to the worker process, which must now end it. Return False if the transfer has
        failed meanwhile, so that it must not be sent.
        """
        with self._lock:
            transfer = self._transfers.get(number)
            if transfer is not None:
                transfer.is_sent, transfer.since_s = True, time.monotonic()
            return transfer is not None

    def take_back(self, number: int) -> None:
        """Mark transfer `number`, which could not be sent to the worker process, as not sent, so that the next worker
        gets it.
        """
        with self._lock:
            transfer = self._transfers.get(number)
            if transfer is not None:
                transfer.is_sent = False

    def end(self, number: int, end: wire.End) -> None:
        """End transfer `number` with `end`. It does nothing if the transfer has ended already."""
        with self._lock:
            transfer = self._transfers.pop(number, None)
        if transfer is not None:
            transfer.ended(end)

    def fail(self, concerns: Callable[[WorkerTransfer], bool], end_of: Callable[[WorkerTransfer], wire.End]) -> int:
        """End all transfers for which `concerns` returns True, each with the result of `end_of(transfer)`. Return the
        number of ended transfers.
        """
        with self._lock:
            numbers = [number for number, each in self._transfers.items() if concerns(each)]
            failed = [self._transfers.pop(number) for number in numbers]
        for each in failed:
            each.ended(end_of(each))
        return len(failed)

    def is_overdue(self, now_s: float, ready_s: float) -> bool:
        """Return True if a transfer was not ended in the time that it has, its `patience_s`, counted from its start or
        from `ready_s`, when the worker became ready, whichever is later. `now_s` is the present time; both are
        monotonic seconds.
        """
        with self._lock:
            sent = [each for each in self._transfers.values() if each.is_sent]
        return any(now_s - max(each.since_s, ready_s) > each.patience_s for each in sent)


DOWN = "the GPU's worker is not running"
Ended = Callable[[str], None]  # with what went wrong; empty when the bytes are in place


@dataclass(frozen=True, slots=True)
class _Leaving:
    ended: Callable[[], None]
    since_s: float


@dataclass
class _Chunk:
    nbytes: int
    descriptor: int = -1  # -1 until the worker has made it


class GpuWorkerLink:
    """The connection of a GPU tier to its worker process, which holds the CUDA context of `device` and does the copies.
    A worker that dies is replaced. `refused(chunk, why)` is called for a chunk (a piece of device memory) that could
    not be made. `follower` is notified of chunks, `regions` of host memory that the worker has registered. `can_check`
    is true if the worker can compute checksums. Raises OSError with the reason if no worker starts.
    """

    def __init__(
        self,
        device: int,
        refused: Callable[[int, str], None],
        *,
        follower: ChunkWitness | None = None,
        regions: Regions,
        settings: GpuWorkerSettings | None = None,
    ) -> None:
        self._settings = settings or GpuWorkerSettings()
        self.can_check, self.cannot_check = False, ""
        self.has_direct_storage, self.no_direct_storage = False, ""
        self._refused = refused
        self._follower = follower
        self._heard = regions
        self._regions: dict[int, wire.MemoryRegion] = {}
        self._leaving: dict[int, _Leaving] = {}  # regions that a worker may have mapped still
        self._has_worker = False  # or one that has not gone yet
        self._chunks: dict[int, _Chunk] = {}
        self._pending = Pending()
        self._lock = threading.Lock()  # of the tables
        self._outbox = Outbox(self._is_wanted, lambda item: self._pending.take_back(item.transfer))
        self.device_name, self.device_bytes, self.device_identity = "", 0, 0
        self.worker = GpuWorkerLife(device, self._settings, self)
        if why := self.worker.start():
            self.close()
            raise OSError(why)

    def add_region(self, number: int, region: wire.MemoryRegion) -> None:
        """Give the worker host memory that transfers may then name by `number`. The caller keeps the descriptor in
        `region` open until `drop_region` has called `ended`.
        """
        with self._lock:
            self._regions[number] = region
            self._outbox.put(wire.pack_region(number, region), region.descriptor)

    def drop_region(self, number: int, ended: Callable[[], None]) -> None:
        """Take the host memory `number` away from the worker. `ended` is called, perhaps on the caller's thread, when
        no worker has that memory mapped.
        """
        with self._lock:
            del self._regions[number]
            has_worker = self._has_worker
            if has_worker:
                self._leaving[number] = _Leaving(ended, time.monotonic())
                self._outbox.put(wire.pack(wire.UNMAP, number))
        if not has_worker:
            ended()

    def add_chunk(self, number: int, nbytes: int) -> None:
        """Let the worker make the chunk `number`, a piece of `nbytes` bytes of device memory. Transfers may name it at
        once; they fail if it cannot be made.
        """
        with self._lock:
            self._chunks[number] = _Chunk(nbytes)
        self._outbox.put(wire.pack(wire.CREATE, number, nbytes))

    def import_chunk(self, number: int, nbytes: int, descriptor: int, to_send: int) -> None:
        """Let the worker map an existing piece of device memory of `nbytes` bytes as the chunk `number`. `descriptor`
        and `to_send` both refer to that memory; the link closes them.
        """
        with self._lock:
            self._chunks[number] = _Chunk(nbytes, descriptor)
        self._outbox.put(wire.pack(wire.IMPORT, number, nbytes), to_send)

    def drop_chunk(self, number: int) -> None:
        """Let the worker free the device memory of the chunk `number`. No transfer may write to it any more."""
        with self._lock:
            chunk = self._chunks.pop(number)
            if chunk.descriptor >= 0:
                os.close(chunk.descriptor)
        self._outbox.put(wire.pack(wire.DROP, number))

    def descriptor_of(self, number: int) -> int:
        """Return a new descriptor of the device memory of the chunk `number`, which the caller closes; -1 if the worker
        has not made the chunk.
        """
        with self._lock:
            chunk = self._chunks.get(number)
            return os.dup(chunk.descriptor) if chunk is not None and chunk.descriptor >= 0 else -1

    def transfer(
        self,
        letter: bytes,
        pieces: Sequence[wire.RegionPiece] | Sequence[wire.ChunkMove],
        ended: Ended,
        *,
        waits: bool = True,
    ) -> None:
        """Let the worker copy `pieces` between host and device (`letter` WRITE or READ) or within the device (MOVE).
        `ended` is called once with "" or a failure, perhaps on the caller's thread. With `waits` False the transfer
        fails at once if no worker is ready.
        """

        def done(end: wire.End) -> None:
            ended(end.failure)

        self._begin(lambda number: wire.pack_transfer(letter, number, pieces), done, waits=waits)

    def load(self, load: wire.FileLoad, descriptor: int, ended: Done) -> None:
        """Let the worker read a slot image from the file `descriptor`, which the link closes, to the places in `load`.
        `ended` is called once. The load fails at once if no worker is ready.
        """
        self._begin(lambda number: wire.pack_load(number, load), ended, waits=False, descriptor=descriptor)

    def checksums(self, places: Sequence[tuple[int, int, int]], summed: Done, *, waits: bool = True) -> None:
        """Let the worker compute the xxh3_64 checksums of `places` in device memory. A place is a chunk number, an
        offset (a multiple of 16) and a number of bytes; at most wire.MAX_CHECKED may be given. `summed` gets the end,
        which contains the checksums. With `waits` False it fails at once if no worker is ready.
        """
        pieces = [wire.RegionPiece(chunk, offset, 0, 0, nbytes) for chunk, offset, nbytes in places]
        self._begin(lambda number: wire.pack_transfer(wire.CHECK, number, pieces), summed, waits=waits)

    def _begin(self, pack: Callable[[int], bytes], ended: Done, *, waits: bool, descriptor: int = -1) -> None:
        patience_s = self._settings.patience_s if descriptor < 0 else self._settings.file_patience_s
        number = self._pending.begin(ended, patience_s, waits=waits, may=lambda: self._takes(waits))
        if number is not None:
            self._outbox.put(pack(number), descriptor, number)
            return
        if descriptor >= 0:
            os.close(descriptor)
        ended(wire.End(self.worker.message or DOWN, is_down=True))

    def _takes(self, waits: bool) -> bool:
        return self.worker.is_up and (waits or (self._outbox.is_open and self.worker.is_ready))

    def close(self) -> None:
        """End the worker process; transfers under way fail. A second call does nothing."""
        if self.worker.is_closing:
            return
        self.worker.close()
        self._outbox.close()
        self.worker.join()
        self._outbox.join()
        for chunk in self._chunks.values():
            if chunk.descriptor >= 0:
                os.close(chunk.descriptor)
        self._chunks.clear()

    # For the worker's life

    def connect(self, sock: socket.socket, process: int) -> None:
        if self._follower is not None:  # before it has anything to write to
            self._follower.worker_started(process)
        with self._lock:
            self._has_worker = True
            greetings: list[Greeting] = [partial(self._chunk_packet, number) for number in self._chunks]
            for number, region in self._regions.items():
                if number == wire.BOUNCE_REGION:  # others may be many, and nothing waits for them
                    greetings.append(partial(_region_packet, number, region))
                else:
                    self._outbox.put(wire.pack_region(number, region), region.descriptor)
        self._outbox.open(sock, greetings)

    def _chunk_packet(self, number: int) -> Outgoing | None:
        with self._lock:
            chunk = self._chunks.get(number)
            if chunk is None:
                return None
            if chunk.descriptor < 0:
                return Outgoing(wire.pack(wire.CREATE, number, chunk.nbytes))
            return Outgoing(wire.pack(wire.IMPORT, number, chunk.nbytes), os.dup(chunk.descriptor))

    def is_overdue(self, now_s: float, ready_s: float) -> bool:
        """Return True if the worker has taken too long to end a transfer, to give up host memory or to read its socket.
        `ready_s` is the time at which the worker became ready, `now_s` the present time; both are monotonic seconds.
        """
        patience_s = self._settings.patience_s
        with self._lock:
            leaving = [each.since_s for each in self._leaving.values()]
        if any(now_s - max(since_s, ready_s) > patience_s for since_s in leaving):
            return True
        if self._outbox.is_overdue(now_s, ready_s, patience_s):
            return True
        return self._pending.is_overdue(now_s, ready_s)

    def disconnect(self, sock: socket.socket) -> None:
        self._outbox.shut(sock)

    def lose(self, process: int) -> int:
        failed = self._fail(lambda each: each.is_sent or not each.waits)
        self._heard.worker_ended()
        if self._follower is not None:
            self._follower.worker_ended(process)
        with self._lock:
            self._has_worker = False
            left, self._leaving = self._leaving, {}
        for region in left.values():
            region.ended()
        return failed

    def fail_unsent(self) -> None:
        self._fail(lambda each: not each.is_sent)

    def fail_all(self) -> None:
        self._fail(lambda _: True)

    def lack_direct_storage(self, why: str) -> None:
        self.has_direct_storage, self.no_direct_storage = False, why

    def _fail(self, concerns: Callable[[WorkerTransfer], bool]) -> int:
        def end_of(transfer: WorkerTransfer) -> wire.End:
            return wire.End(DOWN, is_down=True, dead_worker=self.worker.starts if transfer.is_sent else 0)

        return self._pending.fail(concerns, end_of)

    def hear(self, packet: bytes, descriptors: list[int]) -> None:
        letter = packet[:1]
        number, nbytes, text = wire.unpack(packet)
        if letter in (wire.ENDED, wire.UNREAD, wire.SUMS):
            number, end = wire.unpack_end(packet)
            if not end.failure:
                self.worker.say_useful()
            self._pending.end(number, end)
        elif letter == wire.MADE:
            with self._lock:
                chunk = self._chunks.get(number)
                if chunk is not None and chunk.descriptor < 0:
                    if not descriptors:  # this process had none left to receive it with: another worker makes it anew
                        raise ConnectionError(f"no descriptor came with chunk {number}")
                    chunk.descriptor = descriptors.pop()
                    if self._follower is not None:  # kept before a transfer with it has ended
                        self._follower.has_memory(number, chunk.descriptor)
        elif letter == wire.REFUSED:
            self._refused(number, text)
        elif letter == wire.REGISTERED and text:
            self._heard.refused(text)
        elif letter == wire.REGISTERED:
            self._heard.registered(number, bool(nbytes))
        elif letter == wire.LEFT:
            with self._lock:
                left = self._leaving.pop(number, None)
            if left is not None:
                left.ended()
        elif letter == wire.ABLE:
            self.can_check, self.cannot_check = bool(number), text
        elif letter == wire.DIRECT:
            self.has_direct_storage, self.no_direct_storage = bool(number), text
        elif letter == wire.READY:
            self.device_identity, self.device_bytes, self.device_name = number, nbytes, text
            self.worker.say_ready()
        elif letter == wire.FATAL:
            self.worker.say_unable(text)
        for stray in descriptors:
            os.close(stray)

    def _is_wanted(self, item: Outgoing) -> bool:
        if item.packet[:1] == wire.MAP:  # dropped meanwhile, its descriptor may be another file's
            return wire.unpack_region(item.packet, item.descriptor)[0] in self._regions
        return item.transfer < 0 or self._pending.send(item.transfer)


def _region_packet(number: int, region: wire.MemoryRegion) -> Outgoing:
    return Outgoing(wire.pack_region(number, region), os.dup(region.descriptor))
