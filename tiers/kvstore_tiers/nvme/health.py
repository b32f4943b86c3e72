"""The state of the tier, judged by how its transfers end.

Owns the state and the reason for it. Never retries anything itself. ENOSPC and similar errors make the tier FULL: it
keeps the slabs it has and tries a new one again after a pause. EROFS, or several write errors in a row, make it
READ_ONLY; several read errors in a row make it FAILED. Both last until a probe wrote, synced and read back: a medium
that did this is trusted again only on proof. A probe touches no block, no record and no slab but to read a superblock;
its scratch file has no name, so a crash leaves nothing of it. It runs on an I/O thread: on a medium that hangs it hangs
with everything else, which is the right answer.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterable

from kvstore_proto.arena import ALIGNMENT_BYTES
from kvstore_tiers import failpoints
from kvstore_tiers.base import ERRORS_IN_A_ROW, NO_ROOM, Outcome, OutcomeKind, TierState
from kvstore_tiers.nvme.directory import TierDirectory, is_without_direct
from kvstore_tiers.nvme.layout import SUPERBLOCK_BYTES, read_superblock
from kvstore_tiers.nvme.slab import Slab
from kvstore_tiers.segments import AlignedBuffer, buffer_at, put_bytes

RETRY_FULL_AFTER_S = 30.0


class TierHealth:
    """A judge of an NVMe tier's state by the outcomes of its transfers: OK, FULL, READ_ONLY or FAILED, with the reason
    in `message`. Any thread may report outcomes. `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._write_errors = 0
        self._read_errors = 0
        self._full_since_s = 0.0
        self.state = TierState.OK
        self.message = ""

    @property
    def may_grow(self) -> bool:
        """True if the tier may try to make another slab file. After the medium was full, it may not for 30 seconds."""
        if self.state is TierState.FULL:
            return self._clock() - self._full_since_s >= RETRY_FULL_AFTER_S
        return self.state is TierState.OK

    @property
    def may_write(self) -> bool:
        return self.state in (TierState.OK, TierState.FULL)

    def watch_write(self, outcome: Outcome) -> Outcome:
        """Use the `outcome` of a write or sync to judge the tier's state, and return it unchanged."""
        if outcome.kind is OutcomeKind.FAILED:
            with self._lock:
                if outcome.errno in NO_ROOM:
                    self._full_since_s = self._clock()
                    self._worsen(TierState.FULL, outcome)
                else:
                    self._write_errors += 1
                    if outcome.errno == errno.EROFS or self._write_errors >= ERRORS_IN_A_ROW:
                        self._worsen(TierState.READ_ONLY, outcome)
        elif outcome.ok:
            self._write_errors = 0
        return outcome

    def watch_read(self, outcome: Outcome) -> Outcome:
        """Use the `outcome` of a read to judge the tier's state, and return it unchanged."""
        if outcome.kind is OutcomeKind.FAILED and outcome.errno:
            with self._lock:
                self._read_errors += 1
                if self._read_errors >= ERRORS_IN_A_ROW:
                    self._worsen(TierState.FAILED, outcome)
        elif outcome.ok:
            self._read_errors = 0
        return outcome

    def hold_back(self, reason: str) -> None:
        """Make the tier READ_ONLY for `reason` until a probe succeeds."""
        self.state, self.message = TierState.READ_ONLY, reason

    def note_growth(self) -> None:
        """Note that a slab file could be made, so that a tier that was FULL is OK again."""
        with self._lock:
            if self.state is TierState.FULL:
                self.state, self.message = TierState.OK, ""

    def note_probe(self, free_bytes: int, slab_bytes: int) -> None:
        """Note that a probe succeeded, so that the tier is OK again. A tier that is FULL stays FULL if the file system
        has only `free_bytes` free and the next slab file needs more, `slab_bytes`.
        """
        with self._lock:
            if self.state is TierState.FULL and free_bytes < slab_bytes:
                return
            self._write_errors = self._read_errors = 0
            self.state, self.message = TierState.OK, ""

    def _worsen(self, state: TierState, outcome: Outcome) -> None:
        order = (TierState.OK, TierState.FULL, TierState.READ_ONLY, TierState.FAILED)
        if order.index(state) > order.index(self.state):
            self.state, self.message = state, outcome.message


def require_place(directory: TierDirectory) -> None:
    """Raise OSError if the path of `directory` no longer leads to the directory that was opened, because it was
    removed, unmounted or replaced.
    """
    try:
        is_in_place = directory.is_in_place()
    except FileNotFoundError:
        raise OSError(errno.ENOENT, f"{directory.path} is gone: removed, or its file system is not mounted") from None
    if not is_in_place:
        raise OSError(errno.ESTALE, f"{directory.path} is another directory now than the one that was opened")


def probe_medium(directory: TierDirectory, slabs: Iterable[Slab]) -> int:
    """Test the medium of `directory`: read a superblock of one of `slabs`, then write, sync and read back a scratch
    page. Return the free bytes of the file system. Raises OSError if the medium does not keep what is written.
    """
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
    """Write an unnamed file of one page, sync it, and read it back."""
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
    """Open a scratch file: unnamed where the file system supports that, else under a name that is deleted as soon as
    the file is open.
    """
    try:
        return os.open(directory.path, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if not is_without_direct(error) and error.errno not in (errno.EISDIR, errno.ENOENT):
            raise
    path = directory.path / "probe"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor
