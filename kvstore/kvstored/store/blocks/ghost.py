"""The ghost: for keys that are gone, why and when they went and how often they had been used.

One per tenant, bounded by count; the one forgotten longest ago falls off. It answers why-miss and lets
admission see that a block which returns is not a block that was used once. It never holds bytes or token ids.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvstored.lifecycle import Cause

_CAUSE_BITS = 8
_ACCESS_BITS = 16
_ACCESS_MAX = (1 << _ACCESS_BITS) - 1
_TIME_SHIFT = _CAUSE_BITS + _ACCESS_BITS


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a key is not there. `at_ns` is monotonic; 0 when nothing is known of the key."""

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
        seen[key] = now_ns << _TIME_SHIFT | (accesses if accesses < _ACCESS_MAX else _ACCESS_MAX) << _CAUSE_BITS | cause
        if len(seen) == before:
            seen.move_to_end(key)
        elif before >= self._limit:
            seen.popitem(last=False)

    def recall(self, key: bytes) -> Absence | None:
        packed = self._seen.get(key)
        if packed is None:
            return None
        cause = Cause(packed & ((1 << _CAUSE_BITS) - 1))
        return Absence(cause, packed >> _TIME_SHIFT, packed >> _CAUSE_BITS & _ACCESS_MAX)

    def beginning_with(self, hex_digits: str) -> list[bytes]:
        """Keys that begin so in hex. A scan of all that is remembered: a millisecond per 10,000 keys."""
        whole = bytes.fromhex(hex_digits[: len(hex_digits) // 2 * 2])
        return [key for key in self._seen if key.startswith(whole) and key.hex().startswith(hex_digits)]

    def accesses(self, key: bytes) -> int:
        """How often the key had been used when it went; 0 when unknown."""
        packed = self._seen.get(key)
        return 0 if packed is None else packed >> _CAUSE_BITS & _ACCESS_MAX
