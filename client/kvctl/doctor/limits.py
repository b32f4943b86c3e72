"""Limits of the daemon, or of this process if no daemon runs: descriptors, locked memory, memory of its cgroup; and the
memory of the DRAM tier: whether it fits, may be swapped out, has large pages, and works as a memfd.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from kvctl.doctor.surroundings import Finding, Surroundings, fail, ok, warn
from kvstore_console.units import human_bytes, human_count

_DESCRIPTORS_A_CLIENT = 4  # handshake, stream, staging, pidfd
_DESCRIPTORS_OF_ITS_OWN = 128
_UNLIMITED = 1 << 62
_AUTO_ARENA, _AUTO_SLAB = 64 << 20, 256 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_TRIAL_BYTES = 1 << 20
_SHARE_THAT_WORRIES = 0.8


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
    """Return the number of arenas or slabs of a tier. `each_bytes` 0 means "auto": at most 64, or larger ones of
    `auto_bytes`.
    """
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
    """Check the memory limit of the daemon's cgroup. The daemon's arenas are shared memory and count against this
    limit.
    """
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
    """Yield the tightest limit in each hierarchy that controls memory; None if a hierarchy has no limit. `place` is the
    text of /proc/PID/cgroup: version 2, version 1, or both on a machine that mixes them.
    """
    root = around.sys / "fs/cgroup"
    for line in place.splitlines():
        number, controllers, group = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            unified = root / "unified"  # where version 1 has the controllers
            yield _least_limit(around, unified if unified.is_dir() else root, group, "memory.max")
        elif "memory" in controllers.split(","):
            yield _least_limit(around, root / "memory", group, "memory.limit_in_bytes")


def _least_limit(around: Surroundings, root: Path, group: str, name: str) -> int | None:
    """Return the tightest limit from `group` up to the root, in bytes; None if there is none."""
    parts = [part for part in group.split("/") if part]
    found = []
    for depth in range(len(parts), -1, -1):
        text = around.read(root.joinpath(*parts[:depth]) / name)
        if text is not None and text.isdecimal() and int(text) < _UNLIMITED:
            found.append(int(text))
    return min(found, default=None)


def _limits(around: Surroundings) -> tuple[str, dict[str, tuple[str, str]]]:
    """Return the process whose limits they are, and the pairs (soft, hard) by name."""
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


def capacity(around: Surroundings) -> Iterator[Finding]:
    """Compare the DRAM tier's capacity with the machine's memory, and warn of swap, because a cache in swap is slower
    than none.
    """
    memory = around.table(around.proc / "meminfo")
    total_bytes, swap_bytes = _kib(memory.get("MemTotal")), _kib(memory.get("SwapTotal"))
    wanted_bytes = around.settings.nbytes("host.capacity")
    if total_bytes and wanted_bytes:
        share = wanted_bytes / total_bytes
        seen = f"host.capacity {human_bytes(wanted_bytes)} of {human_bytes(total_bytes)} ({share:.0%})"
        if share > 1:
            yield fail("capacity", seen, "lower host.capacity: the machine does not have so much")
        elif share > _SHARE_THAT_WORRIES:
            yield warn("capacity", seen, "leave memory for the engines and the page cache: lower host.capacity")
        elif around.status is None and _kib(memory.get("MemAvailable")) < wanted_bytes:
            free = human_bytes(_kib(memory.get("MemAvailable")))
            yield warn("capacity", f"{seen}, but only {free} available now", "lower host.capacity or free memory")
        else:
            yield ok("capacity", seen)
    if swap_bytes:
        yield warn(
            "swap",
            f"{human_bytes(swap_bytes)} of swap: arenas can be swapped out",
            "swapoff -a, or MemorySwapMax=0 in the unit",
        )
    else:
        yield ok("swap", "none: arenas stay in memory")


def shared(around: Surroundings) -> Iterator[Finding]:
    """Check that this machine lets a process create, seal and write a memfd, as the daemon does for its arenas."""
    try:
        fd = os.memfd_create("kvctl-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        yield fail(
            "memfd", f"cannot be made: {error.strerror}", "allow memfd_create in the container's seccomp profile"
        )
        return
    try:
        os.ftruncate(fd, _TRIAL_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        with mmap.mmap(fd, _TRIAL_BYTES) as mapped:
            populates = _populate(mapped)
    finally:
        os.close(fd)
    yield ok("memfd", "made, sealed and mapped; arenas need no /dev/shm")
    if populates:
        yield ok("prefault", "MADV_POPULATE_WRITE works")
    else:
        yield warn("prefault", "MADV_POPULATE_WRITE does not work: first puts are slower", "Linux 5.14 or newer")


def huge_pages(around: Surroundings) -> Iterator[Finding]:
    text = around.read(around.sys / "kernel/mm/transparent_hugepage/shmem_enabled")
    if text is None:
        yield ok("huge pages", "not for shared memory on this kernel")
        return
    chosen = text.partition("[")[2].partition("]")[0] or text
    if chosen in ("always", "within_size", "force"):
        yield ok("huge pages", f"shmem_enabled is {chosen}: arenas can use 2 MiB pages")
        return
    arena_bytes = around.settings.nbytes("host.arena") or 64 << 20
    yield ok(
        "huge pages",
        f"shmem_enabled is {chosen}: an arena of {human_bytes(arena_bytes)} is {arena_bytes >> 12:,} pages",
        f"2 MiB pages would make it {max(1, arena_bytes >> 21):,}, faster to touch and to map: "
        "echo within_size | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _populate(mapped: mmap.mmap) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    view = (ctypes.c_char * len(mapped)).from_buffer(mapped)
    try:
        address = ctypes.c_void_p(ctypes.addressof(view))
        return bool(libc.madvise(address, ctypes.c_size_t(len(mapped)), _MADV_POPULATE_WRITE) == 0)
    finally:
        del view


def _kib(text: str | None) -> int:
    """Return the bytes of "123 kB"; 0 for None."""
    return int(text.split()[0]) * 1024 if text else 0
