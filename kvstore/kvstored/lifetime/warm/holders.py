"""Holders of descriptors while there is no daemon: systemd's file-descriptor store, or the holder process.

The module owns the choice, and both ways of keeping: FDSTORE=1 messages, and $LISTEN_FDS at the start; or the
connection to a holder (see `holder`), its start and its end. It does not know what a descriptor is. It waits for an
answer of a holder only at the start; a holder that gives none is given up, with its socket's file. Invariant: systemd
never has two of the daemon's descriptors under one name.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import select
import socket
import subprocess
import sys
from pathlib import Path

from kvstore_tiers.arena_memory import empty_memory
from kvstore_tiers.base import CANNOT_WRITE
from kvstore_tiers.child_processes import is_of_our_user, receive_packet, send_packet, variables_of_children
from kvstored.lifetime.holder import BACKLOG, MAX_DESCRIPTORS
from kvstored.lifetime.notify import (
    notify_about,
    offers_descriptor_store,
    store_is_preserved,
    store_limit,
    stored_descriptors,
    wait_for_manager,
)
from kvstored.lifetime.warm.descriptor_holder import DescriptorHolder, HolderError
from kvstored.process import file_identity

log = logging.getLogger(__name__)
HOLDER_SERVICE = "KVSTORED_HOLDER"  # in the environment: the socket of kvstored-holder.service
HOLDER_SOCKET = "holder.sock"
_ANSWER_TIMEOUT_S = 10.0
_OWN_DESCRIPTORS = 32  # the holder's sockets and what Python opens
_NOT_NOW = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)  # it is there, and behind


class ProcessHolder(DescriptorHolder):
    """A keeper of descriptors in another process, which runs `kvstored.lifetime.holder` and is started if none answers
    at its socket. With `service`, the name of its socket, it is a service of its own and is never started here."""

    name = "holder"

    def __init__(self, directory: Path, linger_s: float, *, may_start: bool = True, service: str = "") -> None:
        super().__init__(_holder_limit())
        self.is_service = bool(service)
        may_start = may_start and not service
        self._linger_s = linger_s
        self._may_start = may_start
        try:
            self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise HolderError(f"{directory}: {error.strerror}") from None
        self._path = directory / (service or HOLDER_SOCKET)
        self._process: subprocess.Popen[bytes] | None = None
        connection = self._connect()
        if connection is None:
            if not may_start:
                os.close(self._directory)
                raise HolderError("nothing answers there")
            connection = self._start()
        self._socket = connection
        self._socket.setblocking(False)
        self._say(b"S%d" % round(linger_s))

    @property
    def after_stop(self) -> str:
        if self.is_service:
            return "the holder service keeps DRAM for the next start"
        if os.environ.get("NOTIFY_SOCKET"):
            return (
                "DRAM is lost: the service manager ends the holder together with this unit; kvstored-holder.service "
                "would keep it"
            )
        return f"the holder keeps DRAM for the next start, {self._linger_s:.0f} s long"

    def reopen(self) -> None:
        with self._sending:
            self._wanted.clear()
            self._kept.clear()
            self._socket.close()
            connection = self._connect()
            if connection is None:
                if not self._may_start:
                    raise HolderError("the holder service does not answer")
                connection = self._start()
            self._socket = connection
            self._socket.setblocking(False)
            self.lost = False
            self._say(b"S%d" % round(self._linger_s))

    def fetch(self) -> dict[str, int]:
        found: dict[str, int] = {}
        if self._process is not None:
            return found  # it is new, and loads its modules still
        self._socket.settimeout(_ANSWER_TIMEOUT_S)
        try:
            self._socket.send(b"L")
            while (answer := receive_packet(self._socket, 128))[0] != b"E":
                packet, descriptors = answer
                if packet[:1] != b"F" or not descriptors:
                    raise ConnectionError("it stopped in the middle" if not packet else "out of descriptors")
                found[packet[1:].decode(errors="replace")] = descriptors[0]
        except OSError as error:
            log.warning("the holder of the memory does not answer (%s): going on without what it has not given", error)
            self._replace(found)
        else:
            self._kept.update(found)
            self._socket.setblocking(False)
        return found

    def _replace(self, found: dict[str, int]) -> None:
        """Give up a holder that does not answer, which ends with its socket's file; a new one keeps the descriptors it
        gave.
        """
        self._socket.setblocking(False)
        self._quit()
        self.lost = True
        if not self._may_start:
            return
        with contextlib.suppress(HolderError):  # then `reopen` is due still
            self.reopen()
            for name, descriptor in found.items():
                self.keep(name, descriptor)

    def retry(self) -> list[str]:
        if self._socket.fileno() < 0:  # `reopen` did not succeed
            self.lost = True
            return []
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
        self._forget_late()
        if forget:
            self._quit()
        else:
            self.settle()
        self._socket.close()
        os.close(self._directory)
        if self._process is not None and self._process.poll() is None:
            self._process.returncode = 0  # it is meant to outlive us: Popen is not to complain of that

    def _quit(self) -> None:
        """Let the holder drop everything and end; one that does not listen ends when it misses its file. A service
        stays.
        """
        self._say(b"Q")
        if not self.is_service:
            with contextlib.suppress(OSError):  # on a file system that cannot be written: nothing answers there
                self._path.unlink(missing_ok=True)

    def _say(self, packet: bytes, descriptor: int = -1) -> bool:
        try:
            send_packet(self._socket, packet, [] if descriptor < 0 else [descriptor], socket.MSG_DONTWAIT)
        except OSError as error:
            self.lost = self.lost or error.errno not in _NOT_NOW
            return False
        return True

    def _near_path(self) -> str:
        """Return the socket's path by way of a descriptor of its directory: paths of sockets are limited to 107
        bytes.
        """
        return f"/proc/self/fd/{self._directory}/{self._path.name}"

    def _connect(self) -> socket.socket | None:
        """Return a connection to the holder of a former daemon; None if there is none, or if another user listens
        there, who would get every arena.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            connection.connect(self._near_path())
            if is_of_our_user(connection):
                return connection
        except OSError:
            pass
        connection.close()
        return None

    def _start(self) -> socket.socket:
        """Listen, start a new process to answer, and connect; nothing waits until that process runs."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._path.unlink(missing_ok=True)  # of a holder that died: one that lives had answered
            listener.bind(self._near_path())
            os.chmod(self._near_path(), 0o600)
            listener.listen(BACKLOG)
            # Read here: when it has loaded its modules, the file may be another holder's.
            device, inode = file_identity(self._near_path()) or (0, 0)
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "kvstored.lifetime.holder", "--listen", str(listener.fileno()),
                    "--file", f"{device}:{inode}", "--path", self._path,
                ],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
                env=variables_of_children(), pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise HolderError(
                f"no holder for warm restarts can be started: {self._path}: {error.strerror or error}; "
                'set host.warm_restart = "off" to do without',
                is_for_want_of_room=error.errno in CANNOT_WRITE,
            ) from None
        finally:
            listener.close()
        connection = self._connect()
        if connection is None:
            raise HolderError(
                'the holder for warm restarts does not answer; set host.warm_restart = "off" to do without'
            )
        return connection


def _holder_limit() -> int:
    """Return how many descriptors the holder may open, as many as the daemon; the kernel silently drops further
    ones.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MAX_DESCRIPTORS if hard < 0 else max(0, min(MAX_DESCRIPTORS, hard - _OWN_DESCRIPTORS))


class SystemdHolder(DescriptorHolder):
    """A keeper of descriptors in systemd's descriptor store: it sends them by FDSTORE=1 and FDNAME on $NOTIFY_SOCKET,
    and gets them back in $LISTEN_FDS at the start. See sd_pid_notify_with_fds(3)."""

    name = "systemd"

    def __init__(self) -> None:
        super().__init__(store_limit())

    @property
    def after_stop(self) -> str:
        if store_is_preserved():
            return "systemd keeps DRAM for the next start of the unit"
        return (
            "DRAM is kept over a restart and lost with a stop: this systemd empties its store of descriptors when the "
            "unit stops; kvstored-holder.service would keep it"
        )

    def fetch(self) -> dict[str, int]:
        found = stored_descriptors()
        self._kept.update(found)
        return found

    def _send(self, name: str, descriptor: int) -> bool:
        if descriptor < 0:
            return notify_about([], "FDSTOREREMOVE=1", f"FDNAME={name}")
        if name in self._kept:  # a manager does not replace: it would hand out both
            if not notify_about([], "FDSTOREREMOVE=1", f"FDNAME={name}"):
                return False
            self._kept.discard(name)
        # Memory has nothing to poll for, and a manager that polls it would find an error there and drop it.
        return notify_about([descriptor], "FDSTORE=1", f"FDNAME={name}", "FDPOLL=0")

    def close(self, *, forget: bool) -> None:
        self._forget_late()
        self.settle()
        wait_for_manager()


def dismiss_others(holder: DescriptorHolder | None, state_dir: Path) -> None:
    """Free the memory that an earlier daemon left with any other keeper of descriptors than `holder`, which this daemon
    uses."""
    if not isinstance(holder, SystemdHolder):
        for name, descriptor in stored_descriptors().items():
            empty_memory(descriptor)
            os.close(descriptor)
            notify_about([], "FDSTOREREMOVE=1", f"FDNAME={name}")
    is_in_use = isinstance(holder, ProcessHolder) and not holder.is_service
    if not is_in_use and (state_dir / HOLDER_SOCKET).is_socket():
        try:
            unused = ProcessHolder(state_dir, 0.0, may_start=False)
        except HolderError:
            return
        for descriptor in unused.fetch().values():
            empty_memory(descriptor)
            os.close(descriptor)
        unused.close(forget=True)


def choose_holder(mode: str, state_dir: Path, linger_s: float) -> DescriptorHolder | None:
    """Return the keeper of descriptors for the setting `host.warm_restart` (`mode`). Return None for "off", and when
    the state directory has no room for its socket. Raises HolderError.

    "auto" is the holder that runs as a service of its own, if $KVSTORED_HOLDER names its socket and it answers;
    otherwise systemd, if the unit has a store; otherwise a holder that the daemon starts.
    """
    if mode == "off":
        return None
    service = os.environ.get(HOLDER_SERVICE, "")
    if mode == "auto" and service:
        try:
            return ProcessHolder(Path(service).parent, linger_s, service=Path(service).name)
        except HolderError as error:
            log.warning("the holder service at %s is not used: %s", service, error)
    if mode == "systemd" and not os.environ.get("NOTIFY_SOCKET"):
        raise HolderError(
            'host.warm_restart = "systemd", but no service manager started this daemon (no NOTIFY_SOCKET): '
            'start it by its unit, or set host.warm_restart = "holder"'
        )
    offers_store = bool(os.environ.get("NOTIFY_SOCKET")) and offers_descriptor_store()
    if mode == "systemd" or (mode == "auto" and offers_store):
        return SystemdHolder()
    try:
        return ProcessHolder(state_dir, linger_s)
    except HolderError as error:
        if mode == "holder" and not error.is_for_want_of_room:
            raise
        log.warning("blocks in memory will not survive a restart: %s", error)
        return None
