"""The processes of the fleet: started in sessions of their own, waited for, and stopped in reverse order.

Owns what was started. Invariants: a child that ends before it is ready is reported with the end of its log; `stop` ends
every child, by force where it does not end by itself. Children are in sessions of their own, so that Ctrl-C reaches the
script alone, which then stops them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

COMMANDS = Path(sys.executable).parent
START_S, STOP_S, SLOW_S = 90.0, 15.0, 2.0
_LOG_BYTES = 1500


class FleetError(Exception):
    """Something is missing or did not start; the message says what to do."""


class Children:
    """Logs are files in `directory`. `say` gets a line for what takes longer than two seconds."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, command: Sequence[str | Path], *, niceness: int = 0) -> subprocess.Popen[bytes]:
        """Begin it; `wait_until` waits for it. Raises FleetError where there is no such program."""
        with self.log_of(name).open("wb") as log:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env={**os.environ, "MC_LOG_LEVEL": "ERROR"},
                )  # fmt: skip
            except FileNotFoundError as error:
                raise FleetError(f"{name}: there is no {error.filename}") from None
        self._running.append((name, process))
        return process

    def wait_until(self, name: str, is_ready: Callable[[], bool]) -> None:
        """Until the child of that name is ready. Raises FleetError where it ends, or takes too long."""
        process = next(process for each, process in self._running if each == name)
        began_s, said_s = time.monotonic(), time.monotonic()
        while not is_ready():
            now_s = time.monotonic()
            if process.poll() is not None or now_s - began_s > START_S:
                why = "ended" if process.poll() is not None else f"was not ready in {START_S:.0f} s"
                raise FleetError(f"{name} {why}. Its log ends with:\n{self.read_log(name)[-_LOG_BYTES:].rstrip()}")
            if now_s - said_s > SLOW_S:
                said_s = now_s
                self._say(f"  waiting for {name}, {now_s - began_s:.0f} s")
            time.sleep(0.05)

    def log_of(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def read_log(self, name: str) -> str:
        return self.log_of(name).read_text(errors="replace")

    def stop(self) -> None:
        """The last one started first."""
        for _, process in reversed(self._running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._running.clear()


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def answers(address: str, port: int) -> bool:
    """Return whether something listens there."""
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False
