"""Slabs to be judged, shared by two processes: each slab is taken by one of them.

Owns a pipe that is filled once and never written to again: reading a whole number from it is atomic, and at its end
there is none left. Imports only modules that are loaded already.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_NUMBER_BYTES = 4
_NUMBERS = 1 << 8 * _NUMBER_BYTES
_ROOM_BYTES = 64 << 10  # what most pipes hold; the tier scans further slabs by itself


class SlabQueue:
    """The end of the pipe at which numbers of slabs are taken."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def of(cls, numbers: Iterable[int]) -> SlabQueue:
        """These, as many as there is room for, and none that is larger than a slab's can be."""
        fd, filling = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(filling, False)  # a user with many pipes gets small ones
        packed = b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in numbers if number < _NUMBERS)
        os.write(filling, packed[:_ROOM_BYTES])
        os.close(filling)
        return cls(fd)

    def take(self) -> int | None:
        """A number that no other caller gets; None when none is left."""
        raw = os.read(self.fd, _NUMBER_BYTES)
        return int.from_bytes(raw, "little") if raw else None

    def close(self) -> None:
        os.close(self.fd)
