"""An engine in a child process of its own, so that it can be killed, paused and waited for.

Owns the child and the conversation with it: pickled, over a socket pair; the other end is `testing.child`.
Every wait has an end: an engine that does not come back within PATIENCE_S hangs, and that is a failure.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

from kvstore_client.testing.setting import EngineFailed, EngineSetting, Point, PromptResult

START_S = 120.0  # an engine loads its model
PATIENCE_S = 60.0  # far beyond every deadline of the client


class EngineProcess:
    """An engine under test in a child process, which can be killed, paused and waited for. The child calls `factory`
    ("module:function") with `setting`. `gid` is the group that the child runs in, which makes it another tenant if the
    daemon's configuration maps that group; it needs root. Raises EngineFailed.
    """

    def __init__(self, factory: str, setting: EngineSetting, *, gid: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            command = [sys.executable, "-m", "kvstore_client.testing.child", str(theirs.fileno())]
            self._child = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self._connection = Connection(ours.detach())
        self._connection.send((factory, setting, gid))
        try:
            self._expect("ready", START_S)
        except EngineFailed:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def store(self, tokens: Sequence[int]) -> None:
        self._call("store", tokens)

    def restore(self, tokens: Sequence[int]) -> PromptResult:
        restored = self._call("restore", tokens)
        if not isinstance(restored, PromptResult):
            raise EngineFailed(f"restore must return a Restored, got {restored!r}")
        return restored

    def pause_at(self, point: Point) -> None:
        self._connection.send(("pause_at", point))
        self._expect("armed", PATIENCE_S)

    def begin(self, operation: Literal["store", "restore"], tokens: Sequence[int]) -> bool:
        self._connection.send((operation, list(map(int, tokens))))
        kind, value = self._answer(PATIENCE_S)
        if kind not in ("reached", "done"):
            raise EngineFailed(f"expected 'reached', the engine sent {kind!r}: {value!r}")
        return kind == "reached"

    def go_on(self) -> PromptResult | None:
        self._connection.send(("go_on", None))
        result: PromptResult | None = self._expect("done", PATIENCE_S)
        return result

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        self._connection.close()

    def close(self) -> None:
        """End the engine's process by an ordinary exit, if it still runs. Raises EngineFailed if it hangs, or its exit
        status is not 0.
        """
        if self._connection.closed:
            return
        try:
            self._connection.send(("close", None))
            self._expect("closed", PATIENCE_S)
            status = self._child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise EngineFailed("the engine does not end after close()") from None
        finally:
            self.kill()
        if status:
            raise EngineFailed(f"the engine's process ended with status {status}")

    def _call(self, operation: str, tokens: Sequence[int]) -> Any:
        with contextlib.suppress(ConnectionError):  # it has ended: its last message says how
            self._connection.send((operation, list(map(int, tokens))))
        return self._expect("done", PATIENCE_S)

    def _expect(self, wanted: str, timeout_s: float) -> Any:
        """Return the value of the child's next message, which must be of the kind `wanted`."""
        kind, value = self._answer(timeout_s)
        if kind != wanted:
            raise EngineFailed(f"expected {wanted!r}, the engine sent {kind!r}")
        return value

    def _answer(self, timeout_s: float) -> tuple[str, Any]:
        """Return the kind and the value of the child's next message, which must come within `timeout_s` seconds."""
        try:
            if not self._connection.poll(timeout_s):
                self.kill()
                raise EngineFailed(f"the engine hangs: nothing for {timeout_s:.0f} s")
            kind, value = self._connection.recv()
        except (EOFError, ConnectionError):
            self.kill()
            raise EngineFailed(f"the engine's process ended by itself ({self._child.returncode})") from None
        if kind == "raised":
            raise EngineFailed(f"the engine raised:\n{value}")
        return kind, value
