"""Host memory that the worker has mapped too, so that the device copies from and to it without a bounce.

Owns which addresses of this process are where in which region. Never allocates memory, never follows an address.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from kvstore_tiers.segments import Segment


class Place(NamedTuple):
    region: int
    offset: int
    nbytes: int


class Regions:
    """May be asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: list[tuple[int, int, int]] = []  # address, bytes, number; sorted

    def add(self, number: int, address: int, nbytes: int) -> None:
        with self._lock:
            self._by_address = sorted([*self._by_address, (address, nbytes, number)])

    def drop(self, number: int) -> None:
        with self._lock:
            self._by_address = [entry for entry in self._by_address if entry[2] != number]

    def locate(self, segments: Iterable[Segment]) -> list[Place] | None:
        """Where the segments are; None when a part of them is in no region."""
        regions = self._by_address
        places: list[Place] = []
        for segment in segments:
            if not segment.nbytes:
                continue
            at = bisect_right(regions, segment.address, key=lambda entry: entry[0]) - 1
            if at < 0:
                return None
            address, nbytes, number = regions[at]
            if segment.address + segment.nbytes > address + nbytes:
                return None
            places.append(Place(number, segment.address - address, segment.nbytes))
        return places
