"""The holder: a small process that keeps the descriptors of a daemon's memory while there is no daemon.

`python -m kvstored.lifetime.holder --listen FD --file ID --path SOCKET`; the daemon starts it and hands it a listening
SOCK_SEQPACKET socket of mode 0600, and says which file is its own. As a service of its own (`--stay --path SOCKET`,
deploy/systemd/kvstored-holder.service) it makes the socket itself and holds on until it is stopped, so that it outlives
the daemon's unit. A packet is an operation
letter and a name, with the descriptor where there is one:

    K name + descriptor   keep it, in place of what had that name
    D name                drop it
    S seconds             how long to hold on without a daemon, from now on
    L                     list: answered by one "F name" + descriptor for each, then by "E"
    Q                     quit: drop everything and exit; a service stays

The process owns the descriptors and nothing else: it never maps or reads them, and imports little, to stay small. It
outlives the daemon's death (own session, no inherited pipe), and ends by itself: on Q, when it holds nothing and has
no connection, when it had no connection for the time that S set, or when its socket's file is gone.
Invariants: only this user (and root) is listened to; packets of a daemon that died are taken in before any other
connection is answered.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import socket
import sys
import time

from kvstore_tiers.child_processes import is_of_our_user, receive_packet, send_packet
from kvstored.lifetime.notify import notify
from kvstored.process import file_identity, raise_descriptor_limit

LOOK_S = 1.0  # between two looks at whether there is still reason to live
DEFAULT_LINGER_S = 600.0
ANSWER_TIMEOUT_S = 10.0
MAX_NAME_BYTES = 64
BACKLOG = 128  # a daemon that finds it full would take this holder for dead
MAX_CONNECTIONS = 16
MAX_DESCRIPTORS = 65_536


class Holder:
    """The main loop of the process that keeps descriptors of the daemon's memory while there is no daemon. It is
    reached at `listener`, whose socket file is `path`, with the device and inode `file`. With `stays` it is a service,
    and does not end by itself."""

    def __init__(
        self, listener: socket.socket, path: str, file: tuple[int, ...] | None, *, stays: bool = False
    ) -> None:
        self._listener = listener
        self._path = path
        self._stays = stays
        self._file = file
        self._held: dict[bytes, int] = {}
        self._connections: dict[socket.socket, bool] = {}  # oldest first; whether it has said something
        self._selector = selectors.DefaultSelector()
        self._linger_s = DEFAULT_LINGER_S
        self._alone_since_s = time.monotonic()
        self._must_quit = False

    def run(self) -> None:
        """Serve connections of daemons, and return when there is no reason left to keep any descriptor."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        look_at_s = 0.0
        while not self._must_quit:
            for key, _ in self._selector.select(LOOK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
                    self._take_in(key.fileobj)
            if time.monotonic() >= look_at_s:
                look_at_s = time.monotonic() + LOOK_S
                if self._has_no_reason():
                    return

    def close(self) -> None:
        self._drop_all()
        if self._can_be_found():
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _has_no_reason(self) -> bool:
        if self._stays or self._connections:
            return False
        alone_s = time.monotonic() - self._alone_since_s
        if alone_s < LOOK_S:  # the daemon that started us is about to connect
            return False
        return not self._held or alone_s >= self._linger_s or not self._can_be_found()

    def _can_be_found(self) -> bool:
        return self._file is not None and file_identity(self._path) == self._file

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                if not is_of_our_user(connection) or not self._has_room():
                    connection.close()
                    continue
                self._connections[connection] = False
                self._selector.register(connection, selectors.EVENT_READ)

    def _has_room(self) -> bool:
        """Return whether one more may connect. The oldest connection that has said nothing makes room, since a daemon
        speaks at once.
        """
        if len(self._connections) >= MAX_CONNECTIONS:
            is_silent = (each for each, has_spoken in self._connections.items() if not has_spoken and not _speaks(each))
            if (oldest := next(is_silent, None)) is not None:
                self._end(oldest)
        return len(self._connections) < MAX_CONNECTIONS

    def _take_in(self, connection: socket.socket) -> None:
        """Take in all that a connection has sent by now."""
        while connection in self._connections:
            try:
                packet, descriptors = receive_packet(connection, 1 + MAX_NAME_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            if not packet:
                self._end(connection)
                return
            self._connections[connection] = True
            self._obey(connection, packet[:1], packet[1:], descriptors)

    def _obey(self, connection: socket.socket, operation: bytes, name: bytes, descriptors: list[int]) -> None:
        if operation == b"K" and descriptors and (name in self._held or len(self._held) < MAX_DESCRIPTORS):
            self._drop(name)
            self._held[name] = descriptors.pop(0)
        elif operation == b"D":
            self._drop(name)
        elif operation == b"S":
            with contextlib.suppress(ValueError):
                self._linger_s = float(name)
        elif operation == b"L":
            self._accept()
            for other in [each for each in self._connections if each is not connection]:
                self._take_in(other)
            self._list(connection)
        elif operation == b"Q":
            self._drop_all()
            self._must_quit = not self._stays
        for stray in descriptors:
            os.close(stray)

    def _list(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(ANSWER_TIMEOUT_S)
            for name, descriptor in self._held.items():
                send_packet(connection, b"F" + name, [descriptor])
            connection.send(b"E")
            connection.settimeout(None)  # with one, a call that is not to wait would wait for it
        except OSError:
            self._end(connection)

    def _drop_all(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _drop(self, name: bytes) -> None:
        descriptor = self._held.pop(name, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def _end(self, connection: socket.socket) -> None:
        del self._connections[connection]
        self._selector.unregister(connection)
        connection.close()
        if not self._connections:
            self._alone_since_s = time.monotonic()


def _speaks(connection: socket.socket) -> bool:
    """Return whether data of a connection, or its end, waits to be read."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


def _listening(path: str) -> socket.socket:
    """Return a new socket of mode 0600, replacing one that a former process left. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def main(arguments: list[str] | None = None) -> int:
    """Run the process that keeps descriptors until it has none to keep, or as a service until it is stopped. Return the
    exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvstored.lifetime.holder",
        description="Keeps the memory of a kvstored daemon over its restart. The daemon starts it by itself, "
        "where host.warm_restart says so. With --stay it is a service: kvstored-holder.service.",
    )
    parser.add_argument("--listen", type=int, metavar="FD", help="an inherited listening socket")
    parser.add_argument("--file", metavar="ID", help="device and inode of its file, as DEVICE:INODE")
    parser.add_argument("--path", required=True, metavar="SOCKET", help="the file of that socket")
    parser.add_argument("--stay", action="store_true", help="make the socket, and hold on until SIGTERM")
    chosen = parser.parse_args(arguments)
    if chosen.stay == (chosen.listen is not None) or chosen.stay == (chosen.file is not None):
        parser.error("give --listen FD and --file ID, or --stay")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: meant for the daemon, which will send Q
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_descriptor_limit()  # a descriptor over the limit would vanish unseen
    try:
        listener = _listening(chosen.path) if chosen.stay else socket.socket(fileno=chosen.listen)
    except OSError as error:
        print(f"kvstored.lifetime.holder: cannot listen on {chosen.path}: {error.strerror or error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with listener:
        file = file_identity(chosen.path) if chosen.stay else tuple(map(int, chosen.file.split(":")))
        holder = Holder(listener, chosen.path, file, stays=chosen.stay)
        notify("READY=1")
        try:
            holder.run()
        finally:
            holder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
