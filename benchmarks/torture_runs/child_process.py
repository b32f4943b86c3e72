"""Children that end with their parent, however it ends.

Owns the start of a child under PR_SET_PDEATHSIG: by util-linux' `setpriv` where there is one, since a hook between fork
and exec is not safe beside gRPC's threads. Where there is none, children end by their parent's `finally` alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_SETPRIV = shutil.which("setpriv")


def start_child(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    text: bool = False,
    pass_fds: Sequence[int] = (),
    new_session: bool = False,
) -> subprocess.Popen[Any]:
    """A child that gets SIGKILL when the thread that started it ends."""
    prefix = [_SETPRIV, "--pdeathsig", "KILL"] if _SETPRIV else []
    return subprocess.Popen(
        [*prefix, *map(str, command)],
        env={**os.environ, **(environment or {})},
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=text,
        pass_fds=pass_fds,
        start_new_session=new_session,
        bufsize=1 if text else -1,
    )


def end_with_parent() -> None:
    """The same from inside a child, which has to say it again after a change of user."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def end_child(child: subprocess.Popen[Any], patience_s: float = 5.0) -> None:
    """Let it end by itself if its input is closed, else kill it."""
    if child.stdin is not None:
        with contextlib.suppress(OSError):
            child.stdin.close()
    try:
        child.wait(patience_s if child.stdin is not None else 0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def kill_naming(directory: Path, *also: bytes) -> None:
    """Kill every process with a path below this temporary directory, and all of `also`, on its command line."""
    marks = (os.fsencode(directory) + b"/", *also)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if all(mark in command for mark in marks):
                os.kill(int(path.parent.name), signal.SIGKILL)
