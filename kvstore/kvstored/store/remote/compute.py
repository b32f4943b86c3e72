"""What computing a block takes an engine, as the daemon sees it: the time from a get that missed it to its put.

Owns the misses that were not put yet, a bounded number, and an estimate for each tenant. A put may come later than the
computation ended, so the estimate follows shorter times faster than longer ones. Pure: the clock is an argument.
"""

from __future__ import annotations

from collections import OrderedDict

MOST_MISSES = 1024
LONGEST_US = 10_000_000  # a block: what takes longer was not computed at once
_WEIGHT_UP, _WEIGHT_DOWN = 1 / 8, 1 / 2


class ComputeTimes:
    def __init__(self) -> None:
        self._missed: OrderedDict[tuple[int, bytes], int] = OrderedDict()  # since when, oldest first
        self._block_us: dict[int, float] = {}

    def missed(self, tenant: int, key: bytes, now_ns: int) -> None:
        """A get found the blocks of a chain up to `key`, and not that one."""
        self._missed[tenant, key] = now_ns
        self._missed.move_to_end((tenant, key))
        if len(self._missed) > MOST_MISSES:
            self._missed.popitem(last=False)

    def put(self, tenant: int, key: bytes, blocks: int, now_ns: int) -> bool:
        """A put of so many blocks of a chain, the first of them `key`. Whether a get missed that one before."""
        since_ns = self._missed.pop((tenant, key), None)
        if since_ns is None:
            return False
        seen_us = (now_ns - since_ns) / 1000 / blocks
        if seen_us <= LONGEST_US:
            known_us = self._block_us.setdefault(tenant, seen_us)
            self._block_us[tenant] += (_WEIGHT_UP if seen_us > known_us else _WEIGHT_DOWN) * (seen_us - known_us)
        return True

    def block_us(self, tenant: int) -> float | None:
        """Microseconds that computing a block takes; None where nothing was seen yet."""
        return self._block_us.get(tenant)
