"""A real daemon for the suite: `python -m kvstored serve` as a child process, small, in a directory of its own.

Owns the child: start, SIGKILL, SIGSTOP, start again on the same directories, damage to its files. Never does: stand in
for any part of the daemon, or import it (the two towers meet in proto alone).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from kvstore_proto.arena import ALIGNMENT_BYTES, HEADER_BYTES, MAGIC, read_header
from kvstore_proto.fingerprint import Fingerprint, parse_fingerprint
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc
from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
ADMIN_TIMEOUT_S = 30.0
PATIENCE_S = 15.0  # less than a lease lives, which a case may wait to see released
SMALL = (
    "host.capacity=32MiB",
    "host.staging=8MiB",
    "host.arena=2MiB",
    "host.prefault=false",
    "host.warm_restart=off",
    "nvme.capacity=64MiB",
    "nvme.slab=4MiB",
    "nvme.io_threads=2",
    "limits.staging_per_client=4MiB",
)


class DaemonFailed(AssertionError):
    """The error of a daemon under test that could not be started, or exited with an error. The message includes the
    daemon's log.
    """


class DaemonProcess:
    """A small real daemon in a child process, with a temporary directory, for tests: `with DaemonProcess() as daemon:`.
    `settings` are `--set` arguments of kvstored, which override `SMALL`. `config` is the text of a configuration
    file. `failpoints` says where and how the daemon must fail (its KVSTORED_FAILPOINTS).
    """

    def __init__(self, *settings: str, config: str = "", failpoints: str = "") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvt-"))  # short: names of sockets are limited to 107 bytes
        self.socket_dir = self.directory / "run"
        self.state_dir = self.directory / "state"
        self._settings = settings
        self._config = config
        self._failpoints = failpoints
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start the daemon and wait until it serves. After `kill` it continues with the directories of the killed
        daemon. Raises DaemonFailed.
        """
        command = [sys.executable, "-m", "kvstored", "serve"]
        command += ["--socket-dir", str(self.socket_dir), "--state-dir", str(self.state_dir)]
        if self._config:
            config = self.directory / "kvstored.toml"
            config.write_text(self._config)
            command += ["--config", str(config)]
        command += [argument for setting in (*SMALL, *self._settings) for argument in ("--set", setting)]
        notify_path = self.directory / "notify"
        notify_path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener, open(self.directory / "log", "ab") as log:
            listener.bind(str(notify_path))
            listener.settimeout(0.1)
            environment = {
                **os.environ, "NOTIFY_SOCKET": str(notify_path), "KVSTORED_FAILPOINTS": self._failpoints
            }  # fmt: skip
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            deadline = time.monotonic() + READY_TIMEOUT_S
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    if b"READY=1" in listener.recv(4096):
                        return
                except TimeoutError:
                    continue
        raise DaemonFailed(f"`{' '.join(command)}` is not ready (exit status {self._process.poll()}):\n{self.log}")

    def kill(self) -> None:
        """Kill the daemon with SIGKILL."""
        assert self._process is not None, "not started"
        self._process.kill()
        self._process.wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the daemon by SIGSTOP inside the `with` block. Connections to its sockets succeed, but it answers
        nothing.
        """
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)  # returns once its last thread has stopped
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the daemon with SIGTERM. Raises DaemonFailed if its exit status is not 0 or it logged a traceback."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        if self._process.wait(STOP_TIMEOUT_S) != 0 or "Traceback" in self.log:
            raise DaemonFailed(f"exit status {self._process.returncode}:\n{self.log}")

    def status(self) -> admin_pb2.StatusReply:
        with self._admin() as admin:
            reply: admin_pb2.StatusReply = admin.Status(admin_pb2.StatusRequest(), timeout=ADMIN_TIMEOUT_S)
            return reply

    def counter(self, name: str) -> int:
        return int(self.status().counters[name])

    def drop_host(self) -> admin_pb2.DropReply:
        """Have the daemon write the blocks in DRAM to NVMe and remove them from DRAM. Leased blocks stay. Return its
        reply.
        """
        with self._admin() as admin:
            reply: admin_pb2.DropReply = admin.Drop(admin_pb2.DropRequest(tier="host"), timeout=ADMIN_TIMEOUT_S)
            return reply

    def drop_all(self) -> admin_pb2.DropReply:
        """Have the daemon remove all blocks from every tier, except the leased ones. Return its reply."""
        with self._admin() as admin:
            request = admin_pb2.DropRequest(all=True, discard=True)
            reply: admin_pb2.DropReply = admin.Drop(request, timeout=ADMIN_TIMEOUT_S)
            return reply

    def flush(self) -> None:
        """Have the daemon write to NVMe all blocks that wait to be written there, and wait until they are stored."""
        with self._admin() as admin:
            admin.Flush(admin_pb2.FlushRequest(timeout_ms=int(ADMIN_TIMEOUT_S * 1000)), timeout=ADMIN_TIMEOUT_S)

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint under which blocks are stored in the daemon. Raises ValueError unless there is exactly
        one.
        """
        with self._admin() as admin:
            reply: ExplainReply = admin.Explain(ExplainRequest(), timeout=ADMIN_TIMEOUT_S)
        (only,) = reply.fingerprints
        return parse_fingerprint(only.canonical.encode())

    def damage_on_disk(self, depth: int, group: int | None = None) -> int:
        """Flip one payload byte of every block on NVMe that has `depth` blocks before it in its chain. With `group`,
        only blocks of that layer group are damaged. Return the number of damaged blocks.
        """
        damaged = 0
        for slab in sorted((self.state_dir / "nvme").rglob("*.slab")):
            with open(slab, "r+b", buffering=0) as file:
                for offset in range(0, slab.stat().st_size - HEADER_BYTES, ALIGNMENT_BYTES):
                    raw = os.pread(file.fileno(), HEADER_BYTES, offset)
                    if raw[:4] != MAGIC:
                        continue
                    header = read_header(raw)
                    if isinstance(header, str) or header.depth != depth or group not in (None, header.group):
                        continue
                    position = offset + HEADER_BYTES + header.payload_bytes // 2
                    byte = os.pread(file.fileno(), 1, position)[0]
                    os.pwrite(file.fileno(), bytes([byte ^ 0x10]), position)
                    damaged += 1
                os.fsync(file.fileno())
        return damaged

    @contextmanager
    def _admin(self) -> Iterator[admin_pb2_grpc.AdminStub]:
        options = (("grpc.use_local_subchannel_pool", 1),)
        with grpc.insecure_channel(f"unix:{self.socket_dir}/admin.sock", options=options) as channel:
            yield admin_pb2_grpc.AdminStub(channel)

    def __enter__(self) -> DaemonProcess:
        try:
            self.start()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self.stop()
        finally:
            self._clean()

    def _clean(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Wait until `condition()` is True. It is called often at first, then ten times a second. Return False if it was
    not True within `timeout_s` seconds.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.1)  # asking costs the daemon more than waiting does
    return True
