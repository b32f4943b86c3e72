"""Recovery: what the NVMe tier kept becomes residency again, before any client is served.

All at once and by columns: a million blocks in a fraction of a second. Blocks that columns cannot express are entered
one by one.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future

from kvstore_console.units import human_bytes
from kvstore_tiers.base import Outcome, Tier
from kvstore_tiers.recovered import RecoveredBlocks
from kvstored.clients.tenants import TenantDirectory
from kvstored.clock import Clock
from kvstored.store.blocks import CyclicChainError, Kind, Residency
from kvstored.store.blocks.adoption import adopt

log = logging.getLogger(__name__)


def recover_blocks(nvme: Tier, residency: Residency, tenants: TenantDirectory, clock: Clock) -> int:
    """Insert every surviving block; parents and children find each other in any order. How many there were."""
    now_ns = clock.monotonic_ns()
    blocks = nvme.recover_columns()
    kinds = [
        Kind(residency.tenant(origin.tenant.hex()), tenants.fingerprint_number(origin.fingerprint), origin.group)
        for origin in blocks.origins
    ]
    left_out = adopt(residency, residency.durable, blocks, kinds, now_ns)
    recovered = len(blocks) - len(left_out)
    for block in left_out:
        recovered += _recover_one(nvme, residency, blocks, block, kinds[int(blocks.origin[block])], now_ns)
    return recovered


def drop_blocks(nvme: Tier) -> None:
    """Free every surviving block, none of which is in residency: nothing reaches them. Raises OSError."""
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
    nvme: Tier, residency: Residency, blocks: RecoveredBlocks, block: int, kind: Kind, now_ns: int
) -> bool:
    """Insert one block, unless it is there already.

    A record whose chain closes on itself cannot have been written by us: its slot is quarantined.
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
    residency.attach(row, residency.durable, slot, now_ns)
    return True
