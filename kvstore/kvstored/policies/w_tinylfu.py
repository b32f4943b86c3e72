"""W-TinyLFU: a block enters for good only if it was used more often lately than the one it would replace; leaf-first.

Einziger, Friedman, Manes: "TinyLFU: a highly efficient cache admission policy", ACM TOS 13(4), 2017, as in Caffeine:
new blocks live in a window, an LRU queue of a hundredth of the tier; what drops out of it stands against the oldest of
the main part, and the one whose key was seen less often leaves. The main part is a segmented LRU, four fifths of it
for what was used there. So admission is part of the choice of what leaves. A tier is taken to be full from the first
time that somebody asks for a victim; until then everything enters the main part. A bad choice for sessions: a new
turn's blocks have been seen once and lose against any old ones that were seen twice. Good where few prompts are shared
by many requests.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from kvstored.policies.base import PolicySettings
from kvstored.policies.queued import QueuedPolicy, first_of
from kvstored.policies.sketch import FrequencySketch
from kvstored.residency import ResidencyView

_WINDOW, _ARRIVED, _TRIAL, _KEPT = range(4)
_WINDOW_SHARE = 100
_KEPT_SHARE = 0.8
_FIRST_KEYS = 1024


class WTinyLfu(QueuedPolicy):
    """O(1) an event, and four counters a use."""

    name: ClassVar[str] = "w-tinylfu"
    queues: ClassVar[int] = 4

    def __init__(self, residency: ResidencyView, tier: int, settings: PolicySettings | None = None) -> None:
        super().__init__(residency, tier, settings)
        self._seen = FrequencySketch(_FIRST_KEYS)
        self._is_full = False

    def inserted(self, row: int, now_ns: int) -> None:
        super().inserted(row, now_ns)
        if self._rows > self._seen.keys:
            self._seen = FrequencySketch(2 * self._rows)  # what was counted with too few counters is worth little
        self._seen.add(self.residency.key(row))
        tenant = self.residency.tenant_of(row)
        window, sizes = self._queues[tenant][_WINDOW], self._sizes[tenant]
        while sizes[_WINDOW] > max(1, sum(sizes) // _WINDOW_SHARE) and window:
            self._move(window.front, tenant, _ARRIVED if self._is_full else _TRIAL)

    def _used(self, row: int, tenant: int) -> None:
        self._seen.add(self.residency.key(row))
        if self._queue_of[row] in (_WINDOW, _ARRIVED):
            self._move(row, tenant, self._queue_of[row])
            return
        self._move(row, tenant, _KEPT)
        sizes = self._sizes[tenant]
        while sizes[_KEPT] > max(1, _KEPT_SHARE * (sizes[_TRIAL] + sizes[_KEPT])) and self._queues[tenant][_KEPT]:
            self._move(self._queues[tenant][_KEPT].front, tenant, _TRIAL)

    def _candidate(self, tenant: int, refused: Collection[int]) -> int:
        self._is_full = True
        queues = self._queues[tenant]
        while True:
            newcomer, trial = first_of(queues[_ARRIVED], refused), first_of(queues[_TRIAL], refused)
            old = trial if trial >= 0 else first_of(queues[_KEPT], refused)
            if newcomer >= 0 and old >= 0 and self._count(newcomer) > self._count(old):
                self._move(newcomer, tenant, _TRIAL)
                continue
            if newcomer >= 0 or trial >= 0:
                return newcomer if newcomer >= 0 else trial
            fresh = first_of(queues[_WINDOW], refused)
            return fresh if fresh >= 0 else old

    def _count(self, row: int) -> int:
        return self._seen.count(self.residency.key(row))
