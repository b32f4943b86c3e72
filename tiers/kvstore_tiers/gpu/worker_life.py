"""The life of a GPU's worker: started by its settings, watched, killed, started anew.

The module owns the process, the thread that starts and receives from it, and the decision to load direct storage. It
knows no packets: the correspondent exchanges them. Invariants: there is one worker at a time, and the next is started
when the one before is gone; the longer workers do nothing useful, the longer the next one waits; after `close` there is
none.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvstore_tiers.child_processes import receive_packet, variables_of_children
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.wire import SOCKET_BYTES

AUTO, DIRECT, BOUNCE, OFF = "auto", "direct", "bounce", "off"  # ways for blocks from files, or none


@dataclass(frozen=True, slots=True)
class GpuWorkerSettings:
    """The settings of a GPU tier's worker process. checks: the worker computes checksums on the device. from_files: how
    it reads files (AUTO, DIRECT, BOUNCE or OFF). registers: it copies other tiers' memory directly, which it registers
    with the device in pieces of `register_bytes`. variables: added to its environment. patience_s, file_patience_s: the
    seconds after which it is killed if a transfer, or a load from a file, has not ended. start_timeout_s: the seconds
    that it has to become ready. regrow_s: the seconds without new chunks after the device had no memory. socket_bytes:
    the size of the socket buffer.
    """

    checks: bool = True
    from_files: str = BOUNCE
    registers: bool = True
    register_bytes: int = 256 << 20  # some 25 ms by others' figures, which a withdrawal may have to wait for
    variables: Mapping[str, str] = field(default_factory=dict)
    patience_s: float = 30.0  # a transfer takes milliseconds
    file_patience_s: float = 120.0  # a disk that hangs is not its fault: its own breaker and the kernel act before that
    start_timeout_s: float = 60.0
    regrow_s: float = 10.0
    socket_bytes: int = SOCKET_BYTES

    @property
    def wants_direct(self) -> bool:
        return self.from_files in (AUTO, DIRECT)


LOOK_S = 0.5
KILL_S = 2.0  # how long a process that was killed may take to end
MIN_BACKOFF_S, DOWN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 0.4, 10.0  # between workers that copied nothing
_LOG = logging.getLogger(__name__)


class Correspondent(Protocol):
    """An object that exchanges packets with the GPU worker process. The thread that watches the worker calls its
    methods.
    """

    def connect(self, sock: socket.socket, process: int) -> None:
        """Send packets to a new GPU worker from now on, first about the memory that it must map. Its process number is
        `process`, and `sock` is the socket to it.
        """
        ...

    def hear(self, packet: bytes, descriptors: list[int]) -> None:
        """Handle one packet from the worker, with the `descriptors` that came with it. Raises OSError if the worker
        must be replaced.
        """
        ...

    def is_overdue(self, now_s: float, ready_s: float) -> bool:
        """Return True if the worker, which became ready at `ready_s`, has not answered for too long. `now_s` is the
        present time; both are monotonic seconds.
        """
        ...

    def disconnect(self, sock: socket.socket) -> None:
        """Close the socket `sock` to a worker, which gets nothing more. The worker may still carry out packets that it
        has got.
        """
        ...

    def lose(self, process: int) -> int:
        """Note that the worker with the process number `process` is dead, and fail the transfers that it had not ended.
        Return how many failed.
        """
        ...

    def fail_unsent(self) -> None:
        """Fail the transfers that were not sent to a worker yet, because there may be no worker for a while."""
        ...

    def fail_all(self) -> None: ...

    def lack_direct_storage(self, why: str) -> None:
        """Note that workers are started without direct storage from now on, for the reason `why`."""
        ...


class GpuWorkerLife:
    """A thread that starts the worker process of `device` and watches it. It kills a worker that hangs, and starts
    another when one dies. `message` says why there is no worker.
    """

    def __init__(self, device: int, settings: GpuWorkerSettings, correspondent: Correspondent) -> None:
        self._device = device
        self._settings = settings
        self._correspondent = correspondent
        self._wants_direct = settings.wants_direct
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._keeps_dying = False
        self._was_ready = threading.Event()  # or will never be
        self._was_useful = False
        self._started_s = self._ready_s = 0.0  # of this worker
        self.starts, self.message = 0, ""
        self._thread = threading.Thread(target=self._live, name="gpu-worker", daemon=True)

    def start(self) -> str:
        """Start the first worker and wait until it is ready. Return "", or the reason why there is no worker."""
        self._thread.start()
        patience_s = 2 * self._settings.start_timeout_s  # the first worker may hang where direct storage is loaded
        if self._was_ready.wait(patience_s):
            return self.message
        return self.message or f"its worker did not start within {patience_s:.0f} s"

    @property
    def process_id(self) -> int:
        """The process number of the worker; 0 while there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    @property
    def is_up(self) -> bool:
        """True if a worker runs or will be started soon. False after `close`, and while workers keep dying."""
        return not self._keeps_dying and not self._closing.is_set()

    @property
    def is_ready(self) -> bool:
        """True if the worker that was started last has reported that it is ready."""
        return self._ready_s > 0

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        """Start no more workers. The present worker ends when its socket is closed, or is killed. The call returns at
        once; `join` waits for the thread.
        """
        self._closing.set()

    def join(self) -> None:
        self._thread.join()

    # What the worker said

    def say_ready(self) -> None:
        self._keeps_dying, self.message = False, ""
        self._ready_s = time.monotonic()
        self._was_ready.set()

    def say_unable(self, why: str) -> None:
        """Note that the worker cannot start, for the reason `why` that it reported. If it was the first worker, `start`
        returns the reason.
        """
        if not self._was_ready.is_set():
            self.message = why

    def say_useful(self) -> None:
        """Note that the worker has completed some work, so that another is started at once if it dies."""
        self._was_useful = True

    # From one worker to the next

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
            if not self._was_ready.is_set():
                self.message = self.message or f"its worker ended with status {process.returncode}"
                self._was_ready.set()
                return
            backoff_s = 0.0 if self._was_useful else min(MAX_BACKOFF_S, max(MIN_BACKOFF_S, 2 * backoff_s))
            if backoff_s >= DOWN_BACKOFF_S:
                self._keeps_dying = True
                self._correspondent.fail_all()
        self._correspondent.fail_all()

    def _blames_direct_storage(self, status: int) -> bool:
        """Return whether the ended worker was not ready, gave no reason, and was loading direct storage, which is not
        demanded: then the next one does without it.
        """
        if self._ready_s or self.message or self._closing.is_set():
            return False
        if not self._wants_direct or self._settings.from_files == DIRECT:
            return False
        self._wants_direct = False
        self._correspondent.lack_direct_storage(f"the worker that was to load it ended with status {status}")
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
                process_group=0,  # a terminal's signals are the daemon's
                env=variables_of_children() | dict(self._settings.variables),
            )  # fmt: skip
        self.starts += 1
        self._started_s, self._ready_s = time.monotonic(), 0.0
        self._process = process
        self._correspondent.connect(own, process.pid)
        return own, process

    def _listen(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Receive packets until the worker is gone."""
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
                self._correspondent.hear(packet, descriptors)
            except OSError:
                return

    def _is_overdue(self) -> bool:
        """Return whether the worker has owed an answer for too long: that it is ready, or any other."""
        now_s = time.monotonic()
        if not self._ready_s:
            return now_s - self._started_s > self._settings.start_timeout_s
        return self._correspondent.is_overdue(now_s, self._ready_s)

    def _end(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._correspondent.disconnect(sock)
        try:
            process.wait(1.0 if self._closing.is_set() else 0.1)
        except subprocess.TimeoutExpired:
            process.kill()
            self._outwait(process)
        failed = self._correspondent.lose(process.pid)
        if not self._closing.is_set() and self._was_ready.is_set():
            _LOG.warning(
                "the worker of GPU %d ended with status %s; %d transfers failed",
                self._device, process.returncode, failed,
            )  # fmt: skip

    def _outwait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until a killed process is gone. A process that hangs in the kernel, in a read of a disk, goes when that
        ends. Until then there is no worker, and its transfers are under way: it may still write there.
        """
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
                return
            if self._closing.is_set():
                return
            if not self._keeps_dying:
                _LOG.error("the worker of GPU %d was killed and does not end: it hangs in the kernel", self._device)
            self._keeps_dying = True
            self._correspondent.fail_unsent()
