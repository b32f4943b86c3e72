"""Removal of blocks by an operator: a tier's copies, or everything of a fingerprint.

Leased blocks, blocks in transfer and their ancestors stay and are counted as kept. So does a block whose only copy is
in the tier, unless `discard` or `all` is set: a block that no slower tier takes is lost only if the operator says so.
The module works in slices, so that lookups are answered meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.durable_copies import save, tokens_in_tier
from kvstored.admin.views import tier_named
from kvstored.clients.tenants import TenantDirectory
from kvstored.lifecycle import Cause
from kvstored.store.assembly import Store
from kvstored.store.blocks.listing import rows_of_fingerprint

SLICE_ROWS = 64
SAVE_TIMEOUT_S = 60.0
MIN_PREFIX = 8


class OperatorDrop:
    """A service by which an operator removes stored blocks: copies in a tier, all blocks of a tenant, or all blocks of
    a model's fingerprint. Blocks that a client has leased or that are being copied stay."""

    def __init__(self, store: Store, tenants: TenantDirectory) -> None:
        self._store = store
        self._residency = store.residency
        self._tenants = tenants

    async def drop(self, request: pb.DropRequest) -> pb.DropReply:
        """Remove the blocks' copies in the tier that `request` names or in all tiers, or end pins, as `request` says.
        Return how many blocks were dropped and how many were kept. Raises KVStoreError for a tier or tenant that does
        not exist."""
        residency = self._residency
        if request.pins:
            return await self._unpin(request)
        tier_names = residency.tiers if request.all else (request.tier,)
        tiers = [tier_named(residency, name) for name in tier_names]
        tenant = self._tenant(request.tenant)
        reply = pb.DropReply()
        if request.all:
            self._forget_gone(range(len(residency.tenants)) if tenant is None else (tenant,))
        keeps = not (request.all or request.discard)
        if keeps and tiers != [residency.durable] and self._store.writeback is not None:
            saved, *_ = await save(residency, self._store.writeback, tiers, SAVE_TIMEOUT_S, tenant)
            reply.written_back_blocks = saved
        await self._drop_from(tiers, tenant, reply, forget=request.discard or request.all)
        return reply

    async def _unpin(self, request: pb.DropRequest) -> pb.DropReply:
        tenant = self._tenant(request.tenant)
        if tenant is None:
            raise KVStoreError(ErrorKind.INVALID, "name the tenant whose pins are to end (see: kvctl tenants)")
        reply = pb.DropReply()
        for blocks in self._store.retention.unpin_all(tenant, request.owner):
            reply.unpinned_blocks += blocks
            await asyncio.sleep(0)
        return reply

    async def empty(self, tenant: int) -> pb.DropReply:
        """Remove all blocks and all pins of a tenant. `tenant` is its number in the block index."""
        reply = pb.DropReply()
        for _ in self._store.retention.unpin_all(tenant):
            await asyncio.sleep(0)
        self._forget_gone((tenant,))
        await self._drop_from(range(len(self._residency.tiers)), tenant, reply, forget=True)
        return reply

    async def invalidate(self, request: pb.InvalidateRequest) -> pb.InvalidateReply:
        """Remove all blocks stored under model fingerprints whose digest begins with the hex digits in `request`.
        Return how many were removed and how many were kept. Raises KVStoreError if no fingerprint matches."""
        wanted = request.fingerprint.lower()
        if len(wanted) < MIN_PREFIX or any(char not in "0123456789abcdef" for char in wanted):
            raise KVStoreError(
                ErrorKind.INVALID, f"give at least {MIN_PREFIX} hex digits of a fingerprint (see: kvctl tenants)"
            )
        digests = [digest for digest in self._tenants.fingerprints() if digest.hex().startswith(wanted)]
        if not digests:
            raise KVStoreError(ErrorKind.NOT_FOUND, f"no fingerprint begins with {wanted}")
        tenant = self._tenant(request.tenant)
        reply = pb.InvalidateReply(fingerprints=[digest.hex() for digest in digests])
        for digest in digests:
            rows = rows_of_fingerprint(self._residency, self._tenants.known_number(digest), tenant)
            tokens = [self._residency.token(row) for row in rows]
            for number, token in enumerate(tokens):
                row = self._residency.current(token)
                if row >= 0:
                    nbytes = self._residency.payload_bytes(row)
                    if self._forget(row, Cause.INVALIDATED):
                        reply.blocks += 1
                        reply.bytes += nbytes
                    else:
                        reply.kept_blocks += 1
                if number % SLICE_ROWS == SLICE_ROWS - 1:
                    await asyncio.sleep(0)
        await self._make_final()
        return reply

    async def _make_final(self, *, is_named_on_medium: bool = True) -> None:
        """Make removals durable: a removed block must not reappear after a crash, nor out of a remote store.
        `is_named_on_medium`: the medium may have records of removed blocks.
        """
        self._residency.deletions += 1  # answers of remote stores to questions asked before are dropped
        if self._store.writeback is not None:
            is_synced = await self._store.writeback.sync()
            if is_named_on_medium and not is_synced:
                raise KVStoreError(
                    ErrorKind.INTERNAL,
                    "the blocks are dropped, but come back with a restart: NVMe cannot be written; drop again when it "
                    "can",
                )
        if not await self._store.sync_keyed():
            raise KVStoreError(
                ErrorKind.INTERNAL,
                "the blocks are dropped here, but a remote store did not remove its copies: drop again",
            )

    async def _drop_from(self, tiers: Sequence[int], tenant: int | None, reply: pb.DropReply, *, forget: bool) -> None:
        for tier in reversed(tiers):  # slow tiers first: with all, the block is removed with its host copy
            await self._drop_tier(tier, tenant, reply, forget=forget)
        await self._make_final(is_named_on_medium=self._residency.durable in tiers)

    async def _drop_tier(self, tier: int, tenant: int | None, reply: pb.DropReply, *, forget: bool) -> None:
        residency = self._residency
        for number, token in enumerate(await tokens_in_tier(residency, tier, tenant)):
            row = residency.current(token)
            if row >= 0 and residency.has(row, tier):
                nbytes = residency.slot(row, tier).nbytes
                is_only_copy = not residency.tier_mask(row).without(tier)
                if self._drop_copy(row, tier, is_only_copy=is_only_copy, forget=forget):
                    reply.dropped_blocks += 1
                    reply.dropped_bytes += nbytes
                else:
                    reply.kept_blocks += 1
                    if is_only_copy and not forget and not residency.pin_count(row):
                        reply.only_copy_blocks += 1
                        reply.only_copy_bytes += nbytes
            if number % SLICE_ROWS == SLICE_ROWS - 1:
                await asyncio.sleep(0)

    def _drop_copy(self, row: int, tier: int, *, is_only_copy: bool, forget: bool) -> bool:
        residency = self._residency
        if residency.pin_count(row):
            return False
        if not is_only_copy:
            if tier == residency.durable and not forget and residency.dependents(row, tier):
                return False  # what is kept behind it would be out of reach after a crash
            tenant = residency.tenant_of(row)
            self._store.discard[tier](residency.detach(row, tier), tenant)
            return True
        # Deepest first, so a child that is still there was kept: without its parent it would be of no use.
        return forget and not residency.dependents(row) and self._forget(row, Cause.DROPPED)

    def _forget(self, row: int, cause: Cause) -> bool:
        residency = self._residency
        if residency.pin_count(row) or residency.being_filled(row):
            return False
        tenant = residency.tenant_of(row)
        for taken in residency.remove(row, cause, self._store.clock.monotonic_ns()):
            self._store.discard[taken.tier](taken.slot, tenant)
        return True

    def _forget_gone(self, tenants: Iterable[int]) -> None:
        """Forget the remaining knowledge about blocks of `tenants` that left earlier."""
        for tenant in tenants:
            self._residency.forget(tenant, None)

    def _tenant(self, name: str) -> int | None:
        if not name:
            return None
        return self._tenants.number(name, self._residency)
