"""Removal of a tenant by an operator: nothing readable of it is left on the medium, and the answer shows that.

The key goes first: from then on nothing that it encrypted can be read, nor what is still written for the tenant until
the removal ends. After a crash in between the next start withdraws what no key opens. Blocks of before the tenant had a
key are freed as any others, and their bytes stay until they are overwritten. They are counted by their slots' headers:
not counted are bytes behind a shorter block, in a slab that was cut anew or in a `.damaged` one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstore_proto.arena import SEALED
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_tiers.base import Slot
from kvstore_tiers.nvme.layout import key_number
from kvstored.admin.drop import OperatorDrop
from kvstored.clients.handshake import HandshakeServer
from kvstored.clients.objects import OBJECTS, of_tenant
from kvstored.clients.tenants import TenantDirectory
from kvstored.state.saver import StateSaver
from kvstored.store.assembly import Store

LEASES_S, AGAIN_S = 10.0, 0.1  # how long blocks in use are waited for


class DropTenant:
    """A service by which an operator removes a tenant with all that is stored of it."""

    def __init__(
        self, store: Store, tenants: TenantDirectory, drop: OperatorDrop, handshake: HandshakeServer, saver: StateSaver
    ) -> None:
        self._store, self._tenants, self._drop = store, tenants, drop
        self._handshake, self._saver = handshake, saver

    async def drop(self, request: pb.DropTenantRequest) -> pb.DropTenantReply:
        """Destroy the key of the tenant `request.name`, and remove its blocks, from quarantine too. Return what was
        removed, and what of it is readable on NVMe. Raises KVStoreError for an unknown tenant, and when the medium
        cannot be written."""
        self._tenants.named(request.name)  # a user's tenant has a name also where nothing is left of it
        number = self._tenants.number(request.name, self._store.residency)
        digest = bytes.fromhex(self._store.residency.tenants[number].name)
        hung_up = self._handshake.hang_up(lambda session: session.tenant.digest == digest)
        reply = pb.DropTenantReply(clients=hung_up)
        quarantined = await asyncio.to_thread(self._quarantined, digest)
        try:
            reply.key_destroyed = await asyncio.to_thread(self._destroy_key, digest)
        except OSError as error:
            raise KVStoreError(
                ErrorKind.INTERNAL, f"nothing is dropped: the key cannot be destroyed: {error.strerror}"
            ) from None
        try:
            if self._store.nvme is not None:
                held = self._store.nvme.quarantined()
                for slot in held.keys() & set(quarantined):
                    self._store.nvme.free(slot)
                    reply.quarantined += 1
            await self._empty(number, reply)
            try:
                await self._saver.orders.forget(OBJECTS, of_tenant(digest.hex()))
                await self._saver.rewrite()
            except (OSError, KVStoreError) as error:
                place = error.filename if isinstance(error, OSError) else "small state"
                raise KVStoreError(
                    ErrorKind.INTERNAL,
                    f"the blocks are dropped, but {place} cannot be written, which still says what they were: "
                    "make room there, and drop again",
                ) from None
            if self._store.nvme is not None:
                path = self._store.config.nvme.path
                reply.slots, reply.readable_slots = await asyncio.to_thread(self._look, path, digest)
        finally:
            if self._tenants.data_keys is not None:
                self._tenants.data_keys.begin_anew(digest)
        return reply

    async def _empty(self, number: int, reply: pb.DropTenantReply) -> None:
        """Remove the blocks; while clients still have some of them leased, wait and try again."""
        for _ in range(round(LEASES_S / AGAIN_S)):
            dropped = await self._drop.empty(number)
            reply.blocks += dropped.dropped_blocks
            reply.bytes += dropped.dropped_bytes
            reply.kept_blocks = dropped.kept_blocks
            if not dropped.kept_blocks:
                return
            await asyncio.sleep(AGAIN_S)

    def _destroy_key(self, digest: bytes) -> bool:
        return self._tenants.data_keys is not None and self._tenants.data_keys.destroy(digest)

    def _quarantined(self, digest: bytes) -> list[Slot]:
        nvme, found = self._store.nvme, []
        for slot in nvme.quarantined() if nvme is not None else ():
            assert nvme is not None
            header = nvme.describe_quarantined(slot)
            if header is not None and header.tenant == digest:
                found.append(slot)
        return found

    def _look(self, path: Path, digest: bytes) -> tuple[int, int]:
        """Read the header of every slot. Return their number, and how many hold a block of the tenant that is in clear
        or that a key opens."""
        from kvstore_tiers.nvme.inspect import Inspector

        slots = readable = 0
        keys = self._tenants.data_keys
        for _, _, header in Inspector(path).headers():
            slots += 1
            if header.tenant == digest:
                is_open = not header.codec & SEALED
                readable += is_open or (keys is not None and keys.numbered(key_number(header)) is not None)
        return slots, readable
