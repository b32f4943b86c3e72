"""The NVMe tier's directory: there, the daemon's own, with room, on a disk, with direct I/O."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvctl.doctor.finding import Finding, fail, ok, warn
from kvctl.doctor.sockets import user_name
from kvctl.doctor.surroundings import Surroundings
from kvstore_console.units import human_bytes

_GOOD = {"ext4", "xfs", "ext3", "f2fs", "zfs"}
_WORSE = {
    "btrfs": "copy-on-write fragments slabs: chattr +C on the empty directory, or use ext4 or xfs",
    "overlay": "a container's layer, slow and gone with the container: mount a volume there",
    "9p": "a share of the host: mount a disk there",
}
_REMOTE = ("nfs", "cifs", "smb", "ceph", "fuse", "virtiofs", "gluster", "lustre")
_PAGE_BYTES = 4096


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
    """Free space against what the tier may still grow by."""
    path = around.settings.path("nvme.path")
    if path is None or not around.settings.flag("nvme.enabled"):
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
    path = around.settings.path("nvme.path")
    if path is None or not around.settings.flag("nvme.enabled"):
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
    """Write and read one page with O_DIRECT, in a file without a name."""
    path = around.settings.path("nvme.path")
    if path is None or not around.settings.flag("nvme.enabled"):
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


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists and can be seen."""
    for candidate in (path, *path.parents):
        with suppress(OSError):
            if candidate.is_dir():
                return candidate
    return Path("/")


def kind_of(around: Surroundings, path: Path) -> str:
    """The file system's type, by the mount that is nearest above the path."""
    best, kind = -1, ""
    real = path.resolve()
    for line in (around.read(around.proc / "self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].encode().decode("unicode_escape"))
        if (real == mount or mount in real.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split()[0]
    return kind


def unnamed_file(directory: Path, flags: int = 0) -> int:
    """A descriptor of a file that vanishes with it, however this process ends."""
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
    """What the tier's files take; 0 where we may not look."""
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
