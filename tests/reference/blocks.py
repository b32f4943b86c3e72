"""Blocks for tests of the daemon's pure core: chains of keys, slots, and a residency to put them in."""

from __future__ import annotations

from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Slot
from kvstored.store.blocks import Residency

BLOCK_BYTES = 8192


def key(number: int) -> bytes:
    """The key of block `number`; never the zero key."""
    return (number + 1).to_bytes(16, "big")


def pack(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


class Shelf:
    """A residency whose slots come from a counter, so that a test speaks of block numbers only."""

    def __init__(self, *tiers: str, tenants: int = 1, ghost_keys: int = 1000) -> None:
        self.residency = Residency(tiers or ("host",), ghost_keys=ghost_keys)
        self.tenants = [self.residency.tenant(f"tenant-{number}") for number in range(tenants)]
        self._slots = 0
        self.now_ns = 1

    def slot(self, nbytes: int = BLOCK_BYTES) -> Slot:
        self._slots += 1
        return Slot(self._slots // 4, self._slots % 4 * BLOCK_BYTES, nbytes, self._slots)

    def insert(self, number: int, parent: int | None = None, *, tenant: int = 0, depth: int = 0, group: int = 0) -> int:
        return self.residency.insert(
            tenant,
            key(number),
            NO_PARENT if parent is None else key(parent),
            fingerprint_id=7,
            group=group,
            depth=depth,
            payload_bytes=4096,
            now_ns=self.now_ns,
        )

    def store(self, number: int, parent: int | None = None, *, tier: int = 0, tenant: int = 0, depth: int = 0) -> int:
        row = self.insert(number, parent, tenant=tenant, depth=depth)
        self.residency.attach(row, tier, self.slot(), self.now_ns)
        return row

    def chain(self, *numbers: int, tier: int = 0, tenant: int = 0) -> list[int]:
        """Store what is missing of a chain (head first), then touch all of it: one request."""
        rows: list[int] = []
        parent: int | None = None
        for depth, number in enumerate(numbers):
            row = self.residency.find(tenant, key(number))
            if row < 0:
                row = self.store(number, parent, tier=tier, tenant=tenant, depth=depth)
            rows.append(row)
            parent = number
        self.residency.touch_run(rows, self.now_ns)
        return rows
