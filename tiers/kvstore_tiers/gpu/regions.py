"""Host memory that the worker has registered too, so that the device copies from and to it without a bounce.

The module owns which addresses of this process are in which region, and the worker's report about each. It never
allocates memory, and never follows an address. Invariant: memory that no worker has reported as registered is not
located.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import NamedTuple

from kvstore_tiers.segments import Segment

_LOG = logging.getLogger(__name__)


class RegionPart(NamedTuple):
    region: int
    offset: int
    nbytes: int


class _Usable(NamedTuple):
    address: int
    nbytes: int
    number: int
    is_writable: bool


class Regions:
    """The table of the host memory (in numbered regions) that the GPU worker has registered with the device, so that
    the device can copy directly from and to it. `name` is the tier's name in the log. Any thread may use it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._known: dict[int, tuple[int, int]] = {}  # address and bytes, by number
        self._usable: list[_Usable] = []  # sorted; replaced, never changed
        self.refusal = ""  # why this worker has not registered a region, the last one
        self._was_refused = False

    def add(self, number: int, address: int, nbytes: int) -> None:
        with self._lock:
            self._known[number] = address, nbytes

    def drop(self, number: int) -> None:
        with self._lock:
            del self._known[number]
            self._usable = [each for each in self._usable if each.number != number]

    def registered(self, number: int, is_writable: bool) -> None:
        """Note that the worker has registered the region `number` of host memory with the device. Unless `is_writable`,
        the device may only read from it.
        """
        with self._lock:
            if number in self._known:
                usable = self._usable.copy()
                insort(usable, _Usable(*self._known[number], number, is_writable))
                self._usable = usable

    def refused(self, why: str) -> None:
        """Note that a region of host memory could not be registered with the device for the reason `why`. Its bytes
        then go through the bounce buffer (host memory that the worker always has).
        """
        if not self._was_refused:
            _LOG.warning("%s copies host memory through its bounce buffer: %s", self._name, why)
        self.refusal, self._was_refused = why, True

    def worker_ended(self) -> None:
        with self._lock:
            self._usable = []
        self.refusal = ""

    @property
    def registered_bytes(self) -> int:
        return sum(each.nbytes for each in self._usable)

    def locate(self, segments: Iterable[Segment], *, to_write: bool) -> list[RegionPart] | None:
        """Return the place of each of `segments` in registered host memory: the region's number, an offset and a number
        of bytes. Return None if a part of them is in no registered region. With `to_write`, regions that the device may
        only read do not count.
        """
        regions = self._usable
        places: list[RegionPart] = []
        for segment in segments:
            if not segment.nbytes:
                continue
            at = bisect_right(regions, segment.address, key=lambda each: each.address) - 1
            if at < 0:
                return None
            found = regions[at]
            if segment.address + segment.nbytes > found.address + found.nbytes or (to_write and not found.is_writable):
                return None
            places.append(RegionPart(found.number, segment.address - found.address, segment.nbytes))
        return places
