"""Simulated engines, as a store knows its clients: their blocks have keys and sizes, and no bytes."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import KEY_BYTES, NO_PARENT
from kvstore_tiers.segments import MemoryKind, Segment
from kvstored.clients.tenants import Tenant
from kvstored.config.schema import TenantSection
from kvstored.store.blocks import Residency
from kvstored.store.operations import Client
from kvstored.store.operations.records import Offer
from kvstored.tier_set import NO_TIERS, TierSet

_FINGERPRINT = Fingerprint("simulated", "none", groups=(LayerGroup(0),))
_NO_EXTRA = bytes(KEY_BYTES)


class NoBytes:
    """Implements `Staged`: a payload is of its length, at no address, and has no tokens to check."""

    def tokens_at(self, offset: int) -> bytes:
        return b""

    def payload_at(self, offset: int, nbytes: int) -> Segment:
        return Segment(0, nbytes, MemoryKind.FILE)


_NO_BYTES = NoBytes()


def client_of(residency: Residency, number: int, device_tiers: TierSet = NO_TIERS) -> Client:
    """The engine of tenant `number` of a trace. `device_tiers`: those on the device that it computes on."""
    name = f"tenant-{number}"
    return Client(
        session_id=number + 1, client_name=name, tenant=Tenant(name, bytes(16), b"", TenantSection(name)),
        tenant_id=residency.tenant(name), fingerprint=_FINGERPRINT, fingerprint_digest=_FINGERPRINT.digest(),
        fingerprint_id=0, roots={}, device_tiers=device_tiers,
    )  # fmt: skip


def offer_of(keys: Sequence[bytes], payload_bytes: int) -> Offer:
    """A chain of blocks from its root."""
    count = len(keys)
    return Offer(
        0, b"".join(keys), keys, [NO_PARENT, *keys[:-1]], [_NO_EXTRA] * count, [payload_bytes] * count, _NO_BYTES,
        range(count),
    )  # fmt: skip
