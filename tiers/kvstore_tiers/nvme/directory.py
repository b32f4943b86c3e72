"""A tier's directory: which process holds it, what is in it, what its file system can do.

    DIR/lock            held with flock for the life of the process; the holder's pid is written in it
    DIR/format          "format_version: 2", and which version made the directory
    DIR/slabs/N.slab    slab files; N.new one that is being made; N.damaged one whose geometry is lost
    DIR/seal            no record waits to be synced; only while no process has the directory open
    DIR/identity.json   whose blocks these are; the daemon's, not looked at here

Owns the lock, the seal and the paths. Never reads a block. The lock is the kernel's, on an open file, and needs no
space. The holder's number in it is for people, and shows whether another process was there. The directory itself is
locked too: where there is no file and none can be made that alone holds, also against a process that comes when there
is room again. The seal saves the next start the sync of all slabs; a file that says anything else is no seal.
Invariants: nothing in the directory is changed before the lock is held and the format is known to be ours; the seal is
written only when the last commit held, and is gone from the medium before a record changes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from kvstore_proto.replaced_file import remove_leftover, sync_directory
from kvstore_proto.version import VERSION
from kvstore_tiers.base import CANNOT_WRITE
from kvstore_tiers.nvme.directory_files import (
    DirectoryInUse,
    DirectoryUnusable,
    FormatUnsupported,
    LockMark,
    slab_numbers,
    slab_path,
)
from kvstore_tiers.nvme.layout import FORMAT_VERSION
from kvstore_tiers.replaced_file import replace_file

LOCK, FORMAT = "lock", "format"


def open_lock(directory: Path) -> int:
    """Open the file `lock` in `directory` and return its descriptor; the file is made if it is missing. If it cannot be
    made, a descriptor of the directory itself is returned. Nothing is locked yet. Raises OSError.
    """
    path = directory / LOCK
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
    with suppress(FileNotFoundError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def lock_directory(directory: Path) -> int:
    """Lock the directory itself (not its file `lock`), and return a descriptor that holds the lock until it is closed.
    Raises BlockingIOError if another process has the lock, OSError if the directory cannot be opened.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_holder(descriptor: int) -> bytes:
    """Return the process number that the lock file `descriptor` contains, as text; b"" if there is none."""
    with suppress(OSError):
        return os.pread(descriptor, 32, 0).strip()
    return b""


def write_holder(descriptor: int) -> bool:
    """Write this process's number into the lock file `descriptor` in place of the former number. Return False if that
    failed. The file never becomes shorter, since a full disk might not give the space again."""
    mark = f"{os.getpid()}\n".encode()
    try:
        os.pwrite(descriptor, mark, 0)
        os.ftruncate(descriptor, len(mark))
    except OSError:
        return False
    return True


SEAL = "seal"
_TEXT = b"no record waits to be synced\n"


class Seal:
    """A file in the tier's directory `path` which says that every change is durable. It saves the next start a sync of
    all slabs. `held` is True if a valid seal file existed when this object was made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path / SEAL
        self.held = self._holds()

    def remove(self) -> None:
        """Delete the seal file durably. Records may be changed only after that. Raises OSError."""
        if self._path.exists():
            self._path.unlink()
        sync_directory(self._path.parent)  # also for a process that was killed before it came to that

    def write(self) -> None:
        """Write the seal file, when every change is committed. Raises OSError."""
        replace_file(self._path, _TEXT, durable=False)

    def _holds(self) -> bool:
        try:
            return self._path.read_bytes() == _TEXT
        except OSError:
            return False


_LOG = logging.getLogger(__name__)
_FORMAT_KEY, _AUTHOR_KEY = "format_version", "written_by"
_LOOK_S, _LOOKS = 0.02, 50  # early_scan.py looks at the lock for microseconds, if not interrupted


class TierDirectory:
    """The opened and locked directory of an NVMe tier. With `create` False nothing is made, and nothing is written but
    the lock. `former` describes the lock file as the previous process left it. Raises DirectoryInUse, DirectoryUnusable
    or FormatUnsupported.
    """

    former: LockMark

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        self.path = Path(path)
        self.slabs = self.path / "slabs"
        self._lock_fd = self._own_fd = -1
        self._lacks_format = False
        try:
            if create:
                make_directory(self.path)
            self._lock_fd = self._lock()
            self._check_format(create)
            if create:
                self.slabs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self.close()
            raise DirectoryUnusable(
                f"{self.path} cannot hold blocks: {error.strerror or error}; "
                "give a directory that this user may write to"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the directory's lock. A second call does nothing."""
        for descriptor in {self._own_fd, self._lock_fd} - {-1}:
            os.close(descriptor)
        self._lock_fd = self._own_fd = -1

    def sync_names(self) -> None:
        """Make the names of the slab files and of their directories durable, also names that a killed process left
        unsynced. Raises OSError.
        """
        for directory in (self.slabs, self.path):
            sync_directory(directory)
        with suppress(PermissionError):  # as in `make_directory`
            sync_directory(self.path.absolute().parent)

    def is_in_place(self) -> bool:
        """Return True if the directory's path still leads to the lock that this process holds. It does not if the
        directory was replaced. Raises OSError if the path does not exist.
        """
        held = os.fstat(self._lock_fd)
        found = os.stat(self.path if stat.S_ISDIR(held.st_mode) else self.path / LOCK)
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def slab_path(self, number: int, suffix: str = "slab") -> Path:
        return slab_path(self.slabs, number, suffix)

    def numbers(self, suffix: str = "slab") -> list[int]:
        """Return the numbers of the slab files in `slabs/` whose names end in `suffix`, ascending. Files with other
        names are ignored.
        """
        return slab_numbers(self.slabs, suffix)

    def require_direct(self) -> None:
        """Raise DirectoryUnusable if the file system of the directory does not support direct I/O."""
        probe = self.slabs / "probe.new"
        try:
            probe.touch(mode=0o600)
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise
            return  # each slab that is there, or is made, is asked for it too
        try:
            os.close(open_direct(probe, require_direct=True)[0])
        finally:
            probe.unlink()

    def damaged_bytes(self) -> int:
        """Return the bytes of the slab files that were renamed to `.damaged` because their geometry (slot size and
        count) is lost.
        """
        return sum(allocated_bytes(self.slab_path(number, "damaged")) for number in self.numbers("damaged"))

    def put_aside(self, number: int) -> Path:
        """Rename the slab file `number` to a name that ends in `.damaged`, with another number if that name is taken.
        Return the new path.
        """
        aside = self.slab_path(number, "damaged")
        if aside.exists():
            taken = [*self.numbers(), *self.numbers("new"), *self.numbers("damaged")]
            aside = self.slab_path(max(taken) + 1, "damaged")
        self.slab_path(number).rename(aside)
        return aside

    def remove_unfinished(self) -> None:
        """Delete the slab files (`.new`) that a crash left unfinished."""
        for number in self.numbers("new"):
            with suppress(OSError):  # the next start may have more luck; making one of that number cuts it
                self.slab_path(number, "new").unlink()

    def _lock(self) -> int:
        fd = open_lock(self.path)
        looks = 0
        while not _locked(fd, fcntl.LOCK_EX):
            holder = read_holder(fd)
            is_looked_at = _locked(fd, fcntl.LOCK_SH)  # by a scan, which keeps it for microseconds and leaves no pid
            fcntl.flock(fd, fcntl.LOCK_UN)
            if not is_looked_at or looks == _LOOKS:
                os.close(fd)
                raise DirectoryInUse(str(self.path), int(holder) if holder.isdigit() and not is_looked_at else 0)
            looks += 1
            time.sleep(_LOOK_S)
        try:
            self._own_fd = fd if stat.S_ISDIR(os.fstat(fd).st_mode) else lock_directory(self.path)
        except BlockingIOError:
            os.close(fd)
            raise DirectoryInUse(str(self.path), 0) from None
        self.former = LockMark.of(fd)
        write_holder(fd)
        return fd

    def _check_format(self, create: bool) -> None:
        """Raise FormatUnsupported for a directory of another format."""
        path = self.path / FORMAT
        found = version_text(path)
        version = read_format(found)
        if version is not None and version != FORMAT_VERSION:
            raise FormatUnsupported(self.path, "it", version, FORMAT_VERSION, read_author(found))
        self._lacks_format = create and version is None
        if create and not self._lacks_format:
            remove_leftover(path)

    def keep_format(self) -> None:
        """Write the file `format`, which names the format's version, if it is missing or damaged. Call it only after
        each slab's superblock was found to have this version.
        """
        if not self._lacks_format:
            return
        path = self.path / FORMAT
        if version_text(path):
            _LOG.warning("%s is damaged: it is written anew", path)
        self._write_format(path)
        self._lacks_format = False

    def _write_format(self, path: Path) -> None:
        """Write the version of the format. Without this file a directory with slabs is still usable, since each slab
        holds its own version.
        """
        try:
            replace_file(path, f"{_FORMAT_KEY}: {FORMAT_VERSION}\n{_AUTHOR_KEY}: {VERSION}\n".encode())
        except OSError as error:
            if error.errno not in CANNOT_WRITE or not self.numbers():
                raise
            _LOG.warning("%s cannot be written (%s): the next start tries again", path, error.strerror)


def read_format(text: bytes) -> int | None:
    """Return the format version in `text`, the content of a tier's file `format`; None if the text has none."""
    key, _, version = text.partition(b"\n")[0].partition(b":")
    return version_number(version) if key == _FORMAT_KEY.encode() else None


def read_author(text: bytes) -> str:
    """Return the version of kvstored that made a tier's directory. `text` is the content of its file `format`; the
    result is "" if it does not name a version.
    """
    key, _, version = text.partition(b"\n")[2].partition(b":")
    said = version.strip().decode("ascii", "replace")
    return said if key == _AUTHOR_KEY.encode() and said.isprintable() else ""


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_directory(path: Path) -> None:
    """Make the directory `path` and all missing directories above it, and make their names durable. Raises OSError. If
    all of them exist, a sync that fails is no error.
    """
    path = path.absolute()
    is_there = path.is_dir()
    missing = [ancestor for ancestor in path.parents if not ancestor.is_dir()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for ancestor in {path.parent, *(above.parent for above in missing)}:
        try:
            sync_directory(ancestor)
        except PermissionError:
            pass  # we cannot open it, so this user did not make what is in it
        except OSError as error:
            if not is_there or error.errno not in CANNOT_WRITE:
                raise


def open_direct(path: Path, *, require_direct: bool = False, read_only: bool = False) -> tuple[int, bool]:
    """Open the slab file `path` for reading and writing slots. Return its descriptor, and True if it bypasses the page
    cache (O_DIRECT). If the file system has no direct I/O, return False, or raise DirectoryUnusable if `require_direct`
    is set. Raises OSError.
    """
    rights = os.O_RDONLY if read_only else os.O_RDWR
    try:
        return os.open(path, rights | os.O_DIRECT | os.O_CLOEXEC), True
    except OSError as error:
        if not is_without_direct(error):
            raise
    if require_direct:
        raise DirectoryUnusable(
            f"{path.parent} is on a file system without direct I/O, which the configuration requires: "
            "use a local disk, or allow buffered I/O"
        )
    return os.open(path, rights | os.O_CLOEXEC), False


def is_without_direct(error: OSError) -> bool:
    return error.errno in (22, 95)  # EINVAL, EOPNOTSUPP: what file systems answer to O_DIRECT they lack


def allocated_bytes(path: Path) -> int:
    """Return the bytes that the file `path` takes on the medium, or its length if that is more; 0 if it does not
    exist.
    """
    with suppress(FileNotFoundError):
        status = path.stat()
        return max(status.st_size, status.st_blocks * 512)
    return 0


_MOST_BYTES = 128  # read of a file that holds a version
_MOST_DIGITS = 9


def version_number(text: bytes) -> int | None:
    """Return the decimal number, of at most nine digits, that is all of `text`; None if the text is something else."""
    digits = text.strip()
    return int(digits) if digits.isdigit() and len(digits) <= _MOST_DIGITS else None


def version_text(path: Path) -> bytes:
    """Return the first 128 bytes of the file `path` without surrounding blanks and zero bytes; b"" if it is empty or
    missing. Raises OSError.
    """
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).strip(b"\0 \n")
    except FileNotFoundError:
        return b""
