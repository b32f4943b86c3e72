"""Who keeps descriptors while there is no daemon: systemd's file-descriptor store, or the holder process.

Owns the two ways of handing a descriptor over by name and of getting all of them back at the start. Never knows what a
descriptor is. Never waits for the other side after the start: what cannot be sent at once is sent again later
(`retry`), and only if it is still wanted then.
Invariant: whatever `keep` was called for and not `drop`ped is there for the next process, or `unkept` counts it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from pathlib import Path

from kvstore_tiers.arena import empty_memory
from kvstored.notify import notify_about, stored_descriptors, wait_for_manager
from kvstored.passing import receive_packet, send_packet

log = logging.getLogger(__name__)
HOLDER_SOCKET = "holder.sock"
_ANSWER_TIMEOUT_S = 10.0
_BACKLOG = 4
_FOR_MANAGER_ONLY = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


class KeeperError(Exception):
    """Descriptors cannot be kept; the message says why and what to do."""


class Keeper(ABC):
    """Keeps descriptors under names. Any thread may call `keep` and `drop`."""

    name: str

    def __init__(self) -> None:
        self.lost = False  # whoever kept them has gone: `reopen`, and keep everything again
        self._sending = threading.Lock()
        self._wanted: dict[str, int] = {}  # not sent yet: name -> descriptor, -1 for a drop

    @abstractmethod
    def fetch(self) -> dict[str, int]:
        """What the process before had kept, once, before anything else. The descriptors are the caller's."""

    @abstractmethod
    def _send(self, name: str, descriptor: int) -> bool:
        """Hand over a descriptor, or with -1 drop one. False when that cannot be done now."""

    @abstractmethod
    def close(self, *, forget: bool) -> None:
        """The daemon ends. With `forget` nothing stays behind."""

    def reopen(self) -> None:  # noqa: B027  # a service manager is never lost
        """Begin anew after `lost`, with nothing kept. Raises KeeperError."""

    def keep(self, name: str, descriptor: int) -> bool:
        """Whether it is kept from now on; else `retry` will try again. The caller's descriptor stays his, and open."""
        return self._try(name, descriptor)

    def drop(self, name: str) -> None:
        self._try(name, -1)

    def retry(self) -> list[str]:
        """Send what could not be sent; names that are kept only now."""
        with self._sending:
            done = []
            for name, descriptor in list(self._wanted.items()):
                if not self._send(name, descriptor):
                    break
                del self._wanted[name]
                if descriptor >= 0:
                    done.append(name)
            return done

    @property
    def unkept(self) -> int:
        return len(self._wanted)

    def _try(self, name: str, descriptor: int) -> bool:
        with self._sending:
            if not self._wanted and self._send(name, descriptor):
                return True
            self._wanted.pop(name, None)
            self._wanted[name] = descriptor
            return False


class SystemdKeeper(Keeper):
    """FDSTORE=1, FDNAME and SCM_RIGHTS on $NOTIFY_SOCKET; at the start, $LISTEN_FDS. See sd_pid_notify_with_fds(3)."""

    name = "systemd"

    def fetch(self) -> dict[str, int]:
        return stored_descriptors()

    def _send(self, name: str, descriptor: int) -> bool:
        if descriptor < 0:
            return notify_about([], "FDSTOREREMOVE=1", f"FDNAME={name}")
        # Memory has nothing to poll for, and a manager that polls it would find an error there and drop it.
        return notify_about([descriptor], "FDSTORE=1", f"FDNAME={name}", "FDPOLL=0")

    def close(self, *, forget: bool) -> None:
        self.retry()
        wait_for_manager()


class HolderKeeper(Keeper):
    """The process of `kvstored.holder`, which is started when nobody answers at its socket."""

    name = "holder"

    def __init__(self, directory: Path, linger_s: float, *, may_start: bool = True) -> None:
        super().__init__()
        self._linger_s = linger_s
        self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._path = directory / HOLDER_SOCKET
        self._process: subprocess.Popen[bytes] | None = None
        connection = self._connect()
        if connection is None:
            if not may_start:
                os.close(self._directory)
                raise KeeperError("there is no holder")
            connection = self._start()
        self._socket = connection
        self._socket.setblocking(False)
        self._say(b"S%d" % round(linger_s))

    def reopen(self) -> None:
        with self._sending:
            self._wanted.clear()
            self._socket.close()
            self._socket = self._connect() or self._start()
            self._socket.setblocking(False)
            self.lost = False
            self._say(b"S%d" % round(self._linger_s))

    def fetch(self) -> dict[str, int]:
        found: dict[str, int] = {}
        self._socket.settimeout(_ANSWER_TIMEOUT_S)
        try:
            self._socket.send(b"L")
            while True:
                packet, descriptors = receive_packet(self._socket, 128)
                if packet[:1] != b"F" or not descriptors:
                    break
                found[packet[1:].decode(errors="replace")] = descriptors[0]
        except OSError as error:
            log.warning("the holder of the memory does not answer (%s): starting without what it holds", error)
        self._socket.setblocking(False)
        return found

    def retry(self) -> list[str]:
        hangup = select.poll()
        hangup.register(self._socket, select.POLLRDHUP)
        if hangup.poll(0):
            self.lost = True
        return super().retry()

    def _send(self, name: str, descriptor: int) -> bool:
        if descriptor < 0:
            return self._say(b"D" + name.encode())
        return self._say(b"K" + name.encode(), descriptor)

    def close(self, *, forget: bool) -> None:
        self.retry()
        if forget:
            self._say(b"Q")
        self._socket.close()
        os.close(self._directory)
        if self._process is not None and self._process.poll() is None:
            self._process.returncode = 0  # it is meant to outlive us: Popen is not to complain of that

    def _say(self, packet: bytes, descriptor: int = -1) -> bool:
        try:
            send_packet(self._socket, packet, [] if descriptor < 0 else [descriptor], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            self.lost = True
            return False
        return True

    def _near_path(self) -> str:
        """The socket by way of our descriptor of its directory: paths of sockets are limited to 107 bytes."""
        return f"/proc/self/fd/{self._directory}/{HOLDER_SOCKET}"

    def _connect(self) -> socket.socket | None:
        """A connection to the holder of a former daemon; None when there is none."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            connection.connect(self._near_path())
        except OSError:
            connection.close()
            return None
        return connection

    def _start(self) -> socket.socket:
        """Listen, let a new process answer, and connect: nothing waits until that process runs."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._path.unlink(missing_ok=True)  # of a holder that died: one that lives had answered
            listener.bind(self._near_path())
            os.chmod(self._near_path(), 0o600)
            listener.listen(_BACKLOG)
            environment = {key: value for key, value in os.environ.items() if key not in _FOR_MANAGER_ONLY}
            environment.pop("KVSTORED_FAILPOINTS", None)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstored.holder", "--listen", str(listener.fileno()), "--path", self._path],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
                env=environment, pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise KeeperError(
                f"no holder for warm restarts can be started: {error.strerror or error}; "
                'set host.warm_restart = "off" to do without'
            ) from None
        finally:
            listener.close()
        connection = self._connect()
        if connection is None:
            raise KeeperError(
                'the holder for warm restarts does not answer; set host.warm_restart = "off" to do without'
            )
        return connection


def dismiss_others(keeper: Keeper | None, state_dir: Path) -> None:
    """Give back what a process before left with a keeper that is not used any more."""
    if not isinstance(keeper, SystemdKeeper):
        for name, descriptor in stored_descriptors().items():
            empty_memory(descriptor)
            os.close(descriptor)
            notify_about([], "FDSTOREREMOVE=1", f"FDNAME={name}")
    if not isinstance(keeper, HolderKeeper) and (state_dir / HOLDER_SOCKET).is_socket():
        try:
            unused = HolderKeeper(state_dir, 0.0, may_start=False)
        except KeeperError:
            return
        for descriptor in unused.fetch().values():
            empty_memory(descriptor)
            os.close(descriptor)
        unused.close(forget=True)


def choose_keeper(mode: str, state_dir: Path, linger_s: float) -> Keeper | None:
    """The keeper that `host.warm_restart` names; None for "off". Raises KeeperError.

    "auto" is systemd where it offers a store ($FDSTORE, systemd 254), else the holder.
    """
    if mode == "off":
        return None
    if mode == "systemd" and not os.environ.get("NOTIFY_SOCKET"):
        raise KeeperError(
            'host.warm_restart = "systemd", but no service manager started this daemon (no NOTIFY_SOCKET): '
            'start it by its unit, or set host.warm_restart = "holder"'
        )
    offers_store = bool(os.environ.get("NOTIFY_SOCKET")) and os.environ.get("FDSTORE", "0") != "0"
    if mode == "systemd" or (mode == "auto" and offers_store):
        return SystemdKeeper()
    try:
        return HolderKeeper(state_dir, linger_s)
    except KeeperError as error:
        if mode == "holder":
            raise
        log.warning("what is in DRAM will not survive a restart: %s", error)
        return None
