"""Whether a directory's medium works: scratch bytes written, synced, read back past the cache and compared.

Touches no block, no record and no slab but to read a superblock. The scratch file has no name, so a crash leaves
nothing of it. Runs on an I/O thread: on a medium that hangs it hangs with everything else, which is the right answer.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable

from kvstore_proto.arena import ALIGNMENT_BYTES
from kvstore_tiers import failpoints
from kvstore_tiers.nvme.directory import TierDirectory, is_without_direct
from kvstore_tiers.nvme.layout import SUPERBLOCK_BYTES, read_superblock
from kvstore_tiers.nvme.slab import Slab
from kvstore_tiers.segments import AlignedBuffer, buffer_at, put_bytes


def require_place(directory: TierDirectory) -> None:
    """Raise OSError when the directory is no longer the one that was opened: removed, unmounted, or replaced."""
    try:
        is_in_place = directory.is_in_place()
    except FileNotFoundError:
        raise OSError(errno.ENOENT, f"{directory.path} is gone: removed, or its file system is not mounted") from None
    if not is_in_place:
        raise OSError(errno.ESTALE, f"{directory.path} is another directory now than the one that was opened")


def probe_medium(directory: TierDirectory, slabs: Iterable[Slab]) -> int:
    """Raise OSError when the medium does not keep what is written to it; else the bytes free on its file system."""
    require_place(directory)
    failpoints.hit("nvme.probe")
    made = next((slab for slab in slabs if slab.is_made), None)
    if made is not None:
        _read_slab(made)
    _round_trip(directory)
    room = os.statvfs(directory.path)
    return room.f_bavail * room.f_frsize


def _read_slab(slab: Slab) -> None:
    page = AlignedBuffer(SUPERBLOCK_BYTES)
    got_bytes = os.preadv(slab.file.slot_fd, [buffer_at(page.address, SUPERBLOCK_BYTES)], 0)
    if got_bytes != SUPERBLOCK_BYTES or isinstance(read_superblock(buffer_at(page.address, got_bytes).raw), str):
        raise OSError(errno.EIO, f"the superblock of slab {slab.number} does not read back")


def _round_trip(directory: TierDirectory) -> None:
    """An unnamed file of one page."""
    page = AlignedBuffer(ALIGNMENT_BYTES)
    wanted = secrets.token_bytes(ALIGNMENT_BYTES)
    put_bytes(page.address, wanted)
    vector = [buffer_at(page.address, ALIGNMENT_BYTES)]
    descriptor = _open_scratch(directory)
    try:
        if os.pwritev(descriptor, vector, 0) != ALIGNMENT_BYTES:
            raise OSError(errno.EIO, "scratch bytes were written in part")
        os.fdatasync(descriptor)
        put_bytes(page.address, bytes(ALIGNMENT_BYTES))
        if os.preadv(descriptor, vector, 0) != ALIGNMENT_BYTES or vector[0].raw != wanted:
            raise OSError(errno.EIO, "scratch bytes read back other than they were written")
    finally:
        os.close(descriptor)


def _open_scratch(directory: TierDirectory) -> int:
    """Unnamed where the file system can; else a name that is gone as soon as it is open."""
    try:
        return os.open(directory.path, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if not is_without_direct(error) and error.errno not in (errno.EISDIR, errno.ENOENT):
            raise
    path = directory.path / "probe"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor
