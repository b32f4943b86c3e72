"""Import of an adopted arena's blocks into residency: by runs where blocks of a chain are in order.

Blocks of a chain are mostly one behind the other, and a run is entered in a quarter of the time of its
blocks one by one. Never decides whether a block is whole (`kvstore_tiers.adoption` did).
Invariant: every block ends up in residency with a copy in its tier, or its slot is freed and counted as dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.adoption import AdoptedArena
from kvstore_tiers.base import Slot, Tier
from kvstored.clients.tenants import TenantDirectory
from kvstored.store.blocks import CyclicChainError, Residency


@dataclass(frozen=True, slots=True)
class _Block:
    key: bytes
    parent: bytes
    fingerprint: bytes
    group: int
    depth: int
    payload_bytes: int
    slot: Slot

    def continues(self, before: _Block) -> bool:
        return (
            self.parent == before.key
            and self.depth == before.depth + 1
            and self.payload_bytes == before.payload_bytes
            and self.group == before.group
            and self.fingerprint == before.fingerprint
        )


class ArenaImport:
    """Enters the blocks of arenas of `tier`, which is number `position` of residency. `rows` of all so far, by slot;
    `dropped_slots` of those that were there twice, or whose chain closes on itself."""

    def __init__(self, tier: Tier, position: int, residency: Residency, tenants: TenantDirectory, now_ns: int) -> None:
        self._tier = tier
        self._position = position
        self._residency = residency
        self._tenants = tenants
        self._now_ns = now_ns
        self.rows: dict[tuple[int, int], int] = {}
        self.dropped_slots = 0

    def enter(self, found: AdoptedArena, tenant: int) -> None:
        headers, residency = found.headers, self._residency
        columns = (
            headers[name].tolist() for name in ("key", "parent", "fingerprint", "group", "depth", "payload_bytes")
        )
        run: list[_Block] = []
        in_run: set[bytes] = set()
        for block in map(_Block, *columns, found.slots):
            if run and not (block.continues(run[-1]) and block.key not in in_run):
                self._enter_run(tenant, run)
                run, in_run = [], set()
            if residency.find_any(tenant, block.key) >= 0:  # on NVMe too, or known as a parent: no part of a run
                self._enter_run(tenant, run)
                run, in_run = [], set()
                self._enter_one(tenant, block)
            else:
                run.append(block)
                in_run.add(block.key)
        self._enter_run(tenant, run)

    def _enter_run(self, tenant: int, run: list[_Block]) -> None:
        """Blocks without a row, each the parent of the next."""
        if not run:
            return
        first, residency = run[0], self._residency
        parent = -1 if first.parent == NO_PARENT else residency.find_any(tenant, first.parent)
        if first.parent != NO_PARENT and parent < 0:  # its parent may come later
            parent = self._enter_one(tenant, first)
            if parent < 0:  # dropped: the others have a parent to be found, or none
                for block in run[1:]:
                    self._enter_one(tenant, block)
                return
            run = run[1:]
        elif first.depth != (residency.depth(parent) + 1 if parent >= 0 else 0):
            for block in run:
                self._enter_one(tenant, block)
            return
        if not run:
            return
        rows = residency.store_run(
            tenant, [block.key for block in run], parent, self._position, [block.slot for block in run],
            fingerprint_id=self._tenants.fingerprint_number(first.fingerprint), group=first.group,
            payload_bytes=first.payload_bytes, now_ns=self._now_ns,
        )  # fmt: skip
        for block, row in zip(run, rows, strict=True):
            self.rows[block.slot.container, block.slot.offset] = row

    def _enter_one(self, tenant: int, block: _Block) -> int:
        """Its row, or -1 for a block that is dropped."""
        residency, slot = self._residency, block.slot
        row = residency.find(tenant, block.key)
        if row >= 0 and residency.has(row, self._position):
            return self._drop(slot)
        if row < 0:
            try:
                row = residency.insert(
                    tenant, block.key, block.parent, group=block.group, depth=block.depth,
                    fingerprint_id=self._tenants.fingerprint_number(block.fingerprint),
                    payload_bytes=block.payload_bytes, now_ns=self._now_ns,
                )  # fmt: skip
            except CyclicChainError:
                return self._drop(slot)
        residency.attach(row, self._position, slot, self._now_ns)
        self.rows[slot.container, slot.offset] = row
        return row

    def _drop(self, slot: Slot) -> int:
        self._tier.free(slot)
        self.dropped_slots += 1
        return -1
