"""The order of blocks with a priority: they leave a tier by their priority; another policy orders all other blocks.

The tier's policy listens to events of these blocks too, but does not name them as victims (`policy_may_name`). This
module adds one order for each tier: by priority, then by last use, the tail of a chain first. Until the first block is
given a priority, no order is kept and no event is handled twice. The module makes no decision about time:
`store/retention.py` sets priorities, and `transfer/victims.py` asks for victims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks import Residency, ResidencyView
from kvstored.store.blocks.events import KeyListener, TierListener
from kvstored.store.policies.base import EvictionPolicy, Rows
from kvstored.store.policies.ordered import OUT, QUEUED, OrderedPolicy
from kvstored.store.policies.rowqueue import QueueArrays, RowQueue

_STAMP_BITS = 64


class Ranked(OrderedPolicy):
    """An order of the blocks of one tier that have a priority: the lowest priority first, then the least
    recently used.
    """

    def __init__(self, residency: ResidencyView, tier: int) -> None:
        super().__init__(residency, tier, name="priority")
        self.may_name = residency.is_evictable
        self._links = QueueArrays()
        self._queues: list[dict[int, RowQueue]] = []  # by tenant, then priority

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        self.expect_accesses(len(rows))
        for row in reversed(rows):
            tenant = self.residency.tenant_of(row)
            if self.where[row] == QUEUED:
                self._dequeue(row, tenant)
            self.accesses += 1
            self.stamp[row] = self.accesses
            self._enqueue(row, tenant)
            self.where[row] = QUEUED

    def knows(self, rows: Sequence[int]) -> list[int]:
        """Return the rows among `rows` that are in this order, because they have a priority and a copy in the tier."""
        where = self.where
        return [row for row in rows if row < len(where) and where[row] != OUT]

    def classes(self, rows: Rows, now_ns: int) -> npt.NDArray[np.int64]:
        return np.zeros(len(rows), np.int64)

    # The order

    def _enqueue(self, row: int, tenant: int) -> None:
        queues, priority = self._queues[tenant], self.residency.priority(row)
        if priority not in queues:
            queues[priority] = RowQueue(self._links)
        queues[priority].push_back(row)

    def _dequeue(self, row: int, tenant: int) -> None:
        self._queues[tenant][self.residency.priority(row)].unlink(row)

    def _queue(self, tenant: int) -> Iterator[int]:
        for _, queue in sorted(self._queues[tenant].items()):
            yield from queue

    def _rank(self, row: int) -> int:
        return self.residency.priority(row) << _STAMP_BITS | self.stamp[row]

    def add_tenant(self) -> None:
        super().add_tenant()
        self._queues.append({})

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        self._links.grow(rows)


class _Both:
    """The listener of a tier that has blocks with a priority: it passes each event to the policy and to the order of
    these blocks."""

    def __init__(self, policy: TierListener, ranked: Ranked) -> None:
        self._policy, self._ranked = policy, ranked

    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        self._policy.inserted(rows, now_ns)
        priority = self._ranked.residency.priority
        if here := [row for row in rows if priority(row)]:
            self._ranked.inserted(here, now_ns)

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        self._policy.accessed(rows, now_ns)
        if here := self._ranked.knows(rows):
            self._ranked.accessed(here, now_ns)

    def removed(self, rows: Sequence[int]) -> None:
        self._policy.removed(rows)
        if here := self._ranked.knows(rows):
            self._ranked.removed(here)

    def released(self, row: int) -> None:
        self._policy.released(row)
        if self._ranked.knows((row,)):
            self._ranked.released(row)


class _BothByKey(_Both):
    """`_Both` for a policy that follows keys that are not stored."""

    def __init__(self, policy: KeyListener, ranked: Ranked) -> None:
        super().__init__(policy, ranked)  # type: ignore[arg-type]  # it is a TierListener too
        self._by_key = policy

    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        self._by_key.requested(rows, missing, tenant, now_ns)
        if here := self._ranked.knows(rows):
            self._ranked.accessed(here, now_ns)

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        self._by_key.forget(tenant, keys)


class Priorities:
    """The blocks that have a priority, in their order of eviction. `in_tier` maps a tier to the order of its blocks
    with a priority; it is empty until the first block gets one."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._policies: dict[int, EvictionPolicy] = {}
        self.in_tier: dict[int, Ranked] = {}

    def follow(self, policy: EvictionPolicy) -> None:
        """Let `policy` order the blocks of its tier that have no priority, from now on."""
        self._policies[policy.tier] = policy
        if self.in_tier:
            self._listen(policy)

    def set(self, row: int, priority: int, now_ns: int) -> None:
        """Set the priority of the readable block at `row` to `priority`; 0 removes it."""
        residency = self._residency
        if residency.priority(row) == priority:
            return
        if not self.in_tier:
            self.begin(())
        tiers = residency.tier_mask(row)
        here = [ranked for tier in tiers if (ranked := self.in_tier[tier]).knows((row,))]
        for ranked in here:
            ranked.removed((row,))
        residency.rows.optional.set("priority", row, priority)
        if priority:
            for tier in tiers:
                self.in_tier[tier].inserted((row,), now_ns)
        else:
            residency.release(row)

    def resume(self) -> None:
        """Enter the recovered blocks that have a priority into the order, by their last use. Call it at the start."""
        priority = self._residency.rows.optional.view("priority")
        if priority is not None:
            rows = np.flatnonzero(priority)
            last_ns = np.frombuffer(self._residency.rows.last_access_ns, np.uint64)[rows]
            del priority  # the column may grow again
            self.begin(rows[np.argsort(last_ns, kind="stable")].tolist())

    def begin(self, rows: Sequence[int]) -> None:
        """Enter the blocks `rows`, which have a priority already, into the order of each tier that has a copy. Of
        blocks with equal priority, the first in `rows` is evicted first."""
        for tier, policy in self._policies.items():
            ranked = self.in_tier[tier] = Ranked(self._residency, tier)
            self._listen(policy)
            for row in rows:
                if self._residency.has(row, tier):
                    ranked.inserted((row,), self._residency.last_access_ns(row))

    def _listen(self, policy: EvictionPolicy) -> None:
        ranked = self.in_tier[policy.tier]
        ranked.shares = policy.shares
        both = _BothByKey(policy, ranked) if isinstance(policy, KeyListener) else _Both(policy, ranked)
        self._residency.listen(policy.tier, both)
