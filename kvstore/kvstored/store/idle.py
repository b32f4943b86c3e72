"""The removal of idle copies from a tier: copies that were not used for `ttl_s`, and chains worth less than
`keep_worth`.

It looks at one part of the columns at a time, with any policy, and removes a copy only where the copy may be evicted. A
copy that is used in time stays. The purpose is to free room; it is no promise that a block will be gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstored.clock import NS_PER_S
from kvstored.lifecycle import CopyState
from kvstored.store.blocks import ResidencyView
from kvstored.store.blocks.rows import as_array
from kvstored.store.policies import EvictionPolicy, Weighs
from kvstored.store.transfer.room import Room

PART_ROWS = 1 << 16  # looked at in one tick: about 0.1 ms
MOST_A_TICK = 64


def idle_rows(residency: ResidencyView, tier: int, part: slice, before_ns: int) -> list[int]:
    """Return the rows in the slice `part` of the block table whose readable copy in `tier` was last used at `before_ns`
    or earlier. The row unused for the longest time is first; of equal ones, children come before their parents."""
    first = part.start or 0
    state = np.frombuffer(residency.copies[tier].state, np.uint8)[part]
    last_ns = np.frombuffer(residency.rows.last_access_ns, np.uint64)[part][: len(state)]
    found = np.flatnonzero((last_ns <= np.uint64(max(before_ns, 0))) & (state == CopyState.RESIDENT))
    depth = as_array(residency.rows.depth)[part][found]
    rows: list[int] = (found[np.lexsort((-depth.astype(np.int64), last_ns[found]))] + first).tolist()
    return rows


class IdleCopies:
    """A component that removes block copies which were not used for too long, or have too few expected uses. `policies`
    and `rooms` (allocators of slots) have one item for each tier, by position."""

    def __init__(self, residency: ResidencyView, policies: Sequence[EvictionPolicy], rooms: Sequence[Room]) -> None:
        self._residency = residency
        self._policies, self._rooms = policies, rooms
        self._ttl_ns: dict[int, int] = {}  # by tier
        self._hands: dict[int, int] = {}  # by tier: the row that the next look begins with

    def set_ttl(self, tier: int, ttl_s: float) -> None:
        """Set after how many seconds without a use copies in `tier` are removed; 0 means never."""
        self._ttl_ns.pop(tier, None)
        if ttl_s:
            self._ttl_ns[tier] = round(ttl_s * NS_PER_S)

    def tick(self, now_ns: int) -> None:
        """Look at the next part of the blocks in each tier, and remove idle copies among them."""
        for tier, ttl_ns in self._ttl_ns.items():
            self._expire_idle(tier, now_ns - ttl_ns)
        for policy, room in zip(self._policies, self._rooms, strict=True):
            if isinstance(policy, Weighs) and policy.settings.keep_worth:
                for row in policy.below_keep_worth(now_ns, MOST_A_TICK):
                    room.expire(row)

    def _expire_idle(self, tier: int, before_ns: int) -> None:
        residency, room = self._residency, self._rooms[tier]
        first = self._hands.get(tier, 0)
        first = first if first < residency.rows.capacity else 0
        end, left = first + PART_ROWS, MOST_A_TICK
        for row in idle_rows(residency, tier, slice(first, end), before_ns):
            if not left:
                end = first  # there is more here
                break
            left -= room.expire(row)
        self._hands[tier] = end
