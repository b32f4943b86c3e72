"""The NVMe tier's directory: whether it exists, belongs to the daemon, has room, is on a disk and takes direct I/O; and
the disk's speed, measured by writing and reading one temporary file, bounded in bytes and time.

The speed is measured with the NVMe tier's kind of I/O: O_DIRECT if it works, several threads, large transfers, a sync
at the end. A running daemon makes the measurement slower, and the measurement makes the daemon slower.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvctl.doctor.sockets import user_name
from kvctl.doctor.surroundings import Finding, Surroundings, fail, ok, warn
from kvstore_console.units import human_bytes, human_seconds

_GOOD = {"ext4", "xfs", "ext3", "f2fs", "zfs"}
_WORSE = {
    "btrfs": "copy-on-write fragments slabs: chattr +C on the empty directory, or use ext4 or xfs",
    "overlay": "a container's layer, slow and gone with the container: mount a volume there",
    "9p": "a share of the host: mount a disk there",
}
_REMOTE = ("nfs", "cifs", "smb", "ceph", "fuse", "virtiofs", "gluster", "lustre")
_PAGE_BYTES = 4096
MAX_BYTES = 256 << 20
MAX_S = 3.0  # each way
_TRANSFER_BYTES = 1 << 20
_THREADS = 4
_SYNCS = 8
_SLOW_BYTES_A_SECOND = 200e6
_SLOW_SYNC_S = 0.02
_SPARE_SHARE = 8  # at most one part in so many of the free space

Progress = Callable[[str], None]


def directory(around: Surroundings) -> Iterator[Finding]:
    path = around.settings.path("nvme.path")
    if path is None or not around.settings.flag("nvme.enabled"):
        yield ok("nvme", "switched off: every block is volatile" if path else "no settings known")
        return
    try:
        status = path.stat()
    except FileNotFoundError:
        parent = existing(path)
        if os.access(parent, os.W_OK):
            yield ok("directory", f"{path} does not exist yet; the daemon makes it in {parent}")
        else:
            advice = f"sudo install -d -m 700 -o kvstored {path}, or set daemon.state_dir to a place of your own"
            yield warn("directory", f"{path} does not exist, and user {user_name(around.uid)} cannot make it", advice)
        return
    except PermissionError:
        yield ok("directory", f"{path} is closed to user {user_name(around.uid)}, as it should be")
        return
    yield _ownership(around, path, status)


def _ownership(around: Surroundings, path: Path, status: os.stat_result) -> Finding:
    owner = user_name(status.st_uid)
    seen = f"{path}, mode {stat.S_IMODE(status.st_mode):04o}, owner {owner}"
    if not stat.S_ISDIR(status.st_mode):
        return fail("directory", f"{path} is not a directory", "set nvme.path to a directory")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        # The state directory above it is 0700 as a rule; then no other user can reach this one.
        closed_above = any(parent.stat().st_mode & 0o077 == 0 for parent in path.parents if parent.exists())
        if not closed_above:
            return fail("directory", f"{seen}: others may read prompts out of it", f"chmod 700 {path}")
    daemon_uid = _daemon_uid(around)
    if daemon_uid is not None and status.st_uid != daemon_uid:
        name = user_name(daemon_uid)
        return fail("directory", f"{seen}, but the daemon runs as {name}", f"sudo chown -R {name} {path}")
    return ok("directory", seen)


def room(around: Surroundings) -> Iterator[Finding]:
    """Compare the free space of the NVMe tier's disk with the bytes by which the tier may still grow."""
    path = _tier_path(around)
    if path is None:
        return
    capacity_bytes = around.settings.nbytes("nvme.capacity")
    status = os.statvfs(existing(path))
    free_bytes = status.f_bavail * status.f_frsize
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except PermissionError:
        yield ok("room", f"{human_bytes(free_bytes)} free; what the tier has taken cannot be seen", "sudo kvctl doctor")
        return
    has_bytes = _allocated_bytes(path)
    wanted_bytes = max(0, capacity_bytes - has_bytes)
    seen = (
        f"{human_bytes(free_bytes)} free; nvme.capacity {human_bytes(capacity_bytes)}, "
        f"of which {human_bytes(has_bytes)} are taken already"
    )
    if wanted_bytes > free_bytes:
        short = human_bytes(wanted_bytes - free_bytes)
        yield warn("room", f"{seen}: {short} short", "free space, or lower nvme.capacity: a full disk stops write-back")
    else:
        yield ok("room", seen)


def file_system(around: Surroundings) -> Iterator[Finding]:
    path = _tier_path(around)
    if path is None:
        return
    kind = kind_of(around, existing(path))
    if kind in _GOOD:
        yield ok("file system", kind)
    elif kind in ("tmpfs", "ramfs"):
        yield fail(
            "file system", f"{kind} is memory: nothing on it is durable", "set nvme.path to a directory on a disk"
        )
    elif kind in _WORSE:
        yield warn("file system", kind, _WORSE[kind])
    elif kind.startswith(_REMOTE):
        yield warn("file system", f"{kind} is not a local disk", "set nvme.path to a local NVMe disk")
    else:
        yield ok("file system", kind or "unknown")


def direct(around: Surroundings) -> Iterator[Finding]:
    """Check that the NVMe tier's disk supports O_DIRECT, by writing and reading one page in a file without a name."""
    path = _tier_path(around)
    if path is None:
        return
    place = existing(path)
    try:
        works = _direct_works(place)
    except PermissionError:
        yield ok(
            "direct I/O", f"not tried: {place} is closed to user {user_name(around.uid)}", "sudo kvctl doctor tries it"
        )
        return
    if works:
        yield ok("direct I/O", f"pages of {_PAGE_BYTES} bytes go through O_DIRECT")
    else:
        yield warn(
            "direct I/O",
            "O_DIRECT does not work there: every block is kept a second time in the page cache",
            "use ext4 or xfs on a local disk (nvme.require_direct makes it a condition)",
        )


def _tier_path(around: Surroundings) -> Path | None:
    """Return the directory of the NVMe tier; None if there is no such tier, or no settings are known."""
    return around.settings.path("nvme.path") if around.settings.flag("nvme.enabled") else None


def existing(path: Path) -> Path:
    """Return `path`, or the nearest directory above it that exists and is visible to this user."""
    for candidate in (path, *path.parents):
        with suppress(OSError):
            if candidate.is_dir():
                return candidate
    return Path("/")


def kind_of(around: Surroundings, path: Path) -> str:
    """Return the type of the file system that holds `path`."""
    best, kind = -1, ""
    real = path.resolve()
    for line in (around.read(around.proc / "self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].encode().decode("unicode_escape"))
        if (real == mount or mount in real.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split()[0]
    return kind


def unnamed_file(directory: Path, flags: int = 0) -> int:
    """Create a file without a name in `directory`, and return its descriptor. The file vanishes whichever way the
    process ends.
    """
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    path = directory / f"kvctl-doctor-{os.getpid()}.tmp"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
    path.unlink()
    return fd


def _direct_works(directory: Path) -> bool:
    try:
        fd = unnamed_file(directory, os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            with suppress(OSError):  # where O_DIRECT is refused after the file was made
                (directory / f"kvctl-doctor-{os.getpid()}.tmp").unlink()
            return False
        raise
    try:
        with mmap.mmap(-1, 2 * _PAGE_BYTES) as buffer:
            buffer.write(os.urandom(_PAGE_BYTES) * 2)
            written = buffer[:]
            os.pwritev(fd, [buffer], _PAGE_BYTES)
            buffer.seek(0)
            buffer.write(bytes(2 * _PAGE_BYTES))
            os.preadv(fd, [buffer], _PAGE_BYTES)
            return buffer[:] == written
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(fd)


def _allocated_bytes(path: Path) -> int:
    """Return the bytes on disk of the tier's files; files that cannot be seen count as 0."""
    total_bytes = 0
    with suppress(OSError):
        for file in path.rglob("*"):
            with suppress(OSError):
                total_bytes += file.lstat().st_blocks * 512
    return total_bytes


def _daemon_uid(around: Surroundings) -> int | None:
    if around.status is None:
        return None
    with suppress(OSError):
        return (around.proc / str(around.status.pid)).stat().st_uid
    return None


@dataclass(frozen=True, slots=True)
class Measured:
    written_bytes: int
    write_s: float
    read_bytes: int
    read_s: float
    sync_s: float
    is_direct: bool


def speed(around: Surroundings, progress: Progress) -> Iterator[Finding]:
    path = _tier_path(around)
    if path is None:
        return
    place = existing(path)
    status = os.statvfs(place)
    nbytes = min(MAX_BYTES, status.f_bavail * status.f_frsize // _SPARE_SHARE)
    nbytes -= nbytes % _TRANSFER_BYTES
    if nbytes < 16 * _TRANSFER_BYTES:
        yield warn("speed", f"not measured: {place} is nearly full", "free space there")
        return
    try:
        measured = measure(place, nbytes, progress)
    except PermissionError:
        yield ok(
            "speed", f"not measured: {place} is closed to user {user_name(around.uid)}", "sudo kvctl doctor measures it"
        )
        return
    yield from judge(measured)


def judge(measured: Measured) -> Iterator[Finding]:
    """Yield the finding whether a disk with the speeds `measured` is fast enough for a tier below DRAM."""
    write = measured.written_bytes / max(measured.write_s, 1e-9)
    read = measured.read_bytes / max(measured.read_s, 1e-9)
    how = "" if measured.is_direct else ", through the page cache"
    seen = (
        f"write {human_bytes(round(write))}/s, read {human_bytes(round(read))}/s "
        f"({human_bytes(measured.written_bytes)} in a temporary file{how})"
    )
    if min(write, read) < _SLOW_BYTES_A_SECOND:
        advice = (
            "slower than an NVMe disk: restoring may take longer than computing; put nvme.path on a local NVMe disk"
        )
        yield warn("speed", seen, advice)
    else:
        yield ok("speed", seen)
    synced = f"median {human_seconds(measured.sync_s)} for a small write and its sync"
    if measured.sync_s > _SLOW_SYNC_S:
        yield warn(
            "sync", synced, "durable puts wait for it: a disk with power-loss protection syncs in well under 1 ms"
        )
    else:
        yield ok("sync", synced)


def measure(directory: Path, nbytes: int, progress: Progress) -> Measured:
    """Measure the speed of the disk that holds `directory`. The file it writes has no name, so nothing is left behind.
    Raises OSError.
    """
    try:
        fd, is_direct = unnamed_file(directory, os.O_DIRECT), True
    except OSError:
        fd, is_direct = unnamed_file(directory), False
    try:
        os.posix_fallocate(fd, 0, nbytes)
        with mmap.mmap(-1, _TRANSFER_BYTES) as pattern:
            pattern.write(os.urandom(_TRANSFER_BYTES))
            began_s = time.monotonic()
            written_bytes = _run(nbytes, partial(_write, fd, pattern), partial(_report, progress, "writing"))
            os.fdatasync(fd)
            write_s = time.monotonic() - began_s
        if not is_direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.monotonic()
        with ExitStack() as stack:
            buffers = [stack.enter_context(mmap.mmap(-1, _TRANSFER_BYTES)) for _ in range(_THREADS)]
            read_bytes = _run(written_bytes, partial(_read, fd, buffers), partial(_report, progress, "reading"))
        read_s = time.monotonic() - began_s
        sync_s = statistics.median(_sync(fd) for _ in range(_SYNCS))
    finally:
        os.close(fd)
    return Measured(written_bytes, write_s, read_bytes, read_s, sync_s, is_direct)


def _run(nbytes: int, transfer: Callable[[int], None], report: Callable[[int, int], None]) -> int:
    """Transfer `nbytes` from the front, several parts at once, until all are done or the time is over; return the bytes
    done.
    """
    until_s = time.monotonic() + MAX_S
    done_bytes = 0
    with ThreadPoolExecutor(_THREADS) as threads:
        for first in range(0, nbytes, _THREADS * _TRANSFER_BYTES):
            offsets = range(first, min(nbytes, first + _THREADS * _TRANSFER_BYTES), _TRANSFER_BYTES)
            list(threads.map(transfer, offsets))
            done_bytes = offsets[-1] + _TRANSFER_BYTES
            report(done_bytes, nbytes)
            if time.monotonic() > until_s:
                break
    return done_bytes


def _write(fd: int, pattern: mmap.mmap, offset: int) -> None:
    os.pwritev(fd, [pattern], offset)


def _read(fd: int, buffers: list[mmap.mmap], offset: int) -> None:
    """Read one part into a buffer of its own: neighbouring parts are read at once."""
    os.preadv(fd, [buffers[offset // _TRANSFER_BYTES % _THREADS]], offset)


def _sync(fd: int) -> float:
    """Write one page and sync it, and return the seconds that took."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        began_s = time.monotonic()
        os.pwritev(fd, [page], 0)
        os.fdatasync(fd)
        return time.monotonic() - began_s


def _report(progress: Progress, verb: str, done_bytes: int, nbytes: int) -> None:
    progress(f"{verb} a temporary file: {human_bytes(done_bytes)} of {human_bytes(nbytes)}")
