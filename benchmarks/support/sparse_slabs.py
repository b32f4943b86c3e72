"""Slab files whose slots are holes, so that ten million blocks fit on a small disk.

The daemon preallocates a slab and, at a start, gives space to a file that lacks some. `without_space` takes both away
from this process: a file gets its length, no space, and is taken for whole. Run as a program, this file is `kvstored`
under that rule. Nothing else differs: records and superblocks are on the medium, and a slot that is written gets its
space then. Imports nothing of the daemon's, so that its start takes no longer.
"""

from __future__ import annotations

import os
import runpy
import stat

_status = os.fstat
_SECTOR_BYTES = 512


def _give_length(fd: int, offset: int, nbytes: int) -> None:
    """Make the file `fd` at least `offset` + `nbytes` bytes long, as posix_fallocate does, without space."""
    if _status(fd).st_size < offset + nbytes:
        os.ftruncate(fd, offset + nbytes)


def _status_of_whole(fd: int) -> os.stat_result:
    """Return the status of the file `fd`; a regular file has space for all its bytes there."""
    found = _status(fd)
    if not stat.S_ISREG(found.st_mode):
        return found
    kind, (fields, others) = found.__reduce__()  # type: ignore[misc]
    return kind(fields, {**others, "st_blocks": -(-found.st_size // _SECTOR_BYTES)})  # type: ignore[operator]


def without_space() -> None:
    """Let this process make slab files without space, and take them for whole."""
    os.posix_fallocate = _give_length
    os.fstat = _status_of_whole  # type: ignore[assignment]


if __name__ == "__main__":
    without_space()
    runpy.run_module("kvstored", run_name="__main__", alter_sys=True)
