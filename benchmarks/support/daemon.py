"""The daemon under measurement: `kvstored serve` as a child process, in a temporary directory of its own.

Owns the child's life; readiness comes over the sd_notify socket, so no time is lost polling. Never tunes the daemon:
what a benchmark sets is in its call, everything else is the default.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

import kvstore_client
from kvstore_client import Fingerprint, LayerGroup, Session
from kvstore_client.daemon_session import PREFAULT_THREAD
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc

READY_TIMEOUT_S = 240.0  # a machine that is short of time is no failure
STOP_TIMEOUT_S = 20.0
POLL_S = 0.01
MIB = 1 << 20
BLOCK_TOKENS = 64
LAYERS = 4
KVSTORED = ("-m", "kvstored")
Bytes = npt.NDArray[np.uint8]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP at the start, SIGCONT at the end: its sockets accept, nothing answers."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class BenchDaemon:
    """A daemon that serves. `ready_s` is from just before the process was started until it said that it serves."""

    socket_dir: Path
    pid: int
    ready_s: float

    def connect(self, fingerprint: Fingerprint, **options: Any) -> Session:
        """A session that insists on an answer and waits long for it: a benchmark must not measure misses."""
        settings: dict[str, Any] = {"required": True, "deadline_s": 30.0, "connect_timeout_s": 10.0}
        return kvstore_client.connect(self.socket_dir, fingerprint=fingerprint, **(settings | options))

    def rss_bytes(self) -> int:
        """Resident memory by the kernel's account, shared memory (arenas, staging) included."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"process {self.pid} has no resident memory: it has ended")

    def processor_s(self) -> float:
        """Return the time that the daemon's threads have used of all processors, in ticks of the kernel's clock."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def control_s(self) -> float:
        """Return the time that the daemon's first thread, which holds all state, has used of a processor."""
        return self.control_run_and_wait_s()[0]

    def control_run_and_wait_s(self) -> tuple[float, float]:
        """Return that time, and the time for which that thread was ready to run and had no processor."""
        ran_ns, waited_ns, _ = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()
        return int(ran_ns) / 1e9, int(waited_ns) / 1e9

    def admin(self, method: str, request: Any) -> Any:
        """One call of the Admin service."""
        target, options = f"unix:{self.socket_dir}/admin.sock", (("grpc.use_local_subchannel_pool", 1),)
        with grpc.insecure_channel(target, options=options) as channel:
            return getattr(admin_pb2_grpc.AdminStub(channel), method)(request, timeout=60)

    def drop_host(self) -> None:
        """Empty the host tier: what NVMe holds stays there."""
        self.admin("Drop", admin_pb2.DropRequest(tier="host"))

    def wait_prefaulted(self, nbytes: int, timeout_s: float = 30.0) -> None:
        """Until `nbytes` of arena memory have been touched by the daemon's background prefault."""
        deadline = time.monotonic() + timeout_s
        while self.admin("Status", admin_pb2.StatusRequest()).prefault_done_bytes < nbytes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{nbytes} bytes of arenas were not prefaulted in {timeout_s} s")
            time.sleep(POLL_S)


def wait_mapped(timeout_s: float = 180.0) -> None:
    """Until this process's sessions have touched their staging and entered arenas into their page tables.

    A session begins with that, in a thread of its own, which rests most of the time: a GiB of arenas takes it up to a
    minute on a slow machine.
    """
    deadline = time.monotonic() + timeout_s
    while any(thread.name == PREFAULT_THREAD for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"sessions were still mapping memory after {timeout_s} s")
        time.sleep(POLL_S)


@contextmanager
def bench_daemon(
    *settings: str, state_dir: Path | None = None, config: str = "", program: Sequence[str] = KVSTORED
) -> Iterator[BenchDaemon]:
    """A daemon with `--set` arguments, stopped at the end. Its log is shown when it does not start.

    With `state_dir` it finds, and leaves, what is there; else it starts empty. `config` is the text of its file,
    `program` are the interpreter's arguments that say what it runs.
    """
    with tempfile.TemporaryDirectory(prefix="kvbench-") as name:
        directory = Path(name)
        with (directory / "log").open("wb") as log, _listener(directory / "notify") as listener:
            environment = {**os.environ, **byte_code(), "NOTIFY_SOCKET": str(directory / "notify")}
            started = time.perf_counter()
            command = _command(program, directory, state_dir or directory / "state", settings)
            if config:
                (directory / "kvstored.toml").write_text(config)
                command += ["--config", str(directory / "kvstored.toml")]
            child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                _wait_ready(child, listener, directory / "log")
                yield BenchDaemon(directory / "run", child.pid, time.perf_counter() - started)
            finally:
                _stop(child)


@contextmanager
def slowed_daemon(state: Path, delay_s: float) -> Iterator[BenchDaemon]:
    """A daemon whose reads from NVMe are made one at a time and take `delay_s` longer."""
    os.environ["KVSTORED_FAILPOINTS"] = f"nvme.read=delay:{delay_s:.6f}" if delay_s else ""
    try:
        with bench_daemon("movement.in_flight=1", "host.capacity=1GiB", state_dir=state) as daemon:
            yield daemon
    finally:
        del os.environ["KVSTORED_FAILPOINTS"]


@functools.cache
def byte_code() -> dict[str, str]:
    """Variables with which a daemon starts from byte code, as an installed one does, even if this shell forbids it."""
    place = tempfile.TemporaryDirectory(prefix="kvbench-code-")
    atexit.register(place.cleanup)
    return {"PYTHONPYCACHEPREFIX": place.name, "PYTHONDONTWRITEBYTECODE": ""}


def _command(program: Sequence[str], directory: Path, state_dir: Path, settings: tuple[str, ...]) -> list[str]:
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    places = ["--socket-dir", str(directory / "run"), "--state-dir", str(state_dir)]
    return [sys.executable, *program, "serve", *places, *chosen]


@contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.settimeout(POLL_S)
        yield listener


def _wait_ready(child: subprocess.Popen[bytes], listener: socket.socket, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and child.poll() is None:
        try:
            if b"READY=1" in listener.recv(4096):
                return
        except TimeoutError:
            continue
    raise SystemExit(f"the daemon did not start (exit status {child.poll()}):\n{log.read_text()}")


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def model(block_bytes: int, name: str = "benchmark") -> Fingerprint:
    """A fingerprint whose blocks hold `block_bytes` of payload, a multiple of 256."""
    bytes_a_token = block_bytes // BLOCK_TOKENS // LAYERS
    return Fingerprint("benchmark", name, groups=(LayerGroup(0, "full", 0, tuple(range(LAYERS)), bytes_a_token),))


def tokens_of(conversation: int, blocks: int) -> npt.NDArray[np.int32]:
    """Token ids of a prefix of `blocks` blocks that no other conversation shares."""
    return np.arange(blocks * BLOCK_TOKENS, dtype=np.int32) + conversation * 1_000_000 % 2_000_000_000


def payloads(blocks: int, block_bytes: int) -> list[Bytes]:
    """Random bytes in memory that has been touched, so that reading them costs what reading costs."""
    every = np.random.default_rng(blocks).integers(0, 256, blocks * block_bytes, dtype=np.uint8)
    return list(every.reshape(blocks, block_bytes))


def shared_memory(nbytes: int) -> Bytes:
    """Shared memory that has been touched, as the slots of an arena are: pages of 4 KiB unless the system grants larger
    ones."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_SHARED), np.uint8)
    memory[:] = 1
    return memory
