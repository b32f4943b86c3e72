"""The engine's own blocks: prefix cache and running requests in the memory that it computes from.

The production Residency and LRU over one tier, as engines have it. A request holds all of its blocks until it has been
served and what it stored has been copied out. Invariant: never more blocks than the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_tiers.base import Slot
from kvstored.lifecycle import Cause
from kvstored.policy_names import LRU
from kvstored.store.blocks import Residency
from kvstored.store.policies import create

POOL = 0


class EnginePool:
    """`capacity_blocks` of `block_bytes` each."""

    def __init__(self, capacity_blocks: int, block_bytes: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._block_bytes = block_bytes
        self.residency = Residency((LRU,))
        self.policy = create(LRU, self.residency, POOL)
        self._free: list[Slot] = []
        self._made = 0

    def leading(self, tenant: int, keys: Sequence[bytes]) -> int:
        """How many leading blocks are here now."""
        return len(self.residency.find_keys(tenant, keys))

    def hold(self, tenant: int, keys: Sequence[bytes], now_ns: int) -> tuple[int, list[int]] | None:
        """Room for the whole chain: how many leading blocks were there already, and the rows of all, pinned until
        `release`. None when there is no room beside the blocks that others hold."""
        residency = self.residency
        rows = residency.find_keys(tenant, keys)
        residency.pin_run(rows)
        over = residency.tier_blocks(POOL) + len(keys) - len(rows) - self.capacity_blocks
        if over > 0:
            freed = residency.remove_chosen(POOL, self.policy.next_victim, over, Cause.EVICTED, now_ns)
            self._free.extend(freed)
            if len(freed) < over:
                self.release(rows)
                return None
        here = len(rows)
        if here < len(keys):
            stored = residency.store_run(
                tenant, keys[here:], rows[-1] if rows else -1, POOL, self._slots(len(keys) - here),
                fingerprint_id=0, group=0, payload_bytes=self._block_bytes, now_ns=now_ns,
            )  # fmt: skip
            residency.pin_run(stored)
            rows += stored
        if rows:
            residency.touch_run(rows, now_ns)
        return here, rows

    def release(self, rows: Sequence[int]) -> None:
        """Rows that were held may be evicted again."""
        for row in rows:
            self.residency.unpin(row)

    def _slots(self, count: int) -> list[Slot]:
        while len(self._free) < count:
            self._free.append(Slot(0, self._made, self._block_bytes, 1))
            self._made += 1
        taken = self._free[-count:]
        del self._free[-count:]
        return taken
