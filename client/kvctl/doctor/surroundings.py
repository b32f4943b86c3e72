"""The surroundings that the checks look at (a daemon's directories and settings, the system's files), and the form of
their findings.

Everything that a test replaces is here: the roots of /proc, /sys and /dev, the caller's identity, and how commands are
run. Settings are read without importing the daemon: from the running daemon, or from `kvstored config` and a file. If
the daemon would refuse a file, the finding has the daemon's own message.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from kvstore_console.units import parse_size
from kvstore_proto.v1 import admin_pb2 as wire

COMMAND_TIMEOUT_S = 5.0

Run = Callable[[Sequence[str]], str]
SYSTEM_CONFIG = Path("/etc/kvstored/kvstored.toml")
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """The daemon's settings, for the doctor's checks. `values` maps SECTION.KEY to a value; a size is also there in
    bytes, under KEY_bytes. `problem` says why the values are not reliable, or is "".
    """

    source: str
    values: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    def path(self, key: str) -> Path | None:
        value = self.values.get(key)
        return Path(value) if value else None

    def nbytes(self, key: str) -> int:
        """Return the bytes of the setting `key`, or 0 if they are unknown."""
        value = self.values.get(f"{key}_bytes", "0")
        return int(value) if value.isdecimal() else 0

    def number(self, key: str, default: int = 0) -> int:
        value = self.values.get(key, "")
        return int(value) if value.isdecimal() else default

    def flag(self, key: str) -> bool:
        return self.values.get(key, "").lower() == "true"

    def tiers(self, kind: str, *, mark: str) -> list[str]:
        """Return the names of the tiers of `kind`. Settings from a file name the kind of each tier. Settings from a
        running daemon may not, but they contain every default, so a tier with the setting `mark`, which no other kind
        has, is of this kind.
        """
        names = dict.fromkeys(key.rpartition(".")[0] for key in self.values if key.endswith((".kind", f".{mark}")))
        return [name for name in names if self.values.get(f"{name}.kind", kind) == kind]


def of_daemon(values: Mapping[str, str]) -> DaemonSettings:
    return DaemonSettings("the running daemon", dict(values))


def of_file(config: Path | None, state_dir: str | None) -> DaemonSettings:
    """Return the default settings, overlaid with those in the file `config` and with `state_dir`."""
    chosen = config or (SYSTEM_CONFIG if SYSTEM_CONFIG.exists() else None)
    source = str(chosen) if chosen else "the defaults"
    asked = [] if chosen is None else ["--config", str(chosen)]
    asked += [] if state_dir is None else ["--state-dir", state_dir]
    usable, said = _kvstored("config", "--check", *asked)
    if not usable:
        return DaemonSettings(source, problem=said.removeprefix("kvstored: "))
    is_there, reference = _kvstored("config")
    if not is_there:
        return DaemonSettings(source, problem=reference)
    values = _flat(tomllib.loads(reference))
    if chosen is not None:
        values |= _flat(tomllib.loads(chosen.read_text()))
    if state_dir is not None:
        values["daemon.state_dir"] = str(Path(state_dir).absolute())
    if not values.get("nvme.path"):
        values["nvme.path"] = str(Path(values["daemon.state_dir"]) / "nvme")
    return DaemonSettings(source, _with_sizes(values))


def size_of(text: str, whole_bytes: int) -> int | None:
    """Return the bytes of a size such as "64MiB" or "25%" (of `whole_bytes`), or None if `text` is no size. The daemon
    has already checked the file that `text` is from.
    """
    try:
        return parse_size(text, whole_bytes)
    except ValueError:
        return None


def _kvstored(*arguments: str) -> tuple[bool, str]:
    """Run the daemon's command with `arguments`; return whether it succeeded, and its output or error."""
    command = [sys.executable, "-m", "kvstored", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False, f"`kvstored {' '.join(arguments)}` took longer than {_TIMEOUT_S:g} s"
    except OSError as error:
        return False, f"`kvstored config` cannot be run: {error.strerror} ({error.filename})"
    if done.returncode == 0:
        return True, done.stdout
    return False, (done.stderr.strip().splitlines() or [f"kvstored ended with {done.returncode}"])[-1]


def _flat(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings as SECTION.KEY to text, each `[[tier]]` under its name; tenants are left out."""
    tiers = [(tier["name"], tier) for tier in document.get("tier", [])]
    return {
        f"{section}.{key}": str(value)
        for section, table in [*document.items(), *tiers]
        if isinstance(table, dict)
        for key, value in table.items()
    }


def _with_sizes(values: dict[str, str]) -> dict[str, str]:
    """Return the values with KEY_bytes beside each KEY that is a size."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sized = dict(values)
    for key, text in values.items():
        whole_bytes = memory_bytes
        if key == "nvme.capacity" and "%" in text:
            whole_bytes = _file_system_bytes(Path(values["nvme.path"]))
        nbytes = size_of(text, whole_bytes)
        if nbytes is not None:
            sized[f"{key}_bytes"] = str(nbytes)
    return sized


def _file_system_bytes(path: Path) -> int:
    while not os.path.exists(path) and path != path.parent:  # False too where we may not look
        path = path.parent
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize


def run_command(command: Sequence[str]) -> str:
    """Run `command`, a program and its arguments, and return its standard output. Raises OSError if it cannot run,
    fails or takes too long.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} took longer than {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class Surroundings:
    """The inputs of all of the doctor's checks. `status` is the daemon's status if it answers on its admin socket.
    `settings` are then the settings of the running daemon, otherwise those in a file.
    """

    socket_dir: Path
    settings: DaemonSettings
    status: wire.StatusReply | None = None
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    systemd: Path = Path("/run/systemd/system")
    uid: int = field(default_factory=os.geteuid)
    gids: frozenset[int] = field(default_factory=lambda: frozenset({os.getegid(), *os.getgroups()}))
    run: Run = run_command

    def read(self, path: Path) -> str | None:
        """Return the text of a small system file, or None if the file does not exist or this user may not read it."""
        try:
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def table(self, path: Path) -> Mapping[str, str]:
        """Return the names and values in the system file `path`, whose lines have the form `NAME: VALUE`."""
        lines = (self.read(path) or "").splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


class Level(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result of `kvctl doctor`: what a check found. The `advice` says what to do; for a finding that is
    OK it is an optional improvement.
    """

    name: str
    level: Level
    seen: str
    advice: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(name: str, seen: str, advice: str = "") -> Finding:
    return Finding(name, Level.OK, seen, advice)


def warn(name: str, seen: str, advice: str) -> Finding:
    return Finding(name, Level.WARN, seen, advice)


def fail(name: str, seen: str, advice: str) -> Finding:
    return Finding(name, Level.FAIL, seen, advice)


def guarded(name: str, check: Check) -> Iterator[Finding]:
    """Yield the findings of `check`, which is called `name`. If the system does not permit the check, yield a warning
    instead.
    """
    try:
        yield from check()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        yield warn(name, f"could not be checked: {error.strerror or error}{where}", "run kvctl doctor as root")
