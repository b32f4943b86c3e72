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
    """A packet for the GPU worker process, with a descriptor to pass (-1: none) and the number of the transfer that the
    packet orders (-1: none).
    """

    packet: bytes
    descriptor: int = -1
    transfer: int = -1


Greeting = Callable[[], Outgoing | None]
"""Makes what a new worker gets first, when its turn comes; None: it is void by now. Its descriptor is given away."""
_NOTHING = Outgoing(b"")  # wakes the thread


class Outbox:
    """A queue of packets to the GPU worker process. A thread of its own sends them, so that no caller waits for the
    worker. `is_wanted(packet)` is called right before a packet is sent; `unsent(packet)` is called when sending failed.
    Packets wait until a worker is connected.
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
        """True if a worker process is connected, so that packets are sent at once."""
        return self._has_socket.is_set()

    def is_overdue(self, now_s: float, ready_s: float, patience_s: float) -> bool:
        """Return True if sending one packet has taken more than `patience_s` seconds, which means that the worker does
        not read. `ready_s` is the time at which the worker became ready. Times are monotonic seconds.
        """
        since_s = self._sends_since_s
        return since_s is not None and now_s - max(since_s, ready_s) > patience_s

    def put(self, packet: bytes, descriptor: int = -1, transfer: int = -1) -> None:
        self._queue.put(Outgoing(packet, descriptor, transfer))

    def open(self, sock: socket.socket, greetings: Iterable[Greeting]) -> None:
        """Send packets to a new worker over `sock` from now on: first the packets that `greetings` make, then the
        packets of the queue.
        """
        with self._wire:
            self._greetings = deque(greetings)
            self._socket = sock
            self._has_socket.set()
        self._queue.put(_NOTHING)

    def shut(self, sock: socket.socket) -> None:
        """Close the socket `sock` to a worker, which gets no more packets. Further packets wait for the next worker."""
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # a send that waits for the worker ends
        with self._wire:
            self._socket = None
            self._has_socket.clear()
            if self._is_closing:
                self._has_socket.set()
            sock.close()

    def close(self) -> None:
        """Stop sending, and shut the socket in both directions. The call returns at once; `join` waits for the
        thread.
        """
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
