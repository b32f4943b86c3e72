"""The ghost: for keys that are gone, why and when they went and how often they had been used.

One per tenant, bounded by count; the one forgotten longest ago falls off. It answers why-miss and lets
admission see that a block which returns is not a block that was used once. It never holds bytes or token ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstored.lifecycle import BY_ORDER, Cause

_CAUSE_BITS = 8
_ACCESS_BITS = 16
_ACCESS_MAX = (1 << _ACCESS_BITS) - 1
_TIME_SHIFT = _CAUSE_BITS + _ACCESS_BITS
_TICK_BITS = 20  # times are kept to a millisecond: all of an entry fits into 64 bits
_STEP = 2048  # keys copied between two pauses: 0.3 ms
_COPIED_MAX = 1 << 16  # keys
_BY_ORDER = [int(cause) for cause in BY_ORDER]
ABSENCE = np.dtype([("key", "<u8", (2,)), ("packed", "<u8")])


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a key is not there. `at_ns` is monotonic, to the millisecond; 0 when nothing is known of the key."""

    cause: Cause
    at_ns: int = 0
    accesses: int = 0


class Ghost:
    """Key → cause, time, accesses, packed into one int each."""

    __slots__ = ("_limit", "_seen")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def remember(self, key: bytes, cause: Cause, now_ns: int, accesses: int) -> None:
        seen = self._seen
        before = len(seen)
        accesses = accesses if accesses < _ACCESS_MAX else _ACCESS_MAX
        seen[key] = now_ns >> _TICK_BITS << _TIME_SHIFT | accesses << _CAUSE_BITS | cause
        if len(seen) == before:
            seen.move_to_end(key)
        elif before >= self._limit:
            seen.popitem(last=False)

    def recall(self, key: bytes) -> Absence | None:
        packed = self._seen.get(key)
        if packed is None:
            return None
        cause = Cause(packed & ((1 << _CAUSE_BITS) - 1))
        return Absence(cause, packed >> _TIME_SHIFT << _TICK_BITS, packed >> _CAUSE_BITS & _ACCESS_MAX)

    def beginning_with(self, hex_digits: str) -> list[bytes]:
        """Keys that begin so in hex. A scan of all that is remembered: a millisecond per 10,000 keys."""
        whole = bytes.fromhex(hex_digits[: len(hex_digits) // 2 * 2])
        return [key for key in self._seen if key.startswith(whole) and key.hex().startswith(hex_digits)]

    def accesses(self, key: bytes) -> int:
        """How often the key had been used when it went; 0 when unknown."""
        packed = self._seen.get(key)
        return 0 if packed is None else packed >> _CAUSE_BITS & _ACCESS_MAX

    def forget(self, key: bytes) -> None:
        self._seen.pop(key, None)

    def clear(self) -> None:
        self._seen.clear()

    def copied(self) -> Iterator[npt.NDArray[np.void]]:
        """What is remembered (dtype ABSENCE), a step at a time, but for blocks that went by order: those are to leave
        no trace. The caller may let others go on between two steps; what changes meanwhile may be in it or not.
        """
        seen: dict[bytes, int] = self._seen
        keys_of, values_of = dict[bytes, int].keys, dict[bytes, int].values
        for first in range(0, min(len(seen), _COPIED_MAX), _STEP):
            # The views of `dict` go through an OrderedDict five times as fast, in the order of first entry.
            keys = b"".join(islice(reversed(keys_of(seen)), first, first + _STEP))
            packed = np.fromiter(islice(reversed(values_of(seen)), first, first + _STEP), np.uint64)
            found = np.empty(len(packed), ABSENCE)
            found["key"], found["packed"] = np.frombuffer(keys, "<u8").reshape(-1, 2), packed
            yield found[~np.isin(packed & ((1 << _CAUSE_BITS) - 1), _BY_ORDER)]

    def restore(self, copied: npt.NDArray[np.void], later_ns: int) -> None:
        """Remember what `copied` gave, as of times that are `later_ns` later on this clock."""
        packed = copied["packed"]
        ticks = np.maximum((packed >> _TIME_SHIFT).astype(np.int64) + (later_ns >> _TICK_BITS), 1).astype(np.uint64)
        packed = ticks << _TIME_SHIFT | packed & ((1 << _TIME_SHIFT) - 1)
        newest = np.argsort(packed, kind="stable")[-self._limit :]
        keys = np.ascontiguousarray(copied["key"][newest]).view("V16").reshape(-1).tolist()
        self._seen.update(zip(keys, packed[newest].tolist(), strict=True))
