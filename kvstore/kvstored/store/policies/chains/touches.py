"""Uses of a block by other chains than its own: a decayed count by row, which adds to what a shared block is worth.

Owns the two columns. Never knows chains.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

TAU_S = 300.0
_SPAN_MIN_S, _SPAN_FULL_S = 10.0, 0.999 * TAU_S
_FEW = 24  # rows, for which arrays do not pay


class SharedTouches:
    """`count`: touches, decayed as of `as_of_s`, by row. `span_s`: what a decayed count is to be divided by."""

    def __init__(self) -> None:
        self.count = array("d")
        self.as_of_s = array("d")
        self.span_s = _SPAN_MIN_S
        self.began_s = math.nan

    def grow(self, more: int) -> None:
        self.count.frombytes(bytes(8 * more))
        self.as_of_s.frombytes(bytes(8 * more))

    def rate(self, row: int, now_s: float) -> float:
        """Touches a second by others than the chain's own requests."""
        touches = self.count[row]
        if not touches:
            return 0.0
        return touches * math.exp((self.as_of_s[row] - now_s) / TAU_S) / self.span_s

    def add(self, rows: Sequence[int], now_s: float) -> None:
        """One more touch of each of `rows`."""
        if len(rows) <= _FEW:
            for row in rows:
                left = self.count[row] * math.exp((self.as_of_s[row] - now_s) / TAU_S)
                self.count[row], self.as_of_s[row] = left + 1.0, now_s
            return
        at = np.array(rows)
        count, since = np.frombuffer(self.count, np.float64), np.frombuffer(self.as_of_s, np.float64)
        count[at] = count[at] * np.exp((since[at] - now_s) / TAU_S) + 1.0
        since[at] = now_s

    def widen_span(self, now_s: float) -> None:
        """Until the decay forgets as much as is added, touches are of a shorter time than `TAU_S`."""
        if self.span_s >= _SPAN_FULL_S:
            return
        if math.isnan(self.began_s):
            self.began_s = now_s
        self.span_s = max(_SPAN_MIN_S, TAU_S * -math.expm1((self.began_s - now_s) / TAU_S))
