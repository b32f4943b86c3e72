"""Discovery: blocks that a key-addressed tier has and the index does not know, since another process stored them.

Owns the questions to those tiers. A question is waited for until its deadline and no longer; what it finds enters the
index with a copy in that tier, and is believed only when its bytes have been read and verified. Invariant: only names
of the asking tenant are asked for, so no tenant learns what another one has stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from kvstore_proto.arena import slot_bytes
from kvstore_proto.identity import KEY_BYTES, NO_PARENT, split_keys
from kvstore_tiers.keyed import KeyedTier
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.store.blocks import Residency
from kvstored.store.operations.client import Client
from kvstored.store.transfer.room import Room
from kvstored.telemetry import Counters

DEADLINE_MS = 50  # of a question; a client that computes instead has to know soon


class Discovery:
    """`tiers` by position in the residency, `rooms` of all tiers."""

    def __init__(
        self,
        residency: Residency,
        tiers: Mapping[int, KeyedTier],
        rooms: Sequence[Room],
        completions: CompletionQueue,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._residency = residency
        self._tiers = tiers
        self._rooms = rooms
        self._completions = completions
        self._clock = clock
        self._counters = counters

    def helps(self, client: Client, keys: bytes) -> bool:
        """Whether there is a tier to ask, and something to ask for."""
        if not self._tiers:
            return False
        return len(self._residency.find_run(client.tenant_id, keys)) < len(keys) // KEY_BYTES

    async def find(self, client: Client, keys: bytes, group: int = 0, deadline_ms: int = DEADLINE_MS) -> int:
        """Enter the blocks into the index that continue the leading run of a chain, which begins at its root; how many
        there were. `keys` are packed."""
        if not self._tiers:
            return 0
        residency, tenant = self._residency, client.tenant_id
        chain = split_keys(keys)
        first = len(residency.find_run(tenant, keys))
        missing = chain[first:]
        if not missing:
            return 0
        asked: dict[int, asyncio.Future[list[int]]] = {
            position: self._completions.outcome_of(partial(tier.find, client.tenant.digest, missing))
            for position, tier in self._tiers.items()
        }
        self._counters.add("discovery_questions", len(missing))
        _, late = await asyncio.wait(asked.values(), timeout=min(deadline_ms, DEADLINE_MS) / 1000)
        if late:
            self._counters.add("discovery_timeouts")
        found = 0
        for at, key in enumerate(missing, first):
            if residency.find(tenant, key) >= 0:
                continue  # another request found or stored it meanwhile
            parent = chain[at - 1] if at else NO_PARENT
            if at and residency.find(tenant, parent) < 0:
                break
            answers = ((position, answer.result()[at - first]) for position, answer in asked.items() if answer.done())
            position, payload_bytes = next((each for each in answers if each[1] >= 0), (-1, -1))
            if position < 0 or not await self._enter(client, key, parent, group, position, payload_bytes):
                break
            found += 1
        self._counters.add("discovered_blocks", found)
        return found

    async def _enter(
        self, client: Client, key: bytes, parent: bytes, group: int, position: int, payload_bytes: int
    ) -> bool:
        residency, tenant, tier = self._residency, client.tenant_id, self._tiers[position]
        slot = await self._rooms[position].allocate(slot_bytes(payload_bytes), tenant, is_patient=False)
        if slot is None:
            return False
        above = residency.find_any(tenant, parent) if parent != NO_PARENT else -1
        if residency.find_any(tenant, key) >= 0 or (parent != NO_PARENT and above < 0):
            tier.free(slot)  # while room was made: it is stored now, or what it continues has gone
            return residency.find(tenant, key) >= 0
        tier.adopt(slot, client.tenant.digest, key)
        now_ns = self._clock.monotonic_ns()
        row = residency.insert(
            tenant, key, parent, fingerprint_id=client.fingerprint_id, group=group,
            depth=residency.depth(above) + 1 if above >= 0 else 0, payload_bytes=payload_bytes, now_ns=now_ns,
        )  # fmt: skip
        residency.attach(row, position, slot, now_ns)
        return True
