"""The send queue to the GPU worker. A packet goes to the worker that is alive when the packet reaches the front.

The module owns the socket, the queue and the thread that sends, so that no caller waits for a worker. It never starts
one. Invariants: packets go in their order, behind the greetings of each new worker; a packet that a worker did not get
goes to the next; descriptors handed over with a packet are closed once, after it was sent or dropped; no caller waits
for a worker that does not read.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import NamedTuple

from kvstore_tiers.child_processes import send_packet
from kvstore_tiers.gpu import wire


class Outgoing(NamedTuple):
    """A packet to send. `transfer`: the number of the transfer that it begins, if any."""

    packet: bytes
    descriptor: int = -1
    transfer: int = -1


Greeting = Callable[[], Outgoing | None]
"""Makes what a new worker gets first, when its turn comes; None: it is void by now. Its descriptor is given away."""
_NOTHING = Outgoing(b"")  # wakes the thread


class Outbox:
    """The queue of packets to the GPU worker. `is_wanted(packet)` is asked before a packet is sent: it may be void by
    now. `unsent(packet)` is called when delivery failed. A worker ignores repeated facts.
    """

    def __init__(self, is_wanted: Callable[[Outgoing], bool], unsent: Callable[[Outgoing], None]) -> None:
        self._is_wanted = is_wanted
        self._unsent = unsent
        self._wire = threading.Lock()  # of the socket, while something is sent
        self._socket: socket.socket | None = None
        self._greetings: deque[Greeting] = deque()  # of its worker, not sent yet
        self._has_socket = threading.Event()  # or is closing
        self._sends_since_s: float | None = None  # what the worker does not read
        self._is_closing = False
        self._queue: SimpleQueue[Outgoing | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="gpu-send", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """True if there is a worker to send to."""
        return self._has_socket.is_set()

    def is_overdue(self, now_s: float, ready_s: float, patience_s: float) -> bool:
        """Return whether a worker that is ready since `ready_s` has had no room for a packet for too long."""
        since_s = self._sends_since_s
        return since_s is not None and now_s - max(since_s, ready_s) > patience_s

    def put(self, packet: bytes, descriptor: int = -1, transfer: int = -1) -> None:
        self._queue.put(Outgoing(packet, descriptor, transfer))

    def open(self, sock: socket.socket, greetings: Iterable[Greeting]) -> None:
        """Send to a new worker: the greetings, which may be more than its socket holds before it reads, then the
        queue.
        """
        with self._wire:
            self._greetings = deque(greetings)
            self._socket = sock
            self._has_socket.set()
        self._queue.put(_NOTHING)

    def shut(self, sock: socket.socket) -> None:
        """Close the socket of a worker that gets nothing any more."""
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # a send that waits for the worker ends
        with self._wire:
            self._socket = None
            self._has_socket.clear()
            if self._is_closing:
                self._has_socket.set()
            sock.close()

    def close(self) -> None:
        """Send no more waiting packets. Returns at once; the socket is shut, for both sides: see `join`."""
        self._is_closing = True
        self._has_socket.set()
        self._queue.put(None)
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            self._send(item)
            if item.packet[:1] in (wire.IMPORT, wire.LOAD):  # descriptors that were handed over
                os.close(item.descriptor)

    def _send(self, item: Outgoing) -> None:
        while not self._is_closing:
            self._has_socket.wait()
            with self._wire:
                sock = self._socket
                if sock is None:
                    continue
                try:
                    self._greet(sock)
                    if item is _NOTHING or not self._is_wanted(item):
                        return
                    self._say(sock, item)
                except OSError:
                    self._unsent(item)
                    self._has_socket.clear()  # until the next worker was started
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                else:
                    return

    def _greet(self, sock: socket.socket) -> None:
        """Send the greetings. Raises OSError."""
        while self._greetings:
            item = self._greetings[0]()
            if item is not None:
                try:
                    self._say(sock, item)
                finally:
                    if item.descriptor >= 0:
                        os.close(item.descriptor)
            self._greetings.popleft()

    def _say(self, sock: socket.socket, item: Outgoing) -> None:
        """Send one packet. Raises OSError."""
        self._sends_since_s = time.monotonic()
        try:
            send_packet(sock, item.packet, [item.descriptor] if item.descriptor >= 0 else [])
        finally:
            self._sends_since_s = None
