"""The tier's end of the socket to its worker, and the worker's life: started, watched, started anew.

Owns the process, what it must know after a restart (regions, chunks and their descriptors) and the transfers under way.
One thread sends, so that no caller waits for the worker; another one receives, starts workers and ends transfers.
Invariants: each transfer ends once, with a failure when its worker died or did not answer for too long; one that
no worker has seen yet waits for the next, unless workers keep dying (`is_up`); a chunk
whose descriptor has come is never made again, only mapped again; a region is dropped when no process of ours has it
mapped any more; after `close` there is no worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from kvstore_tiers.child_variables import variables_of_children
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.regions import Regions
from kvstore_tiers.gpu.settings import DIRECT, WorkerSettings
from kvstore_tiers.passing import receive_packet, send_packet

LOOK_S = 0.5
KILL_S = 2.0  # how long a process that was killed may take to end
MIN_BACKOFF_S, DOWN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 0.4, 10.0  # between workers that copied nothing
_NOTHING = b""  # wakes the thread that sends
DOWN = "the GPU's worker is not running"
Ended = Callable[[str], None]  # with what went wrong; empty when the bytes are in place
Done = Callable[[wire.End], None]
_LOG = logging.getLogger(__name__)


@dataclass
class _Transfer:
    ended: Done
    since_s: float
    patience_s: float
    waits: bool = True  # for the next worker, where there is none now
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class _Leaving:
    ended: Callable[[], None]
    since_s: float


@dataclass
class _Chunk:
    nbytes: int
    descriptor: int = -1  # -1 until the worker has made it


class Follower(Protocol):
    """Hears of the worker, on a thread of the link's. Quick; raises nothing."""

    def has_memory(self, number: int, descriptor: int) -> None:
        """A chunk is there; the descriptor of its memory stays the link's."""
        ...

    def worker_started(self, process: int) -> None: ...

    def worker_ended(self, process: int) -> None: ...


class WorkerLink:
    """A worker for `device`. `refused` is called with a chunk that is not there, and why; `follower` hears of those
    that are; `regions` hear which of them a worker has registered.
    `can_check` says whether the worker has `checksums`, and
    `has_direct_storage` whether it has that, `cannot_check` and `no_direct_storage` why not where they are wanted.
    Raises OSError where no worker starts, with what it said."""

    def __init__(
        self,
        device: int,
        refused: Callable[[int, str], None],
        *,
        follower: Follower | None = None,
        regions: Regions,
        settings: WorkerSettings | None = None,
    ) -> None:
        self._device = device
        self._settings = settings or WorkerSettings()
        self.can_check, self.cannot_check = False, ""
        self.has_direct_storage, self.no_direct_storage = False, ""
        self._wants_direct = self._settings.wants_direct
        self._refused = refused
        self._follower = follower
        self._heard = regions
        self._regions: dict[int, wire.Region] = {}
        self._leaving: dict[int, _Leaving] = {}  # regions that a worker may have mapped still
        self._has_worker = False  # or one that has not gone yet
        self._chunks: dict[int, _Chunk] = {}
        self._untold: deque[int] = deque()  # chunks that this worker has not heard of; under `_wire`
        self._pending: dict[int, _Transfer] = {}
        self._lock = threading.Lock()  # of the tables
        self._wire = threading.Lock()  # of the socket, while something is sent
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._queue: SimpleQueue[tuple[bytes, int, int] | None] = SimpleQueue()  # descriptor, transfer
        self._next_transfer = 0
        self._closing = threading.Event()
        self._has_socket = threading.Event()  # or is closing
        self._keeps_dying = False
        self._is_ready = threading.Event()
        self._was_useful = False
        self._started_s = self._ready_s = 0.0  # of this worker
        self.starts = 0
        self.device_name, self.device_bytes, self.device_identity, self.message = "", 0, 0, ""
        self._receiver = threading.Thread(target=self._live, name="gpu-worker", daemon=True)
        self._sender = threading.Thread(target=self._send_queued, name="gpu-send", daemon=True)
        self._receiver.start()
        self._sender.start()
        patience_s = 2 * self._settings.start_timeout_s  # the first worker may hang where direct storage is loaded
        if not self._is_ready.wait(patience_s) or self.message:
            message = self.message or f"its worker did not start within {patience_s:.0f} s"
            self.close()
            raise OSError(message)

    @property
    def process_id(self) -> int:
        """Of the worker; 0 while there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    @property
    def is_up(self) -> bool:
        """Whether there is a worker, or will be in a moment."""
        return not self._keeps_dying and not self._closing.is_set()

    def add_region(self, number: int, region: wire.Region) -> None:
        """Host memory that transfers may name. Its descriptor stays the caller's, open until `drop_region` has
        ended."""
        with self._lock:
            self._regions[number] = region
            self._queue.put((wire.pack_region(number, region), region.descriptor, -1))

    def drop_region(self, number: int, ended: Callable[[], None]) -> None:
        """`ended` is called when no worker has it mapped: on a thread of this link's, or on the caller's."""
        with self._lock:
            del self._regions[number]
            has_worker = self._has_worker
            if has_worker:
                self._leaving[number] = _Leaving(ended, time.monotonic())
                self._queue.put((wire.pack(wire.UNMAP, number), -1, -1))
        if not has_worker:
            ended()

    def add_chunk(self, number: int, nbytes: int) -> None:
        """Device memory; transfers may name it at once, and fail when it cannot be made."""
        with self._lock:
            self._chunks[number] = _Chunk(nbytes)
        self._queue.put((wire.pack(wire.CREATE, number, nbytes), -1, -1))

    def import_chunk(self, number: int, nbytes: int, descriptor: int, to_send: int) -> None:
        """Device memory that is there already, as `add_chunk`. Takes two descriptors of it: the chunk may be dropped
        before the other one is sent."""
        with self._lock:
            self._chunks[number] = _Chunk(nbytes, descriptor)
        self._queue.put((wire.pack(wire.IMPORT, number, nbytes), to_send, -1))

    def drop_chunk(self, number: int) -> None:
        """Give device memory back. Nothing is written to it any more."""
        with self._lock:
            chunk = self._chunks.pop(number)
            if chunk.descriptor >= 0:
                os.close(chunk.descriptor)
        self._queue.put((wire.pack(wire.DROP, number), -1, -1))

    def descriptor_of(self, number: int) -> int:
        """A new descriptor of a chunk's memory, the caller's to close; -1 while the worker has not made it."""
        with self._lock:
            chunk = self._chunks.get(number)
            return os.dup(chunk.descriptor) if chunk is not None and chunk.descriptor >= 0 else -1

    def transfer(self, letter: bytes, pieces: Sequence[wire.Piece], ended: Ended, *, waits: bool = True) -> None:
        """WRITE or READ. `ended` is called on a thread of this link's; on the caller's when there is no worker. Unless
        it `waits`, it fails where only the next worker could do it."""

        def done(end: wire.End) -> None:
            ended(end.failure)

        self._begin(lambda number: wire.pack_transfer(letter, number, pieces), done, waits=waits)

    def load(self, load: wire.FileLoad, descriptor: int, ended: Done) -> None:
        """Have the worker read from a file; the descriptor, which can read it, is the link's from now on. `ended` as
        that of `transfer`. It does not wait."""
        self._begin(lambda number: wire.pack_load(number, load), ended, waits=False, descriptor=descriptor)

    def checksums(self, places: Sequence[tuple[int, int, int]], summed: Done, *, waits: bool = True) -> None:
        """xxh3_64 of each place in device memory: chunk, offset there (a multiple of 16) and bytes; at most
        wire.MAX_CHECKED. `summed` is called as `ended` of `transfer`."""
        pieces = [wire.Piece(chunk, offset, 0, 0, nbytes) for chunk, offset, nbytes in places]
        self._begin(lambda number: wire.pack_transfer(wire.CHECK, number, pieces), summed, waits=waits)

    def _begin(self, pack: Callable[[int], bytes], ended: Done, *, waits: bool, descriptor: int = -1) -> None:
        with self._lock:
            patience_s = self._settings.patience_s if descriptor < 0 else self._settings.file_patience_s
            is_up = self.is_up and (waits or (self._has_socket.is_set() and self._ready_s > 0))
            if is_up:
                self._next_transfer += 1
                number = self._next_transfer
                self._pending[number] = _Transfer(ended, time.monotonic(), patience_s, waits)
        if not is_up:
            if descriptor >= 0:
                os.close(descriptor)
            ended(wire.End(self.message or DOWN, is_down=True))
            return
        self._queue.put((pack(number), descriptor, number))

    def close(self) -> None:
        """End the worker; transfers under way fail. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._has_socket.set()
        self._queue.put(None)
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._receiver.join()
        self._sender.join()
        for chunk in self._chunks.values():
            if chunk.descriptor >= 0:
                os.close(chunk.descriptor)
        self._chunks.clear()

    # The worker's life

    def _live(self) -> None:
        backoff_s = 0.0
        while not self._closing.wait(backoff_s):
            self._was_useful = False
            try:
                sock, process = self._start()
            except OSError as error:  # no descriptor, memory or process is left: as a worker that died at once
                self.message = f"its worker cannot be started: {error}"
            else:
                self._listen(sock, process)
                self._end(sock, process)
                if self._blames_direct_storage(process.returncode):
                    continue
            if not self._is_ready.is_set():
                self.message = self.message or f"its worker ended with status {process.returncode}"
                self._is_ready.set()
                return
            backoff_s = 0.0 if self._was_useful else min(MAX_BACKOFF_S, max(MIN_BACKOFF_S, 2 * backoff_s))
            if backoff_s >= DOWN_BACKOFF_S:
                self._keeps_dying = True
                self._fail(lambda _: True)
        self._fail(lambda _: True)

    def _blames_direct_storage(self, status: int) -> bool:
        """Whether the worker that has ended was not ready, for no reason that it gave, and the next one does without
        direct storage: that was being loaded, and is not demanded."""
        if self._ready_s or self.message or self._closing.is_set():
            return False
        if not self._wants_direct or self._settings.from_files == DIRECT:
            return False
        self._wants_direct = self.has_direct_storage = False
        self.no_direct_storage = f"the worker that was to load it ended with status {status}"
        return True

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (own, others):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._settings.socket_bytes)
        command = [sys.executable, "-m", "kvstore_tiers.gpu.worker"]
        options = ["--checksums"] * self._settings.checks + ["--direct-storage"] * self._wants_direct
        with others:
            process = subprocess.Popen(
                [*command, "--socket", str(others.fileno()), "--device", str(self._device), *options],
                pass_fds=[others.fileno()], stdin=subprocess.DEVNULL,
                env=variables_of_children() | dict(self._settings.variables),
            )  # fmt: skip
        self.starts += 1
        self._started_s, self._ready_s = time.monotonic(), 0.0
        self._process = process
        if self._follower is not None:  # before it has anything to write to
            self._follower.worker_started(process.pid)
        with self._wire, self._lock:
            self._has_worker = True
            with contextlib.suppress(OSError):  # it died already: the end of the socket says so
                for number, region in self._regions.items():
                    if number == wire.BOUNCE_REGION:  # others may be many, and nothing waits for them
                        send_packet(own, wire.pack_region(number, region), [region.descriptor])
                    else:
                        self._queue.put((wire.pack_region(number, region), region.descriptor, -1))
            self._untold = deque(self._chunks)  # may be more than the socket holds before the worker reads
            self._queue.put((_NOTHING, -1, -1))
            self._socket = own
            self._has_socket.set()
        return own, process

    def _listen(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Until the worker is gone."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        look_at_s = 0.0
        while not self._closing.is_set():
            has_packet = poll.poll(LOOK_S * 1000)
            if time.monotonic() >= look_at_s:
                look_at_s = time.monotonic() + LOOK_S
                if self._is_overdue():
                    _LOG.error("the worker of GPU %d does not answer: it is killed", self._device)
                    process.kill()
                    return  # its end of the socket may stay open: see `_end`
            if not has_packet:
                continue
            try:
                packet, descriptors = receive_packet(sock, wire.MAX_PACKET_BYTES)
                if not packet:
                    return
                self._hear(packet, descriptors)
            except OSError:
                return

    def _is_overdue(self) -> bool:
        """Whether the worker has owed an answer for too long: that it is ready, that it has let go of a region, or
        the end of a transfer."""
        now_s = time.monotonic()
        if not self._ready_s:
            return now_s - self._started_s > self._settings.start_timeout_s
        with self._lock:
            sent = [each for each in self._pending.values() if each.is_sent]
            leaving = [each.since_s for each in self._leaving.values()]
        if any(now_s - max(since_s, self._ready_s) > self._settings.patience_s for since_s in leaving):
            return True
        return any(now_s - max(each.since_s, self._ready_s) > each.patience_s for each in sent)

    def _end(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # a send that waits for the worker ends
        with self._wire:
            self._socket = None
            if not self._closing.is_set():
                self._has_socket.clear()
            sock.close()
        try:
            process.wait(1.0 if self._closing.is_set() else 0.1)
        except subprocess.TimeoutExpired:
            process.kill()
            self._outwait(process)
        failed = self._fail(lambda each: each.is_sent or not each.waits)
        self._heard.worker_ended()
        if self._follower is not None:
            self._follower.worker_ended(process.pid)
        with self._lock:
            self._has_worker = False
            left, self._leaving = self._leaving, {}
        for region in left.values():
            region.ended()
        if not self._closing.is_set() and self._is_ready.is_set():
            _LOG.warning(
                "the worker of GPU %d ended with status %s; %d transfers failed",
                self._device, process.returncode, failed,
            )  # fmt: skip

    def _outwait(self, process: subprocess.Popen[bytes]) -> None:
        """Until a process that was killed is gone: one that hangs in the kernel, in a read of a disk, goes when that
        ends. Until then there is no worker, and what was sent to this one is under way: it may still write there."""
        while True:
            try:
                process.wait(KILL_S)
                return
            except subprocess.TimeoutExpired:
                if self._closing.is_set():
                    return
                if not self._keeps_dying:
                    _LOG.error("the worker of GPU %d was killed and does not end: it hangs in the kernel", self._device)
                self._keeps_dying = True
                self._fail(lambda each: not each.is_sent)

    def _fail(self, concerns: Callable[[_Transfer], bool]) -> int:
        """End transfers as failed; how many."""
        with self._lock:
            failed = [number for number, each in self._pending.items() if concerns(each)]
            transfers = [self._pending.pop(number) for number in failed]
        for transfer in transfers:
            transfer.ended(wire.End(DOWN, is_down=True, dead_worker=self.starts if transfer.is_sent else 0))
        return len(transfers)

    def _hear(self, packet: bytes, descriptors: list[int]) -> None:
        letter = packet[:1]
        number, nbytes, text = wire.unpack(packet)
        if letter in (wire.ENDED, wire.UNREAD, wire.SUMS):
            number, end = wire.unpack_end(packet)
            with self._lock:
                found = self._pending.pop(number, None)
            self._was_useful = self._was_useful or not end.failure
            if found is not None:
                found.ended(end)
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
            self._keeps_dying = False
            self._ready_s = time.monotonic()
            self._is_ready.set()
        elif letter == wire.FATAL and not self._is_ready.is_set():
            self.message = text
        for stray in descriptors:
            os.close(stray)

    def _send_queued(self) -> None:
        while (item := self._queue.get()) is not None:
            self._send(*item)
            packet, descriptor, _ = item
            if packet[:1] in (wire.IMPORT, wire.LOAD):  # descriptors that were handed over
                os.close(descriptor)

    def _tell_chunks(self, sock: socket.socket) -> None:
        """What there is already: transfers come after it. Raises OSError."""
        while self._untold:
            number = self._untold[0]
            descriptor = self.descriptor_of(number)
            with contextlib.ExitStack() as undo:
                if descriptor >= 0:
                    undo.callback(os.close, descriptor)
                chunk = self._chunks.get(number)
                if chunk is not None and descriptor >= 0:
                    send_packet(sock, wire.pack(wire.IMPORT, number, chunk.nbytes), [descriptor])
                elif chunk is not None:
                    send_packet(sock, wire.pack(wire.CREATE, number, chunk.nbytes))
            self._untold.popleft()

    def _send(self, packet: bytes, descriptor: int, number: int) -> None:
        """To the next worker where this one is gone: what it knows already, it ignores."""
        while not self._closing.is_set():
            self._has_socket.wait()
            with self._wire:
                sock = self._socket
                if sock is None:
                    continue
                try:
                    self._tell_chunks(sock)
                except OSError:
                    self._give_up(sock)
                    continue
                if packet == _NOTHING:
                    return
                transfer = self._pending.get(number)
                if number >= 0 and transfer is None:
                    return  # failed meanwhile
                if packet[:1] == wire.MAP and wire.unpack_region(packet, descriptor)[0] not in self._regions:
                    return  # dropped meanwhile: its descriptor may be another file's
                if transfer is not None:
                    transfer.is_sent, transfer.since_s = True, time.monotonic()
                try:
                    send_packet(sock, packet, [descriptor] if descriptor >= 0 else [])
                except OSError:
                    if transfer is not None:
                        transfer.is_sent = False
                    self._give_up(sock)
                else:
                    return

    def _give_up(self, sock: socket.socket) -> None:
        """This worker; until the other thread has started the next there is none."""
        self._has_socket.clear()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
