"""How fast the scrubber may read: so many bytes a second, no bursts after a pause. Pure: the clock is an argument."""

from __future__ import annotations


class Pace:
    """`rate_bytes` a second; a slot larger than that is waited for afterwards."""

    def __init__(self, rate_bytes: int) -> None:
        self._rate_bytes = rate_bytes
        self._free_at_s = 0.0

    def take(self, nbytes: int, now_s: float) -> float:
        """Account for `nbytes` that are about to be read; seconds to wait before reading them."""
        start_s = max(now_s, self._free_at_s)
        self._free_at_s = start_s + nbytes / self._rate_bytes
        return start_s - now_s
