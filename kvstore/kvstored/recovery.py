"""Recovery: what the NVMe tier kept becomes residency again, before anybody is served."""

from __future__ import annotations

from kvstore_tiers.base import Tier
from kvstored.clock import Clock
from kvstored.residency import CyclicChainError, Residency
from kvstored.tenants import TenantDirectory
from kvstored.tiering import NVME


def recover_blocks(nvme: Tier, residency: Residency, tenants: TenantDirectory, clock: Clock) -> int:
    """Insert every surviving block; parents and children find each other in any order. How many there were.

    A record whose chain closes on itself cannot have been written by us: its slot is quarantined.
    """
    now_ns = clock.monotonic_ns()
    recovered = 0
    for slot, header in nvme.recover():
        tenant = residency.tenant(header.tenant.hex())
        if residency.find(tenant, header.key) >= 0:
            nvme.free(slot)
            continue
        try:
            row = residency.insert(
                tenant,
                header.key,
                header.parent,
                fingerprint_id=tenants.fingerprint_number(header.fingerprint),
                group=header.group,
                depth=header.depth,
                payload_bytes=header.payload_bytes,
                now_ns=now_ns,
            )
        except CyclicChainError as error:
            nvme.quarantine(slot, str(error))
            continue
        residency.attach(row, NVME, slot, now_ns)
        recovered += 1
    return recovered
