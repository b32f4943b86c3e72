"""The guard: a simulation of LRU beside the policy, whose order decides while it would have hit more.

A shadow holds no bytes: the keys that LRU would hold, for a sample of all blocks (by their keys, which are hashes), at
the tier's size. Its hits are compared with the tier's hits, on the sampled blocks of every request. LRU has to lead by
more than chance explains, clearly at first, later by little: if both hit about equally often, a false alarm costs next
to nothing, and if chains say much, LRU does not come near. It then decides for a while, after which the policy is tried
again, later each time it fails. The module owns the shadow and the verdict. It decides no victim.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_SHADOW_MAX = 1024  # keys; a larger tier is sampled
_MASK_MAX = 255
_DECAY = 0.998  # a request: verdicts are about the last 500
_SURE_FIRST, _SURE = 3.0, 1.0  # standard deviations: of the first requests that are judged,
_SETTLED = 500  # and of those so many requests later
_LEAD = 0.005  # and that share of the hits
_PROBATION_MIN = 200  # requests under LRU
_PROBATION_MAX = 10_000


class LruGuard:
    """A comparison of the policy chain-hazard with LRU (evict the block used longest ago), made on every request by a
    simulation of LRU on sampled blocks. `is_lru_ahead` is True while LRU should decide instead."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self.capacity = 0  # the most blocks the tier has held when room was needed
        self._most = 0  # or at all
        self.held_by_choice: int | None = None  # fewer than there is room for: LRU gets no more
        self._mask = 0
        self._ours = 0.0
        self._lead = 0.0  # of LRU, in hits
        self._spread = 0.0  # sum of squares of the requests' differences
        self._judged = 0  # requests
        self._probation = _PROBATION_MIN
        self._left = 0
        self.is_lru_ahead = False

    def numbers(self) -> list[float]:
        """Return the numbers to save for a restart; the sampled blocks are saved by `shadow`."""
        return [
            self.capacity, self._most, self._mask, self._ours, self._lead, self._spread, self._judged,
            self._probation, self._left, self.is_lru_ahead,
        ]  # fmt: skip

    def shadow(self) -> list[tuple[int, bytes]]:
        """Return the tenant and key of each sampled block that LRU would have in the tier, the next to evict first."""
        return list(self._held)

    def restore(self, numbers: Sequence[float], shadow: Iterable[tuple[int, bytes]]) -> None:
        """Continue from saved results of `numbers` and `shadow`."""
        capacity, most, mask, ours, lead, spread, judged, probation, left, is_lru_ahead = numbers
        self.capacity, self._most, self._mask = int(capacity), int(most), int(mask)
        self._ours, self._lead, self._spread, self._judged = ours, lead, spread, int(judged)
        self._probation, self._left, self.is_lru_ahead = int(probation), int(left), bool(is_lru_ahead)
        self._held = OrderedDict.fromkeys(shadow)

    def forget(self, tenant: int, key: bytes) -> None:
        self._held.pop((tenant, key), None)

    def forget_all(self, tenant: int) -> None:
        self._held = OrderedDict.fromkeys(name for name in self._held if name[0] != tenant)

    def resize(self, rows: int, *, is_full: bool = True) -> None:
        """Note that the tier holds `rows` blocks. `is_full`: it has no room for more."""
        if is_full and rows > self.capacity:
            self.capacity = rows
        if rows <= self._most:
            return
        self._most = rows
        halvings = max(0, math.ceil(math.log2(rows / _SHADOW_MAX)))
        mask = min(2**halvings - 1, _MASK_MAX)
        if mask != self._mask:
            self._mask = mask
            self._held = OrderedDict((name, None) for name in self._held if not name[1][-1] & mask)

    def used(
        self,
        tenant: int,
        keys: Sequence[bytes | None],
        rows: Sequence[int],
        fresh: int,
        missing: Sequence[bytes] = (),
    ) -> None:
        """Note that a request of `tenant` used the blocks `rows`, where `keys[row]` is a block's key. The last `fresh`
        of them were missing before and have been stored for this request; the blocks with the keys `missing` are still
        not stored."""
        held, mask = self._held, self._mask
        asked = [key for row in rows[: len(rows) - fresh] if (key := keys[row]) is not None and not key[-1] & mask]
        ours = len(asked)
        if fresh:
            asked += [key for row in rows[-fresh:] if (key := keys[row]) is not None and not key[-1] & mask]
        asked += [key for key in missing if not key[-1] & mask]
        hits, to_end = len(asked), held.move_to_end
        for key in reversed(asked):
            name = (tenant, key)
            try:
                to_end(name)
            except KeyError:
                held[name] = None
                hits -= 1
        if not self.capacity:  # there is room for all; what is missed is yet to be kept out
            room = 2 * max(_SHADOW_MAX, self._most // (mask + 1))
            while len(held) > room:
                held.popitem(last=False)
            return
        room = self.capacity if self.held_by_choice is None else min(self.capacity, self.held_by_choice)
        room //= mask + 1
        while len(held) > room:
            held.popitem(last=False)
        self._judge(hits - ours, ours)

    def _judge(self, lead: int, ours: int) -> None:
        self._ours = self._ours * _DECAY + ours
        self._lead = self._lead * _DECAY + lead
        self._spread = self._spread * _DECAY + lead * lead
        self._judged += 1
        if self.is_lru_ahead:
            self._left -= 1
            if self._left <= 0:
                self.is_lru_ahead = False
                self._lead = self._spread = 0.0
        elif self._lead > _LEAD * self._ours and self._lead > self._sure * math.sqrt(self._spread) > 0:
            self.is_lru_ahead = True
            self._left = self._probation
            self._probation = min(2 * self._probation, _PROBATION_MAX)

    @property
    def _sure(self) -> float:
        return max(_SURE, _SURE_FIRST - (_SURE_FIRST - _SURE) * self._judged / _SETTLED)
