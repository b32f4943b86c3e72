"""Quarantine for an operator: the slots in it with their reasons, and their release.

The tier owns the slots. No byte of a block is shown. Records are read on a thread, since that may wait for a device.
"""

from __future__ import annotations

import asyncio

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_tiers.base import Slot
from kvstored.clients.tenants import TenantDirectory
from kvstored.store.assembly import Store


class Quarantine:
    """The operator's view of quarantined slots (out of use, since their bytes failed verification) of the NVMe tier of
    `store`, and their release.
    """

    def __init__(self, store: Store, tenants: TenantDirectory) -> None:
        self._store = store
        self._nvme = store.nvme
        self._residency = store.residency
        self._tenants = tenants

    async def list(self) -> pb.QuarantineReply:
        reply = pb.QuarantineReply(limit=self._store.config.nvme.quarantine_slots if self._nvme is not None else 0)
        if self._nvme is None:
            return reply
        for slot, reason in sorted(self._nvme.quarantined().items()):
            entry = pb.QuarantinedSlot(
                tier=self._residency.tiers[self._residency.durable],
                slab=slot.container, offset=slot.offset, generation=slot.generation,
                bytes=slot.nbytes, reason=reason, location=self._nvme.location(slot),
            )  # fmt: skip
            await self._name(slot, entry)
            reply.slots.append(entry)
        return reply

    async def release(self, request: pb.ReleaseQuarantineRequest) -> pb.ReleaseQuarantineReply:
        """Free the quarantined slots that `request` names, so that blocks can be stored there again. Raises
        KVStoreError, having changed nothing, if a named slot is not in quarantine."""
        if request.all == bool(request.locations):
            raise KVStoreError(ErrorKind.INVALID, "give the places to release, or all")
        held = self._nvme.quarantined() if self._nvme is not None else {}
        named = {}
        for slot in held:
            assert self._nvme is not None
            named[self._nvme.location(slot)] = named[f"{slot.container}:{slot.offset}"] = slot
        unknown = [place for place in request.locations if place not in named]
        if unknown:
            raise KVStoreError(
                ErrorKind.NOT_FOUND, f"{unknown[0]} is not in quarantine; `kvctl quarantine list` shows what is"
            )
        slots = set(held) if request.all else {named[place] for place in request.locations}
        for slot in slots:
            assert self._nvme is not None
            self._nvme.free(slot)
        if slots and self._store.writeback is not None:
            await self._store.writeback.sync()
        return pb.ReleaseQuarantineReply(released=len(slots), released_bytes=sum(slot.nbytes for slot in slots))

    async def _name(self, slot: Slot, entry: pb.QuarantinedSlot) -> None:
        """Enter which block the slot held, as far as its record still says."""
        assert self._nvme is not None
        try:
            header = await asyncio.to_thread(self._nvme.describe_quarantined, slot)
        except (OSError, RuntimeError):  # the medium refused, or the slot was released meanwhile
            return
        if header is None:
            return
        entry.key = header.key.hex()
        entry.tenant = self._tenants.name_of_index(header.tenant.hex())
        entry.fingerprint = self._tenants.fingerprint_label(header.fingerprint)
        names = [index.name for index in self._residency.tenants]
        if header.tenant.hex() in names:
            entry.stored_again = self._residency.find(names.index(header.tenant.hex()), header.key) >= 0
