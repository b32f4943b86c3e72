"""What the checks look at: a daemon's directories and settings, and the system's files.

Everything that a test wants to stand in for is here: roots of /proc, /sys and /dev, who the caller is, how commands
are run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvctl.doctor.settings import Settings
from kvstore_proto.v1 import admin_pb2 as wire

COMMAND_TIMEOUT_S = 5.0

Run = Callable[[Sequence[str]], str]


def run_command(command: Sequence[str]) -> str:
    """Standard output of a command that must not hang or complain. Raises OSError when it cannot be had."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} took longer than {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class Surroundings:
    """`status` is the daemon's, when it answers on its admin socket; `settings` are its own then, else a file's."""

    socket_dir: Path
    settings: Settings
    status: wire.StatusReply | None = None
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    systemd: Path = Path("/run/systemd/system")
    uid: int = field(default_factory=os.geteuid)
    gids: frozenset[int] = field(default_factory=lambda: frozenset({os.getegid(), *os.getgroups()}))
    run: Run = run_command

    def read(self, path: Path) -> str | None:
        """A small file of the system; None when there is no such thing or it is not for us."""
        try:
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def table(self, path: Path) -> Mapping[str, str]:
        """Lines of `NAME: VALUE`."""
        lines = (self.read(path) or "").splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
