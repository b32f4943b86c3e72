"""The part of a service manager that kvstored talks to: a notify socket that takes descriptors, and starts with them.

What systemd does by sd_notify(3) and sd_listen_fds(3), in a test: descriptors of FDSTORE=1 messages are really received
and kept, FDSTOREREMOVE=1 drops them, and the next start finds them from number 3 up. As systemd does, it stores what
comes under a name that is taken beside the other, hands out the newest first, and closes what is over its limit.
Never does: stand in for the daemon.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

_HIGH = 500  # above the numbers that the descriptors will get
# Puts the descriptors where they belong and becomes the daemon under the same pid, which is what LISTEN_PID must say.
_LAUNCH = """
import os, sys
given = [int(number) for number in sys.argv[1].split()]
for number, descriptor in enumerate(given, 3):
    os.dup2(descriptor, number)
os.environ["LISTEN_PID"] = str(os.getpid())
os.closerange(500, 1000)
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServiceManager:
    """`with ServiceManager(directory) as manager: manager.start(command, log)`."""

    def __init__(self, directory: Path, limit: int = 64) -> None:
        self.limit = limit
        self._path = directory / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))
        self._reader = threading.Thread(target=self._read)
        self._closing = False
        self.stored: list[tuple[str, int]] = []
        self.ready = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str], log: Path, *, offers_store: bool = True) -> None:
        """Start the service with what is stored, and return when it is ready."""
        self.ready.clear()
        environment = {**os.environ, "NOTIFY_SOCKET": str(self._path)}
        for name in ("LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "FDSTORE"):
            environment.pop(name, None)
        if offers_store:
            environment["FDSTORE"] = str(self.limit)
        count = len(self.stored)
        if count:
            environment |= {"LISTEN_FDS": str(count), "LISTEN_FDNAMES": ":".join(name for name, _ in self.stored)}
        passed = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for _, descriptor in self.stored]
        launch = [sys.executable, "-S", "-c", _LAUNCH, " ".join(map(str, passed))]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*launch, *command], env=environment, stdout=output, stderr=output, pass_fds=passed
            )
        for descriptor in passed:
            os.close(descriptor)
        assert self.ready.wait(60.0), log.read_text()

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self._catch_up()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        status = self.process.wait(60)
        self._catch_up()
        return status

    def names(self) -> list[str]:
        self._catch_up()
        return sorted(name for name, _ in self.stored)

    def forget(self) -> None:
        """Forget descriptors as systemd does at `systemctl stop`."""
        for _, descriptor in self.stored:
            os.close(descriptor)
        self.stored.clear()

    def _catch_up(self) -> None:
        """Return when all is read that was sent until now: a barrier of our own."""
        here, there = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(str(self._path))
            socket.send_fds(sender, [b"BARRIER=1"], [there])
        os.close(there)
        os.read(here, 1)
        os.close(here)

    def __enter__(self) -> ServiceManager:
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill9()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            self._closing = True
            waker.sendto(b"", str(self._path))
        self._reader.join()
        self._socket.close()
        self.forget()

    def _read(self) -> None:
        while not self._closing:
            message, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(16 * 4))
            descriptors = array.array("i")
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(data)
            lines = dict(line.partition("=")[::2] for line in message.decode().splitlines())
            name = lines.get("FDNAME", "stored")
            if lines.get("FDSTORE") == "1":
                while descriptors and len(self.stored) < self.limit:
                    self.stored.insert(0, (name, descriptors.pop()))
            elif lines.get("FDSTOREREMOVE") == "1":
                for entry in [entry for entry in self.stored if entry[0] == name]:
                    os.close(entry[1])
                    self.stored.remove(entry)
            for descriptor in descriptors:  # a barrier's is closed once it is read
                os.close(descriptor)
            if lines.get("READY") == "1":
                self.ready.set()
