"""The real daemon for tests: `kvstored serve` as a child process, small, in a directory of the test's own.

Owns the child: start, SIGKILL, SIGSTOP, restart on the same directories, and an orderly stop after which the NVMe
directory must pass `kvstored check`. Readiness comes over the sd_notify socket, so no test polls or sleeps.
Never does: stand in for any part of the daemon.
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
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc

import kvstore_client
from kvstore_client import Fingerprint, Session
from kvstore_client.testing import daemon as kit
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc
from tests.reference.conversations import model
from tests.reference.forked import ForkedProcess, popen
from tests.reference.held_memory import holder_pid

MIB = 1 << 20
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
RELEASE_S = 0.5  # of a lease that a client has closed, until the daemon has heard of it
PATIENCE_S = 60.0  # a machine that is short of time is no failure
SMALL = (
    "host.capacity=32MiB",
    "host.staging=8MiB",
    "host.arena=2MiB",
    "host.prefault=false",
    "host.warm_restart=off",
    "host.prefault_ahead=2MiB",
    "nvme.capacity=64MiB",
    "nvme.slab=4MiB",
    "nvme.io_threads=2",
    "limits.staging_per_client=2MiB",
    "limits.max_block=1MiB",
)


class DaemonDied(AssertionError):
    """The child ended before it was ready, or by itself; carries its exit status and its log."""


class RunningDaemon:
    """One daemon and its directories. `settings` are `--set` arguments. They and a `config` file win over `SMALL`."""

    def __init__(self, directory: Path, *settings: str, failpoints: str = "", config: Path | None = None) -> None:
        self.directory = directory
        self.socket_dir = directory / "run"
        self.state_dir = directory / "state"
        self.nvme_dir = self.state_dir / "nvme"
        self.settings = settings
        self.failpoints = failpoints
        self.config = config
        self.arguments: tuple[str, ...] = ()  # of `serve`, further ones
        self.as_a_command = False  # forked is quicker: see `forked`
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.is_spoilt = False  # set by a test that leaves a directory damaged on purpose

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def command(self) -> list[str]:
        file: list[str] = []
        small = list(SMALL)
        if self.config is not None:
            file = ["--config", str(self.config)]
            document = tomllib.loads(self.config.read_text())
            tables = [*document.items(), *((tier["name"], tier) for tier in document.get("tier", []))]
            said = {f"{section}.{key}" for section, table in tables if isinstance(table, dict) for key in table}
            small = [setting for setting in SMALL if setting.partition("=")[0] not in said]
        chosen = [argument for setting in (*small, *self.settings) for argument in ("--set", setting)]
        return [
            sys.executable, "-m", "kvstored", "serve",
            "--socket-dir", str(self.socket_dir), "--state-dir", str(self.state_dir), *file, *chosen, *self.arguments,
        ]  # fmt: skip

    def start(self) -> None:
        """Returns when the daemon says that it serves. Raises DaemonDied."""
        notify_path = self.directory / "notify"
        notify_path.unlink(missing_ok=True)
        environment = {**os.environ, "NOTIFY_SOCKET": str(notify_path), "KVSTORED_FAILPOINTS": self.failpoints}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(str(notify_path))
            listener.settimeout(0.1)
            with open(self.directory / "log", "ab") as log:
                start = subprocess.Popen if self.as_a_command else popen
                self.process = start(self.command(), env=environment, stdout=log, stderr=log)
            deadline = time.monotonic() + READY_TIMEOUT_S
            while time.monotonic() < deadline:
                try:
                    if b"READY=1" in listener.recv(4096):
                        return
                except TimeoutError:
                    if self.process.poll() is not None:
                        break
        raise DaemonDied(f"exit status {self.process.poll()} before ready:\n{self.log}")

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def wait_killed(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait for an armed failpoint to kill the daemon."""
        assert self.process is not None
        assert self.process.wait(timeout_s) == -signal.SIGKILL, self.log

    def restart(self, *, failpoints: str = "") -> None:
        """Start again on what the last one left behind; it must have ended already."""
        assert self.process is None or self.process.poll() is not None, "still running"
        self.failpoints = failpoints
        self.start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)  # returns once its last thread has stopped
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM; it must end with status 0, complain of nothing, and leave a directory without damage."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait(STOP_TIMEOUT_S)
        assert status == 0, f"exit status {status}:\n{self.log}"
        assert "Traceback" not in self.log, self.log
        assert not list(self.socket_dir.glob("*.sock")), "an orderly stop leaves no sockets"
        self.check()

    def check(self) -> None:
        """Walk the NVMe directory of a daemon that is not running."""
        if self.nvme_dir.is_dir():
            from kvstore_tiers.nvme.check import check_directory

            problems = check_directory(self.nvme_dir, verify_payloads=True)
            assert not problems, problems

    @contextmanager
    def admin(self) -> Iterator[Any]:
        """A stub of the Admin service: `stub.Tiers(admin_pb2.TiersRequest())`."""
        with grpc.insecure_channel(
            f"unix:{self.socket_dir}/admin.sock", options=(("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            yield admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]

    def ask(self, method: str, request: Any, timeout_s: float = PATIENCE_S) -> Any:
        with self.admin() as stub:
            return getattr(stub, method)(request, timeout=timeout_s)

    def status(self) -> admin_pb2.StatusReply:
        reply: admin_pb2.StatusReply = self.ask("Status", admin_pb2.StatusRequest())
        return reply

    def knows_its_state(self) -> bool:
        """Return whether the daemon, which serves before, has read its small state."""
        return bool(self.ask("State", admin_pb2.StateRequest()).is_read)

    def descriptors(self) -> int:
        """Return how many descriptors the daemon has open. One is its link to small state, from shortly after a start:
        wait until it `knows_its_state` before the first count.
        """
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def tiers(self) -> dict[str, admin_pb2.TierStatus]:
        return {tier.name: tier for tier in self.ask("Tiers", admin_pb2.TiersRequest()).tiers}

    def drop(self, tier: str, *, discard: bool = False) -> admin_pb2.DropReply:
        """Remove the copies that `tier` has, and return the totals of the calls.

        A block that is kept is dropped again for half a second: the release of a lease that a client has just closed
        may still be on its way.
        """
        request = admin_pb2.DropRequest(tier=tier, discard=discard)
        total: admin_pb2.DropReply = self.ask("Drop", request)
        ends = time.monotonic() + RELEASE_S
        while total.kept_blocks and time.monotonic() < ends:
            time.sleep(0.01)
            again: admin_pb2.DropReply = self.ask("Drop", request)
            total.dropped_blocks += again.dropped_blocks
            total.dropped_bytes += again.dropped_bytes
            total.written_back_blocks += again.written_back_blocks
            total.kept_blocks, total.only_copy_blocks = again.kept_blocks, again.only_copy_blocks
        return total

    def own_socket(self, tenant: str) -> Path:
        """The directory with the own socket of `tenant`."""
        return self.socket_dir / "tenants" / tenant

    def connect(self, fingerprint: Fingerprint | None = None, *, own: str = "", **options: Any) -> Session:
        """A session that insists on an answer and gives its puts time; staging small enough for many of them. With
        `own` it is at the own socket of that tenant."""
        place = self.own_socket(own) if own else self.socket_dir
        settings: dict[str, Any] = {"required": True, "deadline_s": 20.0, "connect_timeout_s": 30.0}
        settings["staging_bytes"] = 2 * MIB
        session = kvstore_client.connect(place, fingerprint=fingerprint or model(), **(settings | options))
        session.put = partial(session.put, deadline_s=PATIENCE_S)  # type: ignore[method-assign]
        return session


@contextmanager
def daemon_directory(prefix: str = "kvd-", parent: Path | None = None) -> Iterator[Path]:
    """Yield a fresh directory in `parent` with a short path (socket names are limited to 107 bytes), and remove it.

    Removal is tried again until the process of a killed daemon's small state, which writes on for a moment, has ended.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as directory:
        yield Path(directory)
    assert kit.eventually(lambda: not shutil.rmtree(directory, ignore_errors=True) and not os.path.exists(directory))


@contextmanager
def running_daemon(
    *settings: str, failpoints: str = "", config: Path | None = None, as_a_command: bool = False
) -> Iterator[RunningDaemon]:
    """A daemon in a fresh directory, stopped and checked."""
    with daemon_directory() as directory:
        daemon = RunningDaemon(directory, *settings, failpoints=failpoints, config=config)
        daemon.as_a_command = as_a_command
        with ended_with(daemon):
            daemon.start()
            yield daemon
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.stop()


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def connected_as(daemon: RunningDaemon, uid: int, fingerprint: Fingerprint) -> Iterator[Session]:
    """A session whose tenant is that user's: the kernel reports the effective uid at the time of connecting. Needs
    root, and directories that the user can pass."""
    os.seteuid(uid)
    try:
        session = daemon.connect(fingerprint)
    finally:
        os.seteuid(0)
    with session:
        yield session


@contextmanager
def ended_with(daemon: RunningDaemon) -> Iterator[None]:
    """However a test ends, its daemon ends with it, and who holds memory for the next one: other tests count what is
    free. After a test that passed, the directory has no damage."""
    passed = False
    try:
        yield
        passed = True
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill9()
        if (daemon.state_dir / "holder.sock").exists() and (holder := holder_pid(daemon.state_dir)):
            os.kill(holder, signal.SIGKILL)
        if passed and not daemon.is_spoilt:
            assert_no_damage(daemon.nvme_dir)


def assert_no_damage(nvme_dir: Path) -> None:
    """The walker's word on the NVMe directory of a daemon that ended somehow: a crash leaves leftovers, no damage."""
    if (nvme_dir / "slabs").is_dir():
        from kvstore_tiers.nvme.check import Severity, check_directory

        assert [str(f) for f in check_directory(nvme_dir) if f.severity is Severity.DAMAGE] == []


def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Return whether `condition` comes true within `timeout_s`."""
    return kit.eventually(condition, timeout_s)
