"""Programs of ours forked from a process that has imported them: Python and its imports cost 0.4 s of CPU a start.

Owns one such process a program, which ends with the tests' own, and the handing over: what is forked is a child of the
tests' process and runs as `python -m PROGRAM` would; nothing of it has run before the fork.
Never does: stand in for any part of a program. That the commands themselves start, and a daemon's process of small
state, is proved by those tests that start them as a user does (`RunningDaemon(as_a_command=True)`, the wheel's tests,
the examples').
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
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
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

_TEXT = "-c"
PROGRAMS = {
    "kvstored": (
        "kvstored.daemon_process",
        "kvstored.cli",
        "kvstored.log_setup",
        "kvstored.state.environment",
        "kvstored.state.databases",
        "kvstored.store.policies.chain_hazard",
        "kvstored.store.policies.lfu_ttl",
        "kvstore_console.log_format",
        "kvstore_cuda.native_build",
        "kvstore_tiers.nvme.tier",
    ),
    "kvctl.main": ("kvctl.main", "kvctl.commands", "kvstore_client.entry"),
    "kvstore_client.testing.child": ("kvstore_client.entry",),
    _TEXT: ("kvstore_client.entry", "tests.reference.running_daemon"),
    "kvstore_engine.cli": ("kvstore_engine.cli.serve", "kvstore_engine.server.app", "kvstore_engine.server.connection"),
    "tests.gpu.device_client": ("kvstore_client.entry", "tests.gpu.device_engine", "tests.gpu.vllm_engine"),
    "tests.faults.nvme_writer": (
        "kvstore_tiers.nvme",
        "kvstore_tiers.testing.transfers",
        "kvstored.clients.tenants.data_keys",
    ),
    "tests.vllm.engine_child": ("vllm.entrypoints.llm", "kvstore_connectors.vllm"),
}
"""What can be forked, and what of it is imported before: also what each start would import later. `-c` is the text of
a client's program.
"""
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_ORDER = 1 << 18
_MOST_DESCRIPTORS = 8
_MOST_OPEN = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)


class ForkedProcess:
    """The part of `subprocess.Popen` that tests need, for a child that was adopted."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            end = select.poll()
            end.register(self._ended, select.POLLIN)
            if end.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                os.close(self._ended)
        return self.returncode


def popen(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: IO[Any] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start a process as `subprocess.Popen` does: forked where it is one of `PROGRAMS`, else started. Without `stdin`
    it reads nothing.
    """
    program = _program(command)
    if program not in PROGRAMS:
        read = subprocess.DEVNULL if stdin is None else stdin
        return subprocess.Popen(command, env=env, stdin=read, stdout=stdout, stderr=stderr, pass_fds=pass_fds, cwd=cwd)
    connection, _ = _server(program, os.getpid(), env.get("LD_LIBRARY_PATH", ""))
    order = [
        list(command[2 if program == _TEXT else 3 :]),
        dict(env),
        str(cwd or os.getcwd()),
        list(pass_fds),
        stdin is not None,
    ]
    outputs = [1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
    streams = [*([] if stdin is None else [stdin.fileno()]), *outputs]
    _adopt_orphans(True)  # only until the one between it and the server has ended
    try:
        socket.send_fds(connection, [json.dumps(order).encode()], [*streams, *pass_fds])
        pid = int(connection.recv(64))
    finally:
        _adopt_orphans(False)
    return ForkedProcess(pid)


def _program(command: Sequence[str]) -> str:
    """Return which of `PROGRAMS` a command starts, or an empty text."""
    if command[0] != sys.executable:
        return ""
    return _TEXT if command[1] == _TEXT else command[2] if command[1] == "-m" else ""


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    stdin: IO[Any] | None = None,
    stdout: IO[Any] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end as `subprocess.run` does that captures text: forked where it is one of `PROGRAMS`. What
    it writes to a given `stdout` is not captured.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        environment = os.environ if env is None else env
        process = popen(command, env=environment, stdin=stdin, stdout=out if stdout is None else stdout, stderr=err)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(command, status, *said)


@functools.cache
def _server(program: str, pid: int, libraries: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """This process's server of a program and the connection to it, with which it ends. `libraries`: where the loader,
    which asks once a process, looks for some."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, program, str(theirs.fileno())],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return ours, process


def _adopt_orphans(is_on: bool) -> None:
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(connection: socket.socket) -> list[str] | None:
    """Forks as ordered. Returns None at the end, and in each child its arguments."""
    while True:
        order, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_ORDER, _MOST_DESCRIPTORS)
        if not order:
            return None
        arguments, environment, directory, passed, reads = json.loads(order)
        pid_reader, pid_writer = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                connection.detach()
                _take_over(environment, directory, descriptors, [*([0] if reads else []), 1, 2, *passed])
                return list(arguments)
            os.write(pid_writer, str(child).encode())
            os._exit(0)
        pid = os.read(pid_reader, 64)
        for descriptor in (pid_reader, pid_writer, *descriptors):
            os.close(descriptor)
        os.waitpid(between, 0)  # from here on its child is the tests'
        connection.send(pid)


def _take_over(environment: Mapping[str, str], directory: str, descriptors: list[int], wanted: list[int]) -> None:
    """Become what a process is that was started so: its streams, the descriptors it was passed, and no others."""
    above = max(wanted) + 1
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    os.closerange(3, above)
    for descriptor, number in zip(kept, wanted, strict=True):
        os.dup2(descriptor, number)
    os.closerange(above, max(kept) + 1)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:0] = paths


def _main(program: str, connection: socket.socket) -> None:
    for module in PROGRAMS[program]:
        importlib.import_module(module)
    sys.modules.pop(program, None)  # it is run, not imported
    if program == "kvstored":
        importlib.import_module("kvstore_predictor.prior").shipped()  # the same in each daemon, and kept
        importlib.import_module("kvstored.config").load_config(None)  # as are the defaults
        importlib.import_module("kvstored.cli")._parser(["serve"])  # and its patterns
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a tester's Ctrl-C is for pytest
    gc.collect()
    gc.freeze()  # a child's collections would copy every page of what was imported
    arguments = _serve(connection)
    if arguments is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failpoints = sys.modules.get("kvstore_tiers.failpoints")
    if failpoints is not None:  # read from the environment when it was imported
        failpoints.arm(os.environ.get(failpoints.ENVIRONMENT, ""))
    if program == "kvstored":
        _fork_its_state_process()
    status = 0
    try:
        if program == _TEXT:
            sys.argv[:] = [_TEXT, *arguments[1:]]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(arguments[0], vars(main))
        else:
            sys.argv[1:] = arguments
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        status = end.code or 0
    _end(status)


def _end(status: int) -> None:
    """End as Python ends, but without taking every module apart, which would copy each page that the fork shares."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _fork_its_state_process() -> None:
    """Have the daemon fork the first process of its small state, whose modules it has: no thread runs that early. What
    is started after that one died is a command, as in a daemon of a user."""
    state = importlib.import_module("kvstored.state.process")

    def fork(
        command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], stdin: int, process_group: int
    ) -> ForkedProcess | subprocess.Popen[bytes]:
        state.subprocess = subprocess  # type: ignore[attr-defined]
        if threading.active_count() > 1:
            return subprocess.Popen(command, pass_fds=pass_fds, env=env, stdin=stdin, process_group=process_group)
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return ForkedProcess(pid)
        ended = 1
        try:
            os.setpgid(0, process_group)
            unread = os.open(os.devnull, os.O_RDONLY)
            _take_over(env, os.getcwd(), [unread, 1, 2, *pass_fds], [0, 1, 2, *pass_fds])
            os.closerange(max(pass_fds) + 1, _MOST_OPEN)
            sys.argv[1:] = command[command.index("-m") + 2 :]
            runpy.run_module("kvstored.state.worker", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            ended = int(end.code or 0)
        finally:
            os._exit(ended)

    state.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=fork, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


if __name__ == "__main__":
    _main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
