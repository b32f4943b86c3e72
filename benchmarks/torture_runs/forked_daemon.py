"""The daemon forked from a process that has imported it: Python and its imports are most of what a start costs.

    python forked_daemon.py FD

Owns one such server for each process that asks, which ends with it, and what it forks: a child of the asking process
that runs as `python -m kvstored` would; nothing of the daemon has run before the fork. What differs from the command
is that its modules are there already, so some lives are to be started as the command (`MortalDaemon`).
Invariant: a forked daemon ends with the process that asked for it, however that process ends.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from torture_runs.child_process import end_with_parent, start_child

PROGRAM = "kvstored"
PREPARED = (
    "kvstored.cli", "kvstored.daemon", "kvstore_tiers.nvme.tier", "kvstored.store.policies.chain_hazard",
    "kvstored.store.policies.lfu_ttl", "kvstored.store.policies.lru",
)  # fmt: skip
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_ORDER = 1 << 18
_PATIENCE_S = 60.0
_libc = ctypes.CDLL(None, use_errno=True)


class ForkedDaemon:
    """The part of `subprocess.Popen` that a harness needs, for a child that was adopted."""

    stdin = None

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> None:
        connection = _server(os.getpid())
        order = json.dumps([os.getpid(), list(arguments), {**os.environ, **environment}, os.getcwd()])
        _adopt_orphans(True)  # only until the one between it and the server has ended
        try:
            socket.send_fds(connection, [order.encode()], [output.fileno()])
            answer = connection.recv(64)
        finally:
            _adopt_orphans(False)
        if not answer:
            raise RuntimeError("the process that forks daemons has ended")
        self.pid = int(answer)
        self.returncode: int | None = None
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(PROGRAM, timeout or 0.0)
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            end = select.poll()
            end.register(self._ended, select.POLLIN)
            if end.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                os.close(self._ended)
        return self.returncode


@functools.cache
def _server(_pid: int) -> socket.socket:
    """The connection to this process's server, with which that ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        start_child([sys.executable, Path(__file__), str(theirs.fileno())], pass_fds=[theirs.fileno()])
    return ours


def _adopt_orphans(is_on: bool) -> None:
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(connection: socket.socket) -> list[str] | None:
    """Forks as ordered. Returns None at the end, and in each child its arguments."""
    while True:
        order, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_ORDER, 1)
        if not order:
            return None
        caller, arguments, environment, directory = json.loads(order)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            child = os.fork()
            if child == 0:
                _wait_adopted(parent, caller)
                _take_over(environment, directory, descriptors[0])
                return list(arguments)
            os.write(writing, str(child).encode())
            os._exit(0)
        pid = os.read(reading, 64)
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)
        os.waitpid(between, 0)  # from here on its child is a child of the caller
        connection.send(pid)


def _wait_adopted(before: int, caller: int) -> None:
    """Not sooner may it be bound to its parent's life: the life of the parent before is over at once."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while os.getppid() == before and time.monotonic() < give_up_s:
        time.sleep(0.0005)
    end_with_parent()
    if os.getppid() != caller:
        os._exit(1)


def _take_over(environment: Mapping[str, str], directory: str, output: int) -> None:
    """Become what a process is that was started so: its outputs, and no other descriptor."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, max(64, output + 1))
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)


def _main(connection: socket.socket) -> None:
    from kvstore_tiers import failpoints

    for name in PREPARED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection after a fork copies every page
    arguments = _serve(connection)
    if arguments is None:
        return
    connection.detach()  # closed with all others
    failpoints.arm(os.environ.get(failpoints.ENVIRONMENT, ""))  # read from the environment when it was imported
    sys.argv[:] = [PROGRAM, *arguments]
    del sys.path[0]
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
