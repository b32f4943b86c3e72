"""The ghost: for removed blocks, the reason and time of removal, and the number of their uses.

There is one per tenant, bounded by count; the entry made longest ago is dropped first. It answers why-miss and lets
admission see that a block which returns is not a block that was used once. It never holds bytes or token ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstored.lifecycle import BY_ORDER, Cause

_CAUSE_BITS = 8
_ACCESS_BITS = 16
_CAUSE_MASK = 2**_CAUSE_BITS - 1
_ACCESS_MAX = 2**_ACCESS_BITS - 1
_TIME_SHIFT = _CAUSE_BITS + _ACCESS_BITS
_TICK_BITS = 20  # times are kept to a millisecond: all of an entry fits into 64 bits
_STEP = 2048  # places copied between two pauses: 0.3 ms
_BY_ORDER = [int(cause) for cause in BY_ORDER]
ABSENCE = np.dtype([("key", "V16"), ("packed", "<u8")])


@dataclass(frozen=True, slots=True)
class Absence:
    """The reason why a block is missing. `at_ns` is the monotonic time of its removal, exact to a millisecond, and
    `accesses` the number of its uses until then; both are 0 when nothing is known of the block.
    """

    cause: Cause
    at_ns: int = 0
    accesses: int = 0


class Ghost:
    """A bounded record of the removed blocks of one tenant: for each key why and when the block was removed, and how
    often it had been used. When the record is full, the oldest entry is dropped. Entries are in a ring, so that they
    can be copied in steps."""

    __slots__ = ("_keys", "_limit", "_next", "_oldest", "_packed", "_places", "_size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 2 * limit  # of the ring: as many gaps as keys
        self._places: dict[bytes, int] = {}
        self._keys: list[bytes | None] = []
        self._packed = array("Q")
        self._next = self._oldest = 0  # where the next key goes; no key is between that and the oldest

    def __len__(self) -> int:
        return len(self._places)

    def remember(self, key: bytes, cause: int, now_ns: int, accesses: int) -> None:
        if not self._limit:
            return
        places, keys, size, oldest = self._places, self._keys, self._size, self._oldest
        accesses = accesses if accesses < _ACCESS_MAX else _ACCESS_MAX
        packed = now_ns >> _TICK_BITS << _TIME_SHIFT | accesses << _CAUSE_BITS | cause
        before = places.get(key)
        if before is not None:
            keys[before] = None
        elif len(places) >= self._limit:
            while (last := keys[oldest]) is None:
                oldest = oldest + 1 if oldest + 1 < size else 0
            del places[last]
            keys[oldest] = None
        places[key] = at = self._next
        self._next = after = at + 1 if at + 1 < size else 0
        if len(keys) < size:
            keys.append(key)
            self._packed.append(packed)
        else:
            if at == oldest:  # the ring is full of gaps: the oldest is forgotten early
                if (last := keys[at]) is not None:
                    del places[last]
                oldest = after
            keys[at], self._packed[at] = key, packed
        self._oldest = oldest

    def recall(self, key: bytes) -> Absence | None:
        at = self._places.get(key)
        if at is None:
            return None
        packed = self._packed[at]
        cause = Cause(packed & _CAUSE_MASK)
        return Absence(cause, packed >> _TIME_SHIFT << _TICK_BITS, packed >> _CAUSE_BITS & _ACCESS_MAX)

    def beginning_with(self, hex_digits: str) -> list[bytes]:
        """Return the keys of removed blocks that begin with `hex_digits`. It scans all entries: a millisecond for
        10,000 keys.
        """
        whole = bytes.fromhex(hex_digits[: len(hex_digits) // 2 * 2])
        return [key for key in self._places if key.startswith(whole) and key.hex().startswith(hex_digits)]

    def accesses(self, key: bytes) -> int:
        """Return how often the block `key` had been used when it was removed, 0 when that is not known."""
        at = self._places.get(key)
        return 0 if at is None else self._packed[at] >> _CAUSE_BITS & _ACCESS_MAX

    def drop(self, key: bytes) -> None:
        """Mark the removed block `key` as removed by order. This process still gives that as the reason for a miss, and
        `copied`, which saves the record, leaves the key out. A key that is marked already keeps its reason."""
        at = self._places.get(key)
        if at is not None and self._packed[at] & _CAUSE_MASK not in _BY_ORDER:
            self._packed[at] = self._packed[at] & ~_CAUSE_MASK | Cause.DROPPED

    def drop_all(self) -> None:
        """Mark every removed block as removed by order, so that none of them is saved for a later process."""
        packed = np.frombuffer(self._packed, np.uint64)
        others = ~np.isin(packed & np.uint64(_CAUSE_MASK), _BY_ORDER)
        packed[others] = packed[others] & np.uint64(~_CAUSE_MASK & (1 << 64) - 1) | np.uint64(Cause.DROPPED)

    def copied(self) -> Iterator[npt.NDArray[np.void]]:
        """Yield the entries to save in steps, as arrays of dtype ABSENCE, without blocks that were removed by order.
        Other tasks may run between two steps; their changes may be included or not."""
        for first in range(0, len(self._keys), _STEP):
            keys = self._keys[first : first + _STEP]
            packed = np.array(self._packed[first : first + _STEP], np.uint64)
            packed = packed[[key is not None for key in keys]]
            found = np.empty(len(packed), ABSENCE)
            found["key"] = np.frombuffer(b"".join([key for key in keys if key is not None]), "V16")
            found["packed"] = packed
            yield found[~np.isin(packed & _CAUSE_MASK, _BY_ORDER)]

    def restore(self, copied: npt.NDArray[np.void], later_ns: int) -> None:
        """Add the entries `copied`, which an earlier process saved, for keys that this process knows nothing about.
        `later_ns` is added to their times, to translate them to this process's clock."""
        found = copied[np.argsort(copied["packed"], kind="stable")[-self._limit :]]
        packed = found["packed"]
        times_ns = np.maximum((packed >> _TIME_SHIFT << _TICK_BITS).astype(np.int64) + later_ns, 2**_TICK_BITS)
        causes, accesses = packed & _CAUSE_MASK, packed >> _CAUSE_BITS & _ACCESS_MAX
        columns = (column.tolist() for column in (found["key"], causes, times_ns, accesses))
        for key, cause, at_ns, uses in zip(*columns, strict=True):
            if key not in self._places:
                self.remember(key, cause, at_ns, uses)
