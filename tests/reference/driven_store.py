"""The store's operations over a small store, and clients that put, get and delete chains of blocks through them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import numpy as np

from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import KEY_BYTES, NO_PARENT
from kvstore_proto.terms import NO_TERMS, Terms
from kvstored.clients.tenants import Tenant
from kvstored.config.schema import TenantSection
from kvstored.store.operations import Client, Operations
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import Acquired, GetRequest, GrantedRun, Offer, Outlook, PutAnswer
from kvstored.telemetry import DeletionLog
from tests.reference.small_store import PAYLOAD_BYTES, SmallStore

FINGERPRINT = Fingerprint("m", "w", groups=(LayerGroup(0),))


def keys_of(chain: int, blocks: int) -> list[bytes]:
    """The keys of the first blocks of a chain; no two chains share one."""
    return [chain.to_bytes(8, "big") + number.to_bytes(8, "big") for number in range(1, blocks + 1)]


def payload_of(key: bytes) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, PAYLOAD_BYTES, dtype=np.uint8)


class Payloads:
    """Implements `StagedBlocks`: blocks without token ids, each with the payload of its key."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._arrays = [payload_of(key) for key in keys]

    def tokens_of(self, offsets: Sequence[int]) -> list[bytes]:
        return [b""] * len(offsets)

    def payloads_at(self, offsets: Sequence[int]) -> tuple[list[int], object]:
        return [self._arrays[offset].ctypes.data for offset in offsets], self._arrays


class DrivenStore:
    def __init__(self, small: SmallStore) -> None:
        self.small = small
        self.operations = Operations(small.store, DeletionLog(small.clock))
        self.client = self.new_client(1)

    def new_client(self, number: int, tenant: str = "tenant") -> Client:
        return Client(
            session_id=number, client_name=f"client {number}",
            tenant=Tenant(tenant, tenant.encode().ljust(16, b"\0"), b"", TenantSection(tenant)),
            tenant_id=self.small.residency.tenant(tenant), fingerprint=FINGERPRINT,
            fingerprint_digest=FINGERPRINT.digest(), fingerprint_id=1, roots={},
        )  # fmt: skip

    async def put(
        self, keys: Sequence[bytes], mode: DurabilityMode, client: Client | None = None, terms: Terms = NO_TERMS
    ) -> list[PutAnswer]:
        """All answers to a put of a chain from its root."""
        offered = self.offer(keys, terms)
        return [answer async for answer in self.operations.put.store(client or self.client, offered, mode)]

    def offer(self, keys: Sequence[bytes], terms: Terms = NO_TERMS) -> Offer:
        """A chain from its root, with the payloads of its keys."""
        return Offer(
            0, b"".join(keys), keys, [NO_PARENT, *keys[:-1]], [bytes(KEY_BYTES)] * len(keys),
            [PAYLOAD_BYTES] * len(keys), Payloads(keys), range(len(keys)), terms=terms,
        )  # fmt: skip

    async def get(self, keys: Sequence[bytes], client: Client | None = None, wait_ms: int = 0) -> Acquired:
        """Get a chain, compare what came with what was put, and release it. `wait_ms` is the bound of the request."""
        client = client or self.client
        held = await self.operations.get.acquire(client, GetRequest(b"".join(keys), wait_ms))
        if held.run is not None:
            for key, slot in zip(keys, held.run.slots, strict=False):
                stored = self.small.store.host.view(slot)[4096 : 4096 + PAYLOAD_BYTES]
                assert np.array_equal(stored, payload_of(key)), f"wrong bytes of {key.hex()}"
            self.operations.get.release(client, [held.run.lease_id])
        return held

    async def stream(self, wanted: GetRequest, held: int = 0) -> tuple[Outlook, list[GrantedRun], Acquired]:
        """All answers to a get in order."""
        answers = [answer async for answer in self.operations.get.acquire_in_order(self.client, wanted, held)]
        expected, *runs, end = answers
        assert isinstance(expected, Outlook) and isinstance(end, Acquired)
        return expected, [run for run in runs if isinstance(run, GrantedRun)], end

    async def begin_stream(self, wanted: GetRequest) -> tuple[AsyncGenerator[object, None], GrantedRun]:
        """A get in order whose first run has come."""
        answers = self.operations.get.acquire_in_order(self.client, wanted)
        await anext(answers)
        first = await anext(answers)
        assert isinstance(first, GrantedRun)
        return answers, first

    async def put_on_nvme_alone(self, keys: Sequence[bytes]) -> None:
        await self.put(keys, DurabilityMode.ALWAYS)
        self.leave_host(keys)

    def leave_host(self, keys: Sequence[bytes]) -> None:
        """Take blocks out of DRAM that another tier has."""
        for key in keys:
            row = self.small.residency.find(self.client.tenant_id, key)
            self.small.leave_host(row)

    def tiers_of(self, key: bytes, client: Client | None = None) -> int:
        """The mask of the tiers that have a block; 0 for one that is not stored."""
        row = self.small.residency.find((client or self.client).tenant_id, key)
        return self.small.residency.tier_mask(row) if row >= 0 else 0
