"""Memory of this process that is shared with the worker, in parts, since registering each of them takes a moment.

Owns the numbers of the parts. A part is a region to the worker and to `Regions`, so no copy reaches over the border of
two registrations: what would goes by the bounce buffer.
Invariant: `unshare` ends when the worker has let go of every part, or is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.link import WorkerLink
from kvstore_tiers.gpu.regions import Regions


class SharedMemory:
    """In parts of `part_bytes`, a multiple of the page size. `finish` runs a job on a thread where it may take its
    time, or says False when that is closed."""

    def __init__(
        self, link: WorkerLink, regions: Regions, part_bytes: int, finish: Callable[[Callable[[], None]], bool]
    ) -> None:
        self._part_bytes = part_bytes
        self._link = link
        self._regions = regions
        self._finish = finish
        self._numbers = count(wire.BOUNCE_REGION + 1)
        self._parts: dict[int, list[int]] = {}  # by the number of the first
        self._lock = threading.Lock()

    def share(self, descriptor: int, address: int, nbytes: int) -> int:
        """See `Tier.share`."""
        parts: list[int] = []
        with self._lock:
            for offset in range(0, nbytes, self._part_bytes):
                part_bytes = min(self._part_bytes, nbytes - offset)
                parts.append(next(self._numbers))
                self._regions.add(parts[-1], address + offset, part_bytes)
                self._link.add_region(parts[-1], wire.Region(descriptor, offset, part_bytes))
            self._parts[parts[0]] = parts
        return parts[0]

    def unshare(self, number: int, ended: Callable[[], None]) -> None:
        """See `Tier.unshare`."""
        with self._lock:
            parts = self._parts.pop(number)
        left = count(len(parts) - 1, -1)

        def part_left() -> None:
            if not next(left) and not self._finish(ended):
                ended()

        for part in parts:
            self._regions.drop(part)
        for part in parts:
            self._link.drop_region(part, part_left)
