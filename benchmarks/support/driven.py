"""The daemon's store in this process, without sockets: real host and NVMe tiers, and key-addressed ones below."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import KEY_BYTES, NO_PARENT
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.segments import Segment, segment_of
from kvstored.clients.tenants import Tenant
from kvstored.clock import SystemClock
from kvstored.completions import CompletionQueue
from kvstored.config import load_config
from kvstored.config.schema import TenantSection
from kvstored.config.tiers import Start
from kvstored.store.assembly import Store
from kvstored.store.operations import Client, Operations
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import Offer
from kvstored.store.residency import make_residency
from kvstored.telemetry import DeletionLog

_FINGERPRINT = Fingerprint("benchmark", "none", groups=(LayerGroup(0),))
_SETTLE_S = 30.0
_TICK_S = 0.1


def keys_of(chain: int, blocks: int) -> list[bytes]:
    """The keys of the first blocks of a chain; no two chains share one."""
    return [chain.to_bytes(8, "big") + number.to_bytes(8, "big") for number in range(1, blocks + 1)]


@dataclass(frozen=True, slots=True)
class Payload:
    """Implements `Staged`: every block has the same bytes, and no token ids."""

    array: np.ndarray[Any, Any]

    def tokens_at(self, offset: int) -> bytes:
        return b""

    def payload_at(self, offset: int, nbytes: int) -> Segment:
        return segment_of(self.array)


class Driven:
    """One client of one store."""

    def __init__(self, store: Store, block_bytes: int) -> None:
        self.store = store
        self.operations = Operations(store, DeletionLog(store.clock))
        self.payload = Payload(np.random.default_rng(1).integers(0, 256, block_bytes, dtype=np.uint8))
        self.client = Client(
            session_id=1, client_name="benchmark", tenant=Tenant("tenant", bytes(16), b"", TenantSection("tenant")),
            tenant_id=store.residency.tenant("tenant"), fingerprint=_FINGERPRINT,
            fingerprint_digest=_FINGERPRINT.digest(), fingerprint_id=1, roots={},
        )  # fmt: skip

    async def put(self, keys: Sequence[bytes], mode: DurabilityMode = DurabilityMode.BATCH) -> int:
        """How many blocks are stored, once the first answer is there."""
        count = len(keys)
        offer = Offer(
            0, b"".join(keys), keys, [NO_PARENT, *keys[:-1]], [bytes(KEY_BYTES)] * count,
            [self.payload.array.nbytes] * count, self.payload, range(count),
        )  # fmt: skip
        answers = self.operations.put.store(self.client, offer, mode)
        stored = await anext(answers)
        await answers.aclose()
        return len(stored.durability)


@asynccontextmanager
async def driven_store(
    directory: Path, *settings: str, keyed: Sequence[KeyedTier] = (), block_bytes: int = 4096, **how: Any
) -> AsyncIterator[Driven]:
    """`how`: more arguments of `Store`. Ticks as the daemon does."""
    config = load_config(None, [f"daemon.state_dir={directory}", *settings])
    completions = CompletionQueue(asyncio.get_running_loop())
    tiers = [*(section.open(Start()) for section in config.tiers), *keyed]
    store = Store(config, SystemClock(), completions, make_residency(config, tiers), tiers, **how)

    async def tick() -> None:
        while True:
            store.tick()
            await asyncio.sleep(_TICK_S)

    ticking = asyncio.create_task(tick())
    try:
        yield Driven(store, block_bytes)
    finally:
        ticking.cancel()
        if store.writeback is not None:
            await store.writeback.flush(_SETTLE_S)
        store.mover.close()
        for room in store.rooms:
            await room.settle(_SETTLE_S)
        await completions.drained()
        await store.endurance.close()
        for tier in store.tiers:
            tier.close()
