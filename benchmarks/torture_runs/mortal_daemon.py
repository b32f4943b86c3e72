"""A real daemon that is killed again and again on the same directories.

Owns the child `kvstored serve`, its directories, and how it is started: the daemon reports readiness over the
sd_notify socket, so its parent does not poll. Takes the size of its directory and of the shared memory it holds from
the kernel, not from the daemon.
Never tunes the daemon beyond the settings it is given.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import IO, Any

import grpc

import kvstore_client
from kvstore_client import Fingerprint, Session
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc
from torture_runs.child_process import end_child, kill_naming, start_child
from torture_runs.forked_daemon import ForkedDaemon

SETTINGS_ENVIRONMENT = "KVSTORED_TORTURE_SETTINGS"
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


def further_settings() -> tuple[str, ...]:
    """Return what `--set` says for every daemon of this run."""
    return tuple(os.environ.get(SETTINGS_ENVIRONMENT, "").split())


def knows_setting(setting: str) -> bool:
    """Return whether this version has SECTION.KEY=value at all, by its own reference."""
    section, _, key = setting.partition("=")[0].partition(".")
    reference = tomllib.loads(resources.files("kvstored.config").joinpath("reference.toml").read_text())
    tiers = {tier["name"]: tier for tier in reference.get("tier", [])}
    return key in (reference | tiers).get(section, {})


class DaemonFailed(RuntimeError):
    """A daemon ended by itself, or never served; the error carries the end of its log."""


class MortalDaemon:
    """One daemon and its directories, `directory`/run and `directory`/state."""

    def __init__(self, directory: Path, *settings: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.socket_dir = directory / "run"
        self.state_dir = directory / "state"
        self.nvme_dir = self.state_dir / "nvme"
        self.settings = (*settings, *further_settings())
        self.process: subprocess.Popen[Any] | ForkedDaemon | None = None
        self.is_forked = False  # the next start, from a process that has imported it; else as the command

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, failpoints: str = "", *, patience_s: float = READY_TIMEOUT_S) -> bool:
        """Start the daemon, and return whether it serves; False when a failpoint killed it before, or `patience_s` is
        over.

        Raises DaemonFailed when it ended any other way.
        """
        notify_path = self.directory / "notify"
        notify_path.unlink(missing_ok=True)
        environment = {"NOTIFY_SOCKET": str(notify_path), "KVSTORED_FAILPOINTS": failpoints}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(str(notify_path))
            with open(self.directory / "log", "wb") as log:
                self.process = self._start(environment, log)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                listener.settimeout(max(0.001, min(0.02, deadline - time.monotonic())))
                try:
                    if b"READY=1" in listener.recv(4096):
                        return True
                except TimeoutError:
                    if self.process.poll() is not None:
                        break
        if self.process.poll() is None and patience_s < READY_TIMEOUT_S:
            return False
        if self.process.poll() == -signal.SIGKILL and failpoints:
            return False
        raise DaemonFailed(f"exit status {self.process.poll()} before it served\n{self.log}")

    def _start(self, environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[Any] | ForkedDaemon:
        if self.is_forked:
            return ForkedDaemon(self.arguments(), environment, log)
        return start_child(self.command(), environment=environment, stdout=log, stderr=log)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "kvstored", *self.arguments()]

    def arguments(self) -> list[str]:
        chosen = [argument for setting in self.settings for argument in ("--set", setting)]
        return ["serve", "--socket-dir", str(self.socket_dir), "--state-dir", str(self.state_dir), *chosen]

    def kill9(self) -> None:
        """Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wait_killed(self, patience_s: float) -> bool:
        """Return whether the daemon was killed (by a failpoint) in time. Raises DaemonFailed when it ended any other
        way.
        """
        assert self.process is not None
        try:
            status = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        if status != -signal.SIGKILL:
            raise DaemonFailed(f"unexpected exit status {status}\n{self.log}")
        return True

    def stop(self) -> int:
        """An orderly stop; its exit status (-9 where a failpoint killed it meanwhile)."""
        assert self.process is not None
        self.process.terminate()
        try:
            return int(self.process.wait(STOP_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            self.kill9()
            raise DaemonFailed(f"SIGTERM did not end it in {STOP_TIMEOUT_S} s\n{self.log}") from None

    def end_leftovers(self) -> None:
        """End the process that outlives the daemon on purpose, to keep its memory for the next one."""
        kill_naming(self.directory, b"\0-m\0kvstored")

    def close(self) -> None:
        if self.process is not None:
            end_child(self.process, 0)
        self.end_leftovers()

    def __enter__(self) -> MortalDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is known of it -----------------------------------------------------------------------------------------

    def admin(self, method: str, request: Any, timeout_s: float = 30.0) -> Any:
        """One call of the Admin service."""
        target, options = f"unix:{self.socket_dir}/admin.sock", (("grpc.use_local_subchannel_pool", 1),)
        with grpc.insecure_channel(target, options=options) as channel:
            return getattr(admin_pb2_grpc.AdminStub(channel), method)(request, timeout=timeout_s)

    def tiers(self) -> dict[str, admin_pb2.TierStatus]:
        return {tier.name: tier for tier in self.admin("Tiers", admin_pb2.TiersRequest()).tiers}

    def drop_host(self) -> None:
        """Empty the host tier; what NVMe holds stays there."""
        self.admin("Drop", admin_pb2.DropRequest(tier="host"))

    def connect(self, fingerprint: Fingerprint, **options: Any) -> Session:
        """A session that insists on an answer."""
        settings: dict[str, Any] = {"required": True, "deadline_s": 20.0, "connect_timeout_s": 10.0}
        settings["staging_bytes"] = 1 << 20
        return kvstore_client.connect(self.socket_dir, fingerprint=fingerprint, **(settings | options))

    def connect_as(self, tenant: str, fingerprint: Fingerprint) -> Session:
        """A session at the tenant's own socket."""
        return kvstore_client.connect(
            self.own_socket(tenant), fingerprint=fingerprint, required=True, deadline_s=20.0, connect_timeout_s=60.0,
            staging_bytes=1 << 20,
        )  # fmt: skip

    @property
    def whole_log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def own_socket(self, tenant: str) -> Path:
        return self.socket_dir / "tenants" / tenant

    def anonymous_bytes(self) -> int:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    def descriptors(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def disk_bytes(self) -> int:
        """Return the bytes of the NVMe directory, every file in it at the larger of its length and its blocks."""
        total = 0
        for path in self.nvme_dir.rglob("*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if path.is_file():
                total += max(status.st_size, status.st_blocks * 512)
        return total

    def shared_memory_bytes(self) -> int:
        """Return the bytes of the daemon's memfds by the kernel's account; 0 when it has ended."""
        assert self.process is not None
        total, seen = 0, set()
        folder = Path(f"/proc/{self.process.pid}/fd")
        try:
            names = list(folder.iterdir())
        except OSError:
            return 0
        for path in names:
            try:
                if os.readlink(path).startswith("/memfd:"):
                    status = path.stat()
                    if status.st_ino not in seen:
                        seen.add(status.st_ino)
                        total += status.st_blocks * 512
            except OSError:
                continue
        return total
