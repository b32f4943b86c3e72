"""Absences: blocks that key-addressed tiers said they do not have, for a short time.

Owns the negative answers, by tenant and key, each with how long it is believed: `FIRST_S` at first, twice as long each
time the answer is the same again, up to `LAST_S`. Pure: times are arguments. Invariants: an answer is never used for
another tenant; one for a block that this node has written there since, or that was deleted by order, is forgotten; at
most `MOST` are kept, the oldest answers are dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstored.clock import NS_PER_S

FIRST_S, LAST_S = 1.0, 30.0
MOST = 16384


class Absences:
    """See the module."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[tuple[int, bytes], tuple[int, float]] = OrderedDict()  # until when, and for how long

    def __len__(self) -> int:
        return len(self._known)

    def covers(self, tenant: int, key: bytes, now_ns: int) -> bool:
        """Whether the block is known not to be there."""
        known = self._known.get((tenant, key))
        return known is not None and now_ns < known[0]

    def note(self, tenant: int, key: bytes, now_ns: int) -> None:
        """The tiers have just said that they do not have the block."""
        known = self._known.pop((tenant, key), None)
        lasts_s = FIRST_S if known is None else min(LAST_S, 2 * known[1])
        self._known[tenant, key] = (now_ns + round(lasts_s * NS_PER_S), lasts_s)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Blocks `keys` of the tenant, or all of its blocks (None), have been written or deleted."""
        if keys is None:
            keys = [key for owner, key in self._known if owner == tenant]
        for key in keys:
            self._known.pop((tenant, key), None)
