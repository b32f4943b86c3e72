"""Memory for the DRAM tier: does it fit, can it be swapped out, do memfds work as arenas need, how large are pages?"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator

from kvctl.doctor.finding import Finding, fail, ok, warn
from kvctl.doctor.surroundings import Surroundings
from kvstore_console.units import human_bytes

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_TRIAL_BYTES = 1 << 20
_SHARE_THAT_WORRIES = 0.8


def capacity(around: Surroundings) -> Iterator[Finding]:
    """Against what the machine has; swap makes a cache slower than no cache."""
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
    """A memfd made, sealed and touched the way that arenas are."""
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
    """Bytes of "123 kB"; 0 of nothing."""
    return int(text.split()[0]) * 1024 if text else 0
