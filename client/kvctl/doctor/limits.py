"""Limits of the daemon, or of this process when there is none: descriptors, locked memory, memory of its cgroup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvctl.doctor.finding import Finding, fail, ok, warn
from kvctl.doctor.surroundings import Surroundings
from kvstore_console.units import human_bytes, human_count

_DESCRIPTORS_A_CLIENT = 4  # handshake, stream, staging, pidfd
_DESCRIPTORS_OF_ITS_OWN = 128
_UNLIMITED = 1 << 62
_AUTO_ARENA, _AUTO_SLAB = 64 << 20, 256 << 20


def descriptors(around: Surroundings) -> Iterator[Finding]:
    whose, limits = _limits(around)
    line = limits.get("Max open files")
    if line is None:
        yield warn(
            "open files", f"the limits of {whose} cannot be read", "run kvctl doctor as the daemon's user or root"
        )
        return
    hard = _number(line[1])
    settings = around.settings
    arenas = _containers(settings.nbytes("host.capacity"), settings.nbytes("host.arena"), _AUTO_ARENA)
    slabs = _containers(settings.nbytes("nvme.capacity"), settings.nbytes("nvme.slab"), _AUTO_SLAB)
    clients = settings.number("limits.max_clients", 256)
    needed = _DESCRIPTORS_A_CLIENT * clients + arenas + slabs + _DESCRIPTORS_OF_ITS_OWN
    seen = f"{_shown(hard)} for {whose}; {human_count(clients)} clients, arenas and slabs need {human_count(needed)}"
    if hard < needed:
        yield warn("open files", seen, f"LimitNOFILE={max(65536, needed)} in the unit, or `ulimit -Hn`, then restart")
    else:
        yield ok("open files", seen)


def _containers(capacity_bytes: int, each_bytes: int, auto_bytes: int) -> int:
    """Arenas or slabs of a tier; `each_bytes` 0: "auto", which makes 64 at most, or larger ones of `auto_bytes`."""
    return capacity_bytes // each_bytes if each_bytes else max(64, capacity_bytes // auto_bytes)


def locked_memory(around: Surroundings) -> Iterator[Finding]:
    whose, limits = _limits(around)
    line = limits.get("Max locked memory")
    if line is None:
        return
    limit = _number(line[0])
    shown = "unlimited" if limit >= _UNLIMITED else human_bytes(limit)
    yield ok(
        "locked memory",
        f"{shown} for {whose}; this version locks none",
        "" if limit >= _UNLIMITED else "memory pinned for a GPU would need LimitMEMLOCK=infinity, as deploy/ sets it",
    )


def cgroup_memory(around: Surroundings) -> Iterator[Finding]:
    """Arenas are shared memory and count against the daemon's memory limit."""
    process = str(around.status.pid) if around.status is not None else "self"
    place = around.read(around.proc / process / "cgroup") or ""
    limits = list(_limits_of_groups(around, place))
    if not limits:
        return
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None:
        yield ok("memory limit", "none on its cgroup")
        return
    needed = around.settings.nbytes("host.capacity") + (256 << 20)
    seen = f"{human_bytes(limit)} on its cgroup; host.capacity and 256 MiB are {human_bytes(needed)}"
    if limit < needed:
        yield fail("memory limit", seen, f"MemoryMax={needed >> 20}M or more in the unit, or a smaller host.capacity")
    else:
        yield ok("memory limit", seen)


def _limits_of_groups(around: Surroundings, place: str) -> Iterator[int | None]:
    """The tightest limit in each hierarchy that knows memory; None where a hierarchy has none. `place` is what
    /proc/PID/cgroup says: version 2, version 1, or both on a machine that mixes them."""
    root = around.sys / "fs/cgroup"
    for line in place.splitlines():
        number, controllers, group = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            unified = root / "unified"  # where version 1 has the controllers
            yield _least_limit(around, unified if unified.is_dir() else root, group, "memory.max")
        elif "memory" in controllers.split(","):
            yield _least_limit(around, root / "memory", group, "memory.limit_in_bytes")


def _least_limit(around: Surroundings, root: Path, group: str, name: str) -> int | None:
    """The tightest limit from the group up to the root."""
    parts = [part for part in group.split("/") if part]
    found = []
    for depth in range(len(parts), -1, -1):
        text = around.read(root.joinpath(*parts[:depth]) / name)
        if text is not None and text.isdecimal() and int(text) < _UNLIMITED:
            found.append(int(text))
    return min(found, default=None)


def _limits(around: Surroundings) -> tuple[str, dict[str, tuple[str, str]]]:
    """Whose limits, and (soft, hard) by name."""
    if around.status is not None:
        text = around.read(around.proc / str(around.status.pid) / "limits")
        whose = "the daemon"
    else:
        text = around.read(around.proc / "self/limits")
        whose = "this login (the daemon's are not known)"
    found: dict[str, tuple[str, str]] = {}
    for line in (text or "").splitlines()[1:]:
        name, values = line[:26].strip(), line[26:].split()
        if len(values) >= 2:
            found[name] = (values[0], values[1])
    return whose, found


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else _UNLIMITED


def _shown(limit: int) -> str:
    return "unlimited" if limit >= _UNLIMITED else human_count(limit)
