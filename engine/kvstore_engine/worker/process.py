"""One worker process: its start, orders and replies, and its end.

Owns the child and its socket. It never starts a second one: the executor decides that.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

from kvstore_engine.worker.packets import MAX_PACKET_BYTES, Order, Reply
from kvstore_engine.worker.setup import WorkerSetup

_HINTS = {
    "SIGABRT": ", ggml's assertion is above",
    "SIGBUS": ", the model file was cut short or cannot be read",
    "SIGKILL": ", perhaps for lack of memory",
}


class WorkerDied(Exception):
    """The process is gone, or was ended because it did not answer; the message says how."""


class WorkerProcess:
    """A child that is starting; `receive` gives its first reply, the one to the setup."""

    def __init__(
        self, setup: WorkerSetup, model_descriptor: int, pool_descriptor: int, mailbox_descriptor: int
    ) -> None:
        # Datagrams with a connection: a packet is whole, and the end of a process is the end of its socket.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            passed = (theirs.fileno(), model_descriptor, pool_descriptor, mailbox_descriptor)
            # Never a fork of this process: its threads' locks would come along without the threads.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvstore_engine.worker", *map(str, passed)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
            )
        self._send(setup.encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable while no order is out: the process has ended."""
        return self._socket.fileno()

    def order(self, order: Order, timeout_s: float) -> Reply:
        """Have one step computed. WorkerDied if that is the end of the process, or takes longer."""
        self._send(order.encode())
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> Reply:
        self._socket.settimeout(timeout_s)
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except TimeoutError:
            self.end()
            raise WorkerDied(f"it did not answer within {timeout_s:g} s and was killed") from None
        except OSError:
            packet = b""
        if not packet:
            raise WorkerDied(self._ending())
        return Reply.decode(packet)

    def end(self) -> None:
        """Kill it; returns when it is gone."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _send(self, packet: bytes) -> None:
        try:
            self._socket.send(packet)
        except OSError:
            raise WorkerDied(self._ending()) from None

    def _ending(self) -> str:
        """How it ended. Its socket is closed, so it is dead or about to be."""
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it closed its socket and still runs: it cannot be used
            status = None
        self.end()
        if status is None:
            return "it closed its connection and was killed"
        if status >= 0:
            return f"it exited with status {status}"
        name = signal.Signals(-status).name
        hint = _HINTS.get(name, "")
        return f"it was ended by {name}{hint}"
