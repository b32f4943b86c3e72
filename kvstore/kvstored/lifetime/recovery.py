"""Recovery: blocks that the NVMe tier kept, and blocks left in memory, enter residency again, before any client is
served.

It works on all blocks at once, by columns: a million blocks in a fraction of a second. Blocks that columns cannot
express are entered one by one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from kvstore_console.units import human_bytes
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.adoption import AdoptedArena
from kvstore_tiers.base import Outcome, Slot, Tier
from kvstore_tiers.recovered import RecoveredBlocks
from kvstored.clients.tenants import TenantDirectory
from kvstored.clock import Clock
from kvstored.store.blocks import CyclicChainError, Residency, RowKind
from kvstored.store.blocks.adoption import adopt, keep

log = logging.getLogger(__name__)
_MANY = 1 << 16  # blocks whose columns take longer to give back than a thread to start


def recover_blocks(nvme: Tier, residency: Residency, tenants: TenantDirectory, clock: Clock) -> int:
    """Enter every block that the NVMe tier has kept into the index, and return their number. The memory of very many
    is given back by a thread, while the start goes on.
    """
    now_ns = clock.monotonic_ns()
    blocks = nvme.recover_columns()
    kinds = [
        RowKind(residency.tenant(origin.tenant.hex()), tenants.fingerprint_number(origin.fingerprint), origin.group)
        for origin in blocks.origins
    ]
    left_out = adopt(residency, residency.durable, blocks, kinds, now_ns)
    recovered = len(blocks) - len(left_out)
    for block in left_out:
        recovered += _recover_one(nvme, residency, blocks, block, kinds[int(blocks.origin[block])], now_ns)
    _keep(residency, blocks, kinds, now_ns, clock.wall_ns())
    if len(blocks) >= _MANY:
        last = [blocks]
        del blocks
        threading.Thread(target=last.clear, name="let-go", daemon=True).start()
    return recovered


def _keep(residency: Residency, blocks: RecoveredBlocks, kinds: Sequence[RowKind], now_ns: int, wall_ns: int) -> None:
    """Give blocks the expiry and the priority that their records say."""
    if blocks.kept is None:
        return
    said = np.flatnonzero(blocks.kept)
    tenants = np.array([kind.tenant for kind in kinds])[blocks.origin[said]]
    for tenant in np.flatnonzero(np.bincount(tenants)).tolist():  # np.unique imports numpy.ma first: 8 ms
        ours = said[tenants == tenant]
        rows = residency.find_column(tenant, np.ascontiguousarray(blocks.key[ours]).view("V16").reshape(-1))
        is_here = rows >= 0
        keep(residency, rows[is_here], blocks.kept[ours][is_here], now_ns, wall_ns)


def drop_blocks(nvme: Tier) -> None:
    """Free every block that the NVMe tier has kept, since the secret for their keys is lost. None of them is in the
    index. Raises OSError.
    """
    blocks = nvme.recover_columns()
    for block in range(len(blocks)):
        nvme.free(blocks.slot_of(block))
    synced: Future[Outcome] = Future()
    nvme.sync(synced.set_result)
    outcome = synced.result()
    if not outcome.ok:
        raise OSError(outcome.errno, f"blocks that no secret reaches cannot be dropped: {outcome.message}")
    log.warning(
        "dropped %d blocks (%s) from NVMe that no secret reaches", len(blocks), human_bytes(int(blocks.nbytes.sum()))
    )


def _recover_one(
    nvme: Tier, residency: Residency, blocks: RecoveredBlocks, block: int, kind: RowKind, now_ns: int
) -> bool:
    """Insert one block, unless it is there already; return whether it was inserted.

    A record whose chain closes on itself was not written by the daemon: its slot is quarantined.
    """
    key, slot = blocks.key_of(block), blocks.slot_of(block)
    row = residency.find_any(kind.tenant, key)
    if row >= 0 and residency.state(row, residency.durable):
        nvme.free(slot)
        return False
    if row < 0 or not residency.tier_mask(row):
        try:
            row = residency.insert(
                kind.tenant,
                key,
                blocks.parent_of(block),
                fingerprint_id=kind.fingerprint_id,
                group=kind.group,
                depth=int(blocks.depth[block]),
                payload_bytes=int(blocks.payload_bytes[block]),
                now_ns=now_ns,
            )
        except CyclicChainError as error:
            nvme.quarantine(slot, str(error))
            return False
    residency.attach(row, residency.durable, slot, now_ns, filling=True)
    residency.note_stored(row, residency.durable, *blocks.form_of(block))
    residency.publish(row, residency.durable, now_ns)
    return True


class _Block(NamedTuple):
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
    """A component that enters the blocks in memory regions of `tier`, which have outlived a daemon, into the block
    index. `tier` is at `position`. `rows` maps container and offset of each block entered so far to its row.
    `dropped_slots` counts blocks that were found twice, or whose chain closes on itself.

    Runs of blocks of one chain are entered together, which takes a quarter of the time. Whether a block is whole has
    been decided before (`kvstore_tiers.adoption`). Every block gets a copy in its tier, or its slot is freed and
    counted as dropped."""

    def __init__(
        self, tier: Tier, position: int, residency: Residency, tenants: TenantDirectory, now_ns: int, wall_ns: int = 0
    ) -> None:
        self._tier = tier
        self._position = position
        self._residency = residency
        self._tenants = tenants
        self._now_ns, self._wall_ns = now_ns, wall_ns
        self.rows: dict[tuple[int, int], int] = {}
        self.dropped_slots = 0

    def enter(self, found: AdoptedArena, tenant: int) -> None:
        headers, residency = found.headers, self._residency
        kept = headers["kept"]
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
        said = np.flatnonzero(kept)
        places = [(found.slots[at].container, found.slots[at].offset) for at in said.tolist()]
        is_here = np.array([place in self.rows for place in places], bool)
        rows = np.array([self.rows[place] for place in places if place in self.rows], np.int64)
        keep(residency, rows, kept[said[is_here]], self._now_ns, self._wall_ns)
        for at in np.flatnonzero(headers["error"]).tolist():  # nothing has followed these blocks yet
            row = self.rows.get((found.slots[at].container, found.slots[at].offset), -1)
            if row >= 0:
                residency.note_stored(row, self._position, 0, 0, float(headers["error"][at]))

    def _enter_run(self, tenant: int, run: list[_Block]) -> None:
        """Enter blocks without a row, each the parent of the next."""
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
        """Return the block's row, or -1 for a block that is dropped."""
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
