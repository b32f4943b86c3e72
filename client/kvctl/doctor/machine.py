"""The machine: kernel, processors, systemd, the clock; Python and the packages that kvstored needs."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from kvctl.doctor.surroundings import Finding, Surroundings, fail, ok, warn
from kvstore_proto.version import pip_install

_OLDEST_KERNEL = (5, 14)  # MADV_POPULATE_WRITE
_PIDFD_KERNEL = (6, 5)  # SO_PEERPIDFD
_ALL_IDS = 2**32 - 1  # -1 is no id
_STA_UNSYNC = 0x40
_STEP_S = 0.05
_MANY_RESTARTS = 3
DISTRIBUTION = "kvstored"
_MODULES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "prometheus-client": "prometheus_client",
    "protobuf": "google.protobuf",
}
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)\s*>=\s*([0-9][0-9.]*)\s*$")


def kernel(around: Surroundings) -> Iterator[Finding]:
    release = around.read(around.proc / "sys/kernel/osrelease") or os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST_KERNEL:
        yield warn("kernel", f"Linux {release}: arenas cannot be prefaulted", "Linux 5.14 or newer")
    elif numbers < _PIDFD_KERNEL:
        yield ok("kernel", f"Linux {release}", "from 6.5 on a client's cgroup is read without a race (SO_PEERPIDFD)")
    else:
        yield ok("kernel", f"Linux {release}")


def processors(around: Surroundings) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    seen = f"{cores} for this process"
    if cores < 2:
        yield warn("processors", seen, "the daemon wants one to itself while an engine computes: give it two or more")
    else:
        yield ok("processors", seen)
    quota = (around.read(around.sys / "fs/cgroup/cpu.max") or "max").split()
    if quota[0] != "max" and len(quota) == 2 and int(quota[0]) < 2 * int(quota[1]):
        share = int(quota[0]) / int(quota[1])
        yield warn(
            "cpu quota", f"{share:.2g} processors on the cgroup", "raise CPUQuota=, a throttled daemon stalls gets"
        )
    governors = {
        governor
        for path in sorted((around.sys / "devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
        if (governor := around.read(path))
    }
    if not governors:
        yield ok("governor", "none (a virtual machine, most likely)")
    elif governors <= {"performance", "schedutil"}:
        yield ok("governor", ", ".join(sorted(governors)))
    else:
        yield warn(
            "governor",
            ", ".join(sorted(governors)),
            "a sleepy processor shows in p99: cpupower frequency-set -g performance",
        )


def user_namespace(around: Surroundings) -> Iterator[Finding]:
    """Check that the daemon's user namespace maps every user and group, because the daemon knows its callers by their
    ids.
    """
    if around.status is None:
        return
    for kind, what in (("uid", "users"), ("gid", "groups")):
        lines = (around.read(around.proc / str(around.status.pid) / f"{kind}_map") or "").splitlines()
        lengths = [int(fields[2]) for fields in map(str.split, lines) if len(fields) == 3 and fields[2].isdecimal()]
        if not lengths:
            yield ok(what, "the daemon's user namespace is not to be seen from here")
        elif sum(lengths) >= _ALL_IDS:
            yield ok(what, f"the daemon's user namespace maps all {what}")
        else:
            yield warn(
                what,
                f"the daemon's user namespace maps {sum(lengths)} {what}; all others look alike there and are refused",
                f"run engines as {what} that it maps, or make all others one tenant: [[tenant]] unmapped = true",
            )


def unit(around: Surroundings) -> Iterator[Finding]:
    """Check that the daemon's systemd unit is in order, if the machine has systemd."""
    if not around.systemd.is_dir():
        yield ok("systemd", "not running here")
        return
    properties = "LoadState,ActiveState,SubState,NRestarts,Result"
    text = around.run(["systemctl", "show", "kvstored", f"--property={properties}"])
    shown = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    state = f"{shown.get('ActiveState', '?')} ({shown.get('SubState', '?')})"
    restarts = int(shown.get("NRestarts", "0") or 0)
    if shown.get("LoadState") == "not-found":
        yield ok("systemd", "no unit kvstored", "deploy/README.md says how to install one")
    elif shown.get("ActiveState") == "failed":
        yield fail("systemd", f"the unit has failed: {shown.get('Result', '?')}", "journalctl -u kvstored -n 50")
    elif restarts > _MANY_RESTARTS:
        yield warn("systemd", f"{state}, restarted {restarts} times", "journalctl -u kvstored -p warning")
    elif shown.get("ActiveState") == "active" or around.status is not None:
        yield ok("systemd", f"the unit is {state}")
    else:
        yield warn("systemd", f"the unit is {state}", "systemctl enable --now kvstored")


class ClockWatch:
    """A check for jumps of the wall clock. It starts when it is constructed, before the other checks, and reports its
    finding after them.
    """

    def __init__(self) -> None:
        self._apart_ns = time.time_ns() - time.monotonic_ns()

    def check(self, around: Surroundings) -> Iterator[Finding]:
        step_s = (time.time_ns() - time.monotonic_ns() - self._apart_ns) / 1e9
        yield from steps(step_s)
        synchronised = _is_synchronised()
        if synchronised is None:
            yield ok("time service", "the kernel does not say whether the clock is synchronised")
        elif synchronised:
            yield ok("time service", "the clock is synchronised")
        else:
            yield warn(
                "time service",
                "the clock is not synchronised; only times in logs and reports depend on it",
                "timedatectl set-ntp true, or run chrony",
            )


def steps(step_s: float) -> Iterator[Finding]:
    if abs(step_s) > _STEP_S:
        yield warn(
            "clock",
            f"the wall clock jumped by {step_s:+.2f} s while we looked; leases do not depend on it",
            "slew instead of stepping: chrony, or systemd-timesyncd; on a virtual machine, one time source only",
        )
    else:
        yield ok("clock", "wall and monotonic clock run together")


def _is_synchronised() -> bool | None:
    """Return whether adjtimex(2) says that the clock is synchronised; None if the call is not allowed."""
    timex = (ctypes.c_long * 32)()  # struct timex; modes = 0 reads; status is its sixth word on 64-bit
    if ctypes.sizeof(ctypes.c_long) != 8 or ctypes.CDLL(None).adjtimex(timex) < 0:
        return None
    return not timex[5] & _STA_UNSYNC


def python(requirements: Sequence[str] | None = None, installed: Callable[[str], str] = version) -> Iterator[Finding]:
    yield ok("python", platform.python_version())
    if requirements is None:
        try:
            requirements = requires(DISTRIBUTION) or []
        except PackageNotFoundError:
            yield fail("packages", f"{DISTRIBUTION} is not installed as a package", pip_install())
            return
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)  # extras have a marker
        if match is not None:
            yield _package(match[1], match[2], installed)


def _package(name: str, least: str, installed: Callable[[str], str]) -> Finding:
    repair = f"pip install '{name}>={least}'"
    try:
        found = installed(name)
    except PackageNotFoundError:
        return fail(name, "is not installed", repair)
    if _numbers(found) < _numbers(least):
        return fail(name, f"{found}, at least {least} is needed", repair)
    try:
        importlib.import_module(_MODULES.get(name, name))
    except ImportError as error:
        return fail(name, f"{found} does not load: {error}", f"pip install --force-reinstall '{name}>={least}'")
    return ok(name, found)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "6.33.0rc1" -> (6, 33, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
