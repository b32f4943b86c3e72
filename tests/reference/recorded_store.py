"""A recording against several tiers: every get and put again, one after the other, through the daemon's own `Store`.

Owns the order of what one client asks that waits for each answer. Every get and put is the production one, on simulated
tiers that take no time, in virtual time. Never reads an operating system's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from kvstore_proto.arena import HEADER_BYTES
from kvstore_simulator.engine_reports import hints_before, replay_hint
from kvstore_simulator.machine import MediumSpec
from kvstore_simulator.node_store import client_of, offer_of
from kvstore_simulator.simulated_tiers import SimulatedGpuTier, SimulatedLane, SimulatedMedium, SimulatedTier
from kvstore_simulator.trace import Op, Trace
from kvstore_simulator.virtual_time import VirtualLoop, run_virtual
from kvstore_tiers.segments import MemoryKind
from kvstored.clock import ManualClock
from kvstored.completions import CompletionQueue
from kvstored.config import Config
from kvstored.config.tiers import GpuSection, TierSection
from kvstored.store.assembly import Store
from kvstored.store.operations import Client, Operations
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import GetRequest
from kvstored.store.policies import RequestContext
from kvstored.store.residency import make_residency
from kvstored.telemetry import DeletionLog

_FAST = 1e15  # bytes a second
_SETTLE_S = 60.0
_LOOK_S = 0.001


@dataclass(frozen=True, slots=True)
class Recorded:
    """Hits by request (0 for puts), and what moved, by the daemon's own counters; `promoted`: blocks, by tier."""

    hits: list[int]
    counters: dict[str, int]
    promoted: list[int]


def replay_recorded(trace: Trace, config: Config, slot_bytes: int, start_ns: int = 0) -> Recorded:
    """The trace, read `as_recorded`, at the capacities and policies of `config`; blocks take `slot_bytes` in a tier."""
    clock = ManualClock(start_ns)
    return run_virtual(clock, lambda loop: _RecordedStore(trace, config, slot_bytes, clock, loop).run())


class _RecordedStore:
    def __init__(self, trace: Trace, config: Config, slot_bytes: int, clock: ManualClock, loop: VirtualLoop) -> None:
        self._trace, self._clock, self._slot_bytes = trace, clock, slot_bytes
        engine, host = SimulatedMedium(_spec("engine")), SimulatedMedium(_spec("host"))

        def tier(section: TierSection) -> SimulatedTier:
            name, is_host = section.name, section is config.host
            if isinstance(section, GpuSection):
                return SimulatedGpuTier(name, SimulatedMedium(_spec(name)), section.capacity_bytes, loop, engine, host)
            medium, other = (host, engine) if is_host else (SimulatedMedium(_spec(name)), host)
            up = SimulatedLane(f"{name}→{other.spec.name}", medium, other)
            down = SimulatedLane(f"{other.spec.name}→{name}", other, medium)
            kind = MemoryKind.FILE if section is config.nvme else MemoryKind.SYSTEM
            return SimulatedTier(name, medium, section.capacity_bytes, loop, down, up, kind, is_mapped=is_host)

        config = config.with_tier(config.host.name, verify_reads="off")  # there are no bytes
        tiers = [*map(tier, config.tiers)]
        self._store = Store(config, clock, CompletionQueue(loop), make_residency(config, tiers), tiers)
        self._operations = Operations(self._store, DeletionLog(clock))

    async def run(self) -> Recorded:
        trace, clock, start_ns = self._trace, self._clock, self._clock.monotonic_ns()
        clients = {number: client_of(self._store.residency, number) for number in set(trace.tenants.tolist())}
        hits = []
        for at in range(trace.requests):
            for hint in hints_before(trace, at):
                now_ns = clock.set_ns(max(clock.monotonic_ns(), start_ns + hint.time_ns))
                replay_hint(
                    hint, trace, clients[hint.tenant].tenant_id, self._store.residency, self._store.policies, now_ns
                )
            clock.set_ns(max(clock.monotonic_ns(), start_ns + int(trace.times_ns[at])))
            keys = [trace.key(block) for block in trace.blocks[trace.starts[at] : trace.starts[at + 1]].tolist()]
            client = clients[int(trace.tenants[at])]
            if trace.ops[at] == Op.PUT:
                await self._put(client, keys)
                hits.append(0)
            else:
                hits.append(await self._get(client, keys, int(trace.input_tokens[at]), at))
            await self._settle()
        promoted = [flow.promoted_blocks for flow in self._store.flows.tiers]
        return Recorded(hits, self._store.counters.snapshot(), promoted)

    async def _get(self, client: Client, keys: Sequence[bytes], prompt_tokens: int, number: int) -> int:
        context = RequestContext(number, prompt_tokens) if prompt_tokens else None
        held = await self._operations.get.acquire(client, GetRequest(b"".join(keys), context=context))
        await asyncio.sleep(0)  # the access is counted after the answer
        if held.run is not None:
            self._operations.get.release(client, [held.run.lease_id])
        return held.blocks

    async def _put(self, client: Client, keys: Sequence[bytes]) -> None:
        offer = offer_of(keys, self._slot_bytes - HEADER_BYTES)
        async with aclosing(self._operations.put.store(client, offer, DurabilityMode.BATCH)) as answers:
            await anext(answers)

    async def _settle(self) -> None:
        """The client waits until its blocks are durable, and copied to the GPU, before it asks for more."""
        writeback = self._store.writeback
        while any(sharing.waiting for sharing in self._store.sharing):
            await asyncio.sleep(_LOOK_S)
        while writeback is not None and await writeback.flush(_SETTLE_S):
            pass


def _spec(name: str) -> MediumSpec:
    """Takes no time, or as good as none."""
    return MediumSpec(name, 0, _FAST, _FAST, 0.0, parallel=1, duplex=True)
