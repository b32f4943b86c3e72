"""A recording against two tiers: every get and put again, one after the other, through the daemon's own `Store`.

Owns the order of what the daemon's verbs do for one client that waits for each answer: promote, count the access, give
the lease back; make room, publish, write behind. Every decision and every byte moved is the production movement's, on
simulated tiers that take no time, in virtual time. Never reads an operating system's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.host import HostTier
from kvstored.clock import ManualClock
from kvstored.completions import CompletionQueue
from kvstored.config import Config
from kvstored.simulator.machine import MediumSpec
from kvstored.simulator.media import Lane, Medium
from kvstored.simulator.retelling import retell, told_before
from kvstored.simulator.simulated_tiers import SimulatedTier
from kvstored.simulator.trace import Op, Trace
from kvstored.simulator.virtual_time import VirtualLoop, run_virtual
from kvstored.store.assembly import Store, make_residency
from kvstored.store.policies import RequestContext
from kvstored.store.tiering import MAPPED
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.room import BYPASSED

_FAST = 1e15  # bytes a second
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """Hits by request (0 for puts), and what moved, by the daemon's own counters."""

    hits: list[int]
    counters: dict[str, int]


def replay_recorded(trace: Trace, config: Config, slot_bytes: int, start_ns: int = 0) -> Recorded:
    """The trace, read `as_recorded`, at the capacities and policies of `config`; blocks take `slot_bytes` in a tier."""
    clock = ManualClock(start_ns)
    return run_virtual(clock, lambda loop: _RecordedStore(trace, config, slot_bytes, clock, loop).run())


class _RecordedStore:
    def __init__(self, trace: Trace, config: Config, slot_bytes: int, clock: ManualClock, loop: VirtualLoop) -> None:
        self._trace, self._clock, self._slot_bytes = trace, clock, slot_bytes
        engine, host = Medium(_spec("engine")), Medium(_spec("host"))

        def tier(name: str, capacity_bytes: int) -> SimulatedTier:
            medium = Medium(_spec(name))
            up, down = Lane(f"{name}→host", medium, host), Lane(f"host→{name}", host, medium)
            return SimulatedTier(medium, capacity_bytes, loop, down, up)

        dram = SimulatedTier(
            host, config.host.capacity_bytes, loop, Lane("engine→host", engine, host), Lane("host→engine", host, engine)
        )
        self._store = Store(
            config, clock, CompletionQueue(loop), make_residency(config),
            cast(HostTier, dram),  # all that the store asks of it is what a simulated tier has
            tier("nvme", config.nvme.capacity_bytes) if config.nvme.enabled else None,
            [tier(section.name, section.capacity_bytes) for section in config.memory],
        )  # fmt: skip

    async def run(self) -> Recorded:
        trace, clock, start_ns = self._trace, self._clock, self._clock.monotonic_ns()
        tenants = {number: self._store.residency.tenant(f"tenant-{number}") for number in set(trace.tenants.tolist())}
        hits = []
        for at in range(trace.requests):
            for told in told_before(trace, at):
                now_ns = clock.set_ns(max(clock.monotonic_ns(), start_ns + told.time_ns))
                retell(told, trace, tenants[told.tenant], self._store.residency, self._store.policies, now_ns)
            clock.set_ns(max(clock.monotonic_ns(), start_ns + int(trace.times_ns[at])))
            keys = [trace.key(block) for block in trace.blocks[trace.starts[at] : trace.starts[at + 1]].tolist()]
            tenant = tenants[int(trace.tenants[at])]
            if trace.ops[at] == Op.PUT:
                await self._put(tenant, keys)
                hits.append(0)
            else:
                hits.append(await self._get(tenant, keys, int(trace.input_tokens[at]), at))
            await self._settle()
        return Recorded(hits, self._store.counters.snapshot())

    async def _get(self, tenant: int, keys: Sequence[bytes], prompt_tokens: int, number: int) -> int:
        store, residency = self._store, self._store.residency
        rows = residency.find_keys(tenant, keys)
        residency.pin_run(rows)
        wanted = [row for row in rows if not residency.has(row, MAPPED)]
        promotions = [store.promoter.promote(row, Priority.DEMAND) for row in wanted]
        if promotions:
            await asyncio.wait(promotions)
        held = next((at for at, row in enumerate(rows) if not residency.has(row, MAPPED)), len(rows))
        for row in rows[held:]:
            residency.unpin(row)
        for policy in store.policies if prompt_tokens else ():
            policy.expect(RequestContext(number, prompt_tokens))
        residency.request_run(tenant, rows[:held], keys[held:] if held == len(rows) else (), self._clock.monotonic_ns())
        for row in rows[:held]:
            residency.unpin(row)
        return held

    async def _put(self, tenant: int, keys: Sequence[bytes]) -> None:
        store, residency, room = self._store, self._store.residency, self._store.rooms[MAPPED]
        rows = residency.find_keys(tenant, keys)
        if len(rows) == len(keys):
            return
        room.announce(tenant, rows[-1] if rows else -1, keys[len(rows) :])
        begun: list[int] = []
        for depth in range(len(rows), len(keys)):
            slot = room.allocate_now(self._slot_bytes, tenant)
            if slot is None:
                newcomer = (keys[depth], depth) if store.writeback is None else None
                parent = residency.find_any(tenant, keys[depth - 1]) if depth else -1
                found = await room.allocate_for(newcomer, self._slot_bytes, tenant, parent=parent)
                if found is BYPASSED:
                    for key in keys[depth:]:
                        residency.pass_by(tenant, key, self._clock.monotonic_ns())
                    store.counters.add("bypassed_blocks", len(keys) - depth)
                    break
                slot = found
            if slot is None:
                break
            if depth and residency.find_any(tenant, keys[depth - 1]) < 0:
                store.host.free(slot)  # room was made by taking its parent
                break
            row = residency.insert(
                tenant, keys[depth], keys[depth - 1] if depth else NO_PARENT, fingerprint_id=0, group=0, depth=depth,
                payload_bytes=self._slot_bytes, now_ns=self._clock.monotonic_ns(),
            )  # fmt: skip
            residency.attach(row, MAPPED, slot, self._clock.monotonic_ns(), filling=True)
            begun.append(row)
        self._publish(begun)

    def _publish(self, rows: Sequence[int]) -> None:
        store, now_ns = self._store, self._clock.monotonic_ns()
        for row in rows:
            store.residency.publish(row, MAPPED, now_ns)
        store.counters.add("stored_blocks", len(rows))
        if rows:
            store.residency.touch_run(rows, now_ns)
        for row in rows if store.writeback is not None else ():
            if store.writeback is not None and store.writeback.admits(row):
                store.writeback.write_through(row)

    async def _settle(self) -> None:
        """The client waits until its blocks are durable before it asks for more."""
        writeback = self._store.writeback
        while writeback is not None and await writeback.flush(_SETTLE_S):
            pass


def _spec(name: str) -> MediumSpec:
    """Takes no time, or as good as none."""
    return MediumSpec(name, 0, _FAST, _FAST, 0.0, parallel=1, duplex=True)
