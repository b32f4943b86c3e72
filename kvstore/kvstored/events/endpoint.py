"""An address that subscribers connect to: a ZMQ socket, with limits for each connection and for their number.

A silent connection ends after `HANDSHAKE_MS`, a dead one after `DEAD_MS`. ZMQ itself bounds neither the number of
connections nor the messages that wait for them. Connections over the number are cut here, by closing their descriptor,
which ZMQ takes for a peer that left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_MS = 5_000
BEAT_MS = 10_000  # from one question whether a peer lives to the next
DEAD_MS = 30_000  # without an answer, or without a byte taken
MAX_REQUEST_BYTES = 16 << 10
IPC = "ipc://"
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class EventEndpoint:
    """A ZMQ socket of the type `kind` that listens on `address` and accepts at most `most` connections at once. At most
    `high_water` messages wait for one connection. The constructor raises ZMQError."""

    def __init__(self, context: Any, kind: int, address: str, most: int, high_water: int) -> None:
        self._address, self._most = address, most
        self._connections: dict[int, None] = {}  # descriptors, oldest first
        self.socket = opened = context.socket(kind)
        opened.copy_threshold = 0  # so that it is known when a message's memory is free
        opened.set_hwm(high_water)
        for option, value in (
            (zmq.LINGER, 0), (zmq.IPV6, 1), (zmq.HANDSHAKE_IVL, HANDSHAKE_MS), (zmq.HEARTBEAT_IVL, BEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, DEAD_MS), (zmq.TCP_MAXRT, DEAD_MS), (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, DEAD_MS // 1000), (zmq.MAXMSGSIZE, MAX_REQUEST_BYTES),
        ):  # fmt: skip
            opened.setsockopt(option, value)
        self.monitor = opened.get_monitor_socket(_WATCHED)
        self._bind()

    def __len__(self) -> int:
        return len(self._connections)

    def send(self, *frames: bytes) -> Any:
        """Send a message of `frames` without waiting; the memory of the last frame is shared with ZMQ. Return ZMQ's
        tracker of that memory, or None if the peer has left or its queue is full."""
        try:
            for frame in frames[:-1]:
                self.socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK, copy=True)
            return self.socket.send(frames[-1], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return None
            raise

    def look(self) -> None:
        """Note which peers have connected and left since the last call, and cut connections beyond the limit."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections[descriptor] = None
                if len(self._connections) > self._most:
                    self.cut(descriptor)
            else:
                self._connections.pop(descriptor, None)
        self.socket.get(zmq.EVENTS)  # lets ZMQ free what waited for those that left

    def cut(self, descriptor: int) -> None:
        """End the connection with the file descriptor `descriptor`. Messages that wait for its peer are freed."""
        if descriptor not in self._connections:
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def cut_slow(self) -> int:
        """End the connections whose peers have not read what was sent to them, or all connections if no peer is known
        to be slow. Return their number."""
        slow = [descriptor for descriptor in self._connections if _unread_bytes(descriptor)]
        for descriptor in slow or list(self._connections):
            self.cut(descriptor)
        return len(slow or self._connections)

    def restore(self) -> None:
        """Bind the socket again if its file was removed. Its connections end, and reconnect to the new socket."""
        if not self._address.startswith(IPC) or os.path.exists(self._address.removeprefix(IPC)):
            return
        with contextlib.suppress(zmq.ZMQError):
            self.socket.unbind(self._address)
        with contextlib.suppress(zmq.ZMQError):  # while its directory is missing
            self._bind()

    def _bind(self) -> None:
        mask = os.umask(0o077)  # a socket file is its owner's alone
        try:
            self.socket.bind(self._address)
        finally:
            os.umask(mask)


def _unread_bytes(descriptor: int) -> int:
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0" * 4))
    except OSError:
        return 0
    return int(count)


class Sent:
    """A list of sent messages whose memory ZMQ still holds, since peers have not read them."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, int]] = []
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, tracker: Any, nbytes: int) -> None:
        self._held.append((tracker, nbytes))
        self.held_bytes += nbytes

    def look(self) -> bool:
        """Drop the messages whose memory ZMQ has released by now from the list. Return whether there were any."""
        left = [each for each in self._held if not each[0].done]
        is_less = len(left) < len(self._held)
        if is_less:
            self._held = left
            self.held_bytes = sum(nbytes for _, nbytes in left)
        return is_less
