"""The child's end of `EngineProcess`: opens the engine, carries out commands, pauses where it is ordered to.

    python -m kvstore_client.testing.child DESCRIPTOR

Owns the points at which an engine can be paused. They are laid into the client library of this process alone, from
outside: the library itself knows nothing of them. Once an engine was paused at "reading", a lease that has ended hands
out garbage: a connector that does not ask `lease.valid` after its copy then answers wrong, every time.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvstore_client.lease import Lease
from kvstore_client.memory import Bytes
from kvstore_client.put import StagedPut
from kvstore_client.testing.setting import Engine, EngineSetting, Point

GARBAGE = 0xA5


class EngineChild:
    """The process in which `EngineProcess` runs an engine under test. It reads commands from `connection` in a separate
    thread, so that a paused engine can be continued.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._may_go_on = threading.Event()
        self._armed: Point | None = None

    def run(self) -> None:
        factory, setting, gid = self._connection.recv()
        try:
            engine = _open(factory, setting, gid)
        except Exception:
            self._send("raised", traceback.format_exc())
            return
        self._send("ready")
        threading.Thread(target=self._read_commands, daemon=True).start()
        while True:
            command, argument = self._commands.get()
            try:
                if command == "close":
                    engine.close()
                    self._send("closed")
                    return
                if command == "pause_at":
                    self._lay(argument)
                    self._send("armed")
                else:
                    self._send("done", getattr(engine, command)(argument))
            except Exception:
                self._send("raised", traceback.format_exc())

    def _read_commands(self) -> None:
        while True:
            try:
                command = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # the suite has gone
            if command[0] == "go_on":
                self._may_go_on.set()
            else:
                self._commands.put(command)

    def _send(self, kind: str, value: Any = None) -> None:
        with self._sending:
            self._connection.send((kind, value))

    def _lay(self, point: Point) -> None:
        self._armed = point
        self._may_go_on.clear()
        if point == "reading":
            payload_of = Lease.payload

            def payload(lease: Lease, block: int) -> Bytes:
                found = payload_of(lease, block)
                self._pass(point)
                return found if lease.valid else np.full_like(found, GARBAGE)

            Lease.payload = payload  # type: ignore[method-assign,assignment]
        else:
            send_of = StagedPut._send

            def send(put: StagedPut) -> None:
                self._pass(point)
                send_of(put)

            StagedPut._send = send  # type: ignore[method-assign,assignment]

    def _pass(self, point: Point) -> None:
        """Report the first time that the point is reached, and wait."""
        if self._armed == point:
            self._armed = None
            self._send("reached")
            self._may_go_on.wait()


def _open(factory: str, setting: EngineSetting, gid: int | None) -> Engine:
    module, _, function = factory.partition(":")
    make = getattr(importlib.import_module(module), function)
    if gid is not None:
        os.setgid(gid)
    engine: Engine = make(setting)
    return engine


if __name__ == "__main__":
    EngineChild(Connection(int(sys.argv[1]))).run()
