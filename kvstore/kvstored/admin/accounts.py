"""Blocks and requests of each account of a tenant, and who is recognised as that tenant.

An account is the user for whom an engine with several users stores and asks: a name in its fingerprints. Quotas belong
to the tenant. The module only reads, in slices, so that lookups are answered meanwhile.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.views import DaemonParts
from kvstored.clients.tenants.directory import uid_of
from kvstored.clients.tenants.tokens import names_in
from kvstored.config import ConfigError, TenantSection
from kvstored.config.recognition import recognised_by
from kvstored.store.blocks import Residency
from kvstored.store.blocks.rows import as_array
from kvstored.tier_set import holding

SLICE_ROWS = 100_000  # about 1 ms
Sums = npt.NDArray[np.float64]


async def add_accounts(parts: DaemonParts, reply: pb.TenantsReply) -> pb.TenantsReply:
    """Add the figures of each account (a user of an engine that serves several users as one tenant) to `reply.tenants`,
    whose entries are in the order of the block index's tenants. Then add who is each tenant, and the listed tenants
    that have not been seen yet. Return `reply`."""
    residency, flows = parts.store.residency, parts.store.flows
    found: dict[tuple[int, str], pb.AccountStatus] = {}

    def account(tenant: int, name: str) -> pb.AccountStatus:
        return found.setdefault((tenant, name), pb.AccountStatus(name=name))

    of_kind = _accounts_of_kinds(parts)
    if of_kind:
        blocks, tier_bytes = await count_kinds(residency)
        for kind, (tenant, name) in of_kind.items():
            status = account(tenant, name)
            status.blocks += int(blocks[kind])
            status.host_bytes += int(tier_bytes[residency.mapped][kind])
            status.nvme_bytes += int(tier_bytes[residency.durable][kind]) if residency.durable >= 0 else 0
    for session in parts.sessions.all():
        if session.account:
            account(session.tenant_id, session.account).clients += 1
    for tenant, by_name in flows.accounts.items():
        for name, flow in by_name.items():
            status = account(tenant, name)
            status.lookups, status.hit_blocks = flow.lookups, flow.hit_blocks
            status.missed_blocks = flow.missed_blocks
    for (tenant, _), status in sorted(found.items(), key=lambda item: item[0]):
        if tenant < len(reply.tenants):
            reply.tenants[tenant].accounts.append(status)
    _add_callers(parts, reply)
    return reply


def _add_callers(parts: DaemonParts, reply: pb.TenantsReply) -> None:
    config, with_tokens = parts.store.config, frozenset[str]()
    with suppress(ConfigError):
        with_tokens = names_in(config.unary.tokens_in_use)
    seen = {tenant.name: tenant for tenant in reply.tenants}
    for listed in parts.tenants.listed:
        if listed.name not in seen:
            seen[listed.name] = reply.tenants.add(name=listed.name)
    for name, status in seen.items():
        uid = uid_of(name)
        section = parts.tenants.section(name) or TenantSection(name, uids=() if uid is None else (uid,))
        ways = recognised_by(section, config.daemon.socket_dir, has_token=name in with_tokens)
        status.recognised_by.extend(ways)
        status.publisher = section.publisher
        status.readers.extend(section.readers)


def _accounts_of_kinds(parts: DaemonParts) -> dict[int, tuple[int, str]]:
    """Return (tenant, account) of each kind of rows that has one."""
    tenants = parts.tenants
    found: dict[int, tuple[int, str]] = {}
    for number, kind in enumerate(parts.store.residency.kinds):
        fingerprint = tenants.fingerprint(tenants.fingerprint_digest(kind.fingerprint_id))
        if fingerprint is not None and fingerprint.account:
            found[number] = kind.tenant, fingerprint.account
    return found


async def count_kinds(residency: Residency) -> tuple[Sums, list[Sums]]:
    """Return the readable blocks of each kind of rows, and the bytes of their slots in each tier."""
    kinds, columns = len(residency.kinds), residency.rows
    blocks, tier_bytes = np.zeros(kinds), [np.zeros(kinds) for _ in residency.tiers]
    first = 0
    while first < columns.capacity:
        part = slice(first, first + SLICE_ROWS)
        mask = np.frombuffer(columns.mask, np.uint8)[part]
        of_row = as_array(columns.kind)[part]
        blocks += np.bincount(of_row[mask != 0], minlength=kinds)[:kinds]
        for tier, copies in enumerate(residency.copies):
            has_copy = holding(mask, tier)
            if has_copy.any():
                nbytes = np.frombuffer(copies.nbytes, np.uint32)[part][has_copy]
                tier_bytes[tier] += np.bincount(of_row[has_copy], weights=nbytes, minlength=kinds)[:kinds]
        del mask, of_row  # a column cannot grow while a view of it exists
        first += SLICE_ROWS
        await asyncio.sleep(0)
    return blocks, tier_bytes
