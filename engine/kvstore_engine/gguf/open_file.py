"""A model's file by the one descriptor with which every process of an engine reads it, and the identity of that file;
or an object of the store, which each process maps by its name and version.

The module owns the descriptor and the identity that `fstat` gives. It does not read the content. A path may lead to
another file at any time; a descriptor does not, so child processes get it instead of the path. A write to the file
itself changes its identity: Linux sets the time of the last change at every write, and has no call to set it back.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvstore_engine.errors import OperationError
from kvstore_engine.gguf.cursor import GGUFError

# Two changes within one step of a file's times look alike. Older kernels' steps are the timer's, of 10 ms at most.
_TIMER_STEP_NS = 20_000_000
# Some file systems keep whole seconds (ext4 with inodes of 128 bytes, SFTP), or every second one (FAT).
_SECOND_NS = 1_000_000_000
STORED = "kvstore:"  # begins the path of an object
_MOST_STEPS = 10  # to wait for a file that is written to


class FileChanged(OperationError):
    """An error: a file in use no longer has the content that was read from it. The message names it."""


class FileIdentity(NamedTuple):
    """The device, inode, size and times of a file. If one of them differs, the file may have been changed. `changed_ns`
    differs also when only its name, owner or mode was changed.
    """

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    def may_hold_the_same(self, other: FileIdentity) -> bool:
        """Return True if this identity equals `other`, or differs only in `changed_ns`, so that the content may be
        unchanged.
        """
        return self[:-1] == other[:-1]


class OpenFile:
    """A regular file that is open for reading. `path` is its name in messages, `identity` its size and times when it
    was opened.
    """

    def __init__(self, path: Path, descriptor: int, identity: FileIdentity) -> None:
        self.path, self.descriptor, self.identity = path, descriptor, identity

    known_digest: tuple[str, str] | None = None
    """The digests of the weights and of the header (`FileDigest`) where they are known without reading the file."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> OpenFile:
        """Open the file `path` for reading, or the object that a path like kvstore:NAME means. Raises GGUFError if that
        fails or it is no regular file, FileChanged if another program is writing to it.
        """
        path = Path(path)
        if is_stored(path):
            return StoredFile(path)
        try:
            # Not blocking: a pipe would wait for its writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise GGUFError(f"{path}: cannot be opened: {error.strerror or error}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise GGUFError(f"{path}: cannot be opened: it is no regular file")
        made = cls.inherited(path, descriptor)
        try:
            made.identity = made.settled_identity()
        except FileChanged:
            made.close()
            raise
        return made

    @classmethod
    def inherited(cls, path: str | os.PathLike[str], descriptor: int, identity: FileIdentity | None = None) -> OpenFile:
        """Return an object for a file that the parent process opened: its path `path`, which is used in messages, and
        the `descriptor` that this process inherited. `identity` is the one that the parent found, by default the
        present one. Raises GGUFError for an object of the store that cannot be mapped.
        """
        if is_stored(Path(path)):
            os.close(descriptor)
            return StoredFile(Path(path), identity)
        if identity is not None:
            return cls(Path(path), descriptor, identity)
        return cls(Path(path), descriptor, _identity(Path(path), descriptor))

    def mapped(self) -> npt.NDArray[np.uint8]:
        """Return all bytes of the file as a read-only map. Raises OSError, and ValueError for an empty file."""
        with open(self.descriptor, "rb", closefd=False) as handle:
            return np.memmap(handle, np.uint8, mode="r")

    def current_identity(self) -> FileIdentity:
        """Return the size and times that the open file has now, which differ after a change. Raises OperationError if
        the file system does not answer.
        """
        return _identity(self.path, self.descriptor)

    def settled_identity(self) -> FileIdentity:
        """Return the size and times of the file, after waiting until any later write is certain to change them. Raises
        FileChanged if the file keeps changing.
        """
        for _ in range(_MOST_STEPS):
            found = self.current_identity()
            step_ns = _TIMER_STEP_NS if found.changed_ns % _SECOND_NS else 2 * _SECOND_NS + _TIMER_STEP_NS
            if abs(time.time_ns() - found.changed_ns) < step_ns:
                time.sleep(step_ns / 1e9)
                continue
            with contextlib.suppress(OSError):
                # Writes through a map are noticed at the first one to a page that is on disk: so all pages have to be.
                os.fdatasync(self.descriptor)
            return found
        raise FileChanged(f"{self.path}: another program is writing to this file: wait until it is complete")

    def close(self) -> None:
        """Close the descriptor. Parts of the file that are mapped stay mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class StoredFile(OpenFile):
    """A model that is an object of the store, mapped. `path` is kvstore:NAME, perhaps with @VERSION, and perhaps ? and
    the directory of the daemon's sockets. Its digest is the catalogue's, so nothing is read to know it. `identity` is
    the one that the content must have; GGUFError is raised if it has not, or cannot be mapped.
    """

    def __init__(self, path: Path, identity: FileIdentity | None = None) -> None:
        from kvstore_client.errors import DaemonUnavailable
        from kvstore_client.objects.store import label, open_objects
        from kvstore_proto.errors import KVStoreError

        name, _, sockets = str(path).removeprefix(STORED).partition("?")
        try:
            self._store = open_objects(sockets or None)
        except DaemonUnavailable as error:
            raise GGUFError(f"{path}: {error.message}") from None
        try:
            self._mapped = self._store.map(name)
        except KVStoreError as error:
            self._store.close()
            raise GGUFError(f"{path}: {error.message}") from None
        version, kind = self._mapped.version, self._mapped.manifest.kind
        if kind != "gguf":
            self._end()
            raise GGUFError(f"{path}: this object is {kind}, and no GGUF file")
        path = Path(f"{STORED}{label(version)}{'?' * bool(sockets)}{sockets}")
        mark = int.from_bytes(version.digest[:7], "little")
        self._own, digest = FileIdentity(0, mark, version.nbytes, 0, 0), self._mapped.digest
        super().__init__(path, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), self._own)
        self.known_digest = digest[:32], digest[32:]
        if identity not in (None, self._own):
            self.close()
            raise GGUFError(f"{path}: the object was replaced: start again")

    def mapped(self) -> npt.NDArray[np.uint8]:
        return self._mapped.content

    def current_identity(self) -> FileIdentity:
        return self._own

    def settled_identity(self) -> FileIdentity:
        return self._own

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        self._mapped.close()
        self._store.close()


def is_stored(path: Path) -> bool:
    """Return True if `path` means an object of the store, and no file."""
    return str(path).startswith(STORED)


def _identity(path: Path, descriptor: int) -> FileIdentity:
    try:
        found = os.fstat(descriptor)
    except OSError as error:
        raise OperationError(f"{path}: cannot be looked at: {error.strerror or error}") from None
    return FileIdentity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
