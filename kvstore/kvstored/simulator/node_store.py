"""The store of a simulated node: the daemon's `Store`, composed by the daemon's own code, on tiers without bytes.

Owns what the daemon's verbs do for a client, as far as time is concerned: what a get waits for and holds, a prefetch, a
put with its write-back. Every decision (victims, admission, order on the lanes, what is refused) is the production
object's. Times come from the virtual clock alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from kvstore_proto.arena import slot_bytes
from kvstore_proto.identity import NO_PARENT
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.completions import CompletionQueue
from kvstored.config import Config, load_config
from kvstored.config.schema import MemorySection
from kvstored.simulator.media import Lane, Medium
from kvstored.simulator.simulated_tiers import SimulatedTier
from kvstored.simulator.virtual_time import VirtualLoop
from kvstored.simulator.visit import Visit
from kvstored.store.assembly import Store, make_residency
from kvstored.store.blocks.index import DEFAULT_GHOST_KEYS
from kvstored.store.policies import RequestContext
from kvstored.store.tiering import MAPPED
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.room import BYPASSED

PART_BLOCKS = 32  # of a put are copied together, as in the daemon
_LEASE_NS = 30 * NS_PER_S
_EXPIRED_A_TICK = 320
_SETTLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """`capacities`: bytes of each tier, fastest first. The policy of the last of several is `policy_below`, by default
    the daemon's.
    """

    capacities: tuple[int, ...]
    block_bytes: int
    policy: str
    admission: str = "always"
    ttl_s: float | None = None
    ghost_keys: int = DEFAULT_GHOST_KEYS
    keep_worth: float = 0.0
    policy_below: str | None = None


def config_of(settings: StoreSettings) -> Config:
    """The daemon's defaults, at the size of the simulated machine: what it runs on has nothing to do with this one."""
    config = load_config(None, ["host.capacity=512MiB", "host.min_free=0", "nvme.capacity=1GiB"])
    ttl_s = settings.ttl_s or 0
    first_bytes, *more = settings.capacities
    below_bytes = more.pop() if more else 0
    memory = tuple(
        MemorySection(f"memory-{number}", nbytes, 0, 1, config.nvme.policy, ttl_s, -1)
        for number, nbytes in enumerate(more, 1)
    )
    return replace(
        config,
        host=replace(
            config.host, capacity_bytes=first_bytes, policy=settings.policy, ttl_s=ttl_s,
            keep_worth=settings.keep_worth,
        ),
        memory=memory,
        nvme=replace(
            config.nvme, enabled=below_bytes > 0, capacity_bytes=below_bytes, ttl_s=ttl_s,
            policy=settings.policy_below or config.nvme.policy, admission=settings.admission, endurance_bytes_per_day=0,
        ),
        limits=replace(
            config.limits, max_block_bytes=max(config.limits.max_block_bytes, settings.block_bytes),
            ghosts_per_tenant=settings.ghost_keys,
        ),
    )  # fmt: skip


class NodeStore:
    """`media`: the engine's link, then the store's tiers, fastest first. `lanes` are all there are between them."""

    def __init__(
        self, settings: StoreSettings, loop: VirtualLoop, clock: ManualClock, media: Sequence[Medium], tenants: int
    ) -> None:
        link, first, *rest = media
        self._loop, self._clock = loop, clock
        self.slot_bytes = slot_bytes(settings.block_bytes)
        self._block_bytes = settings.block_bytes
        self._expires = settings.ttl_s is not None or settings.keep_worth > 0
        top = first.spec.name
        self.to_engine = Lane(f"{top}→engine", first, link)
        self.from_engine = Lane(f"engine→{top}", link, first)
        self.lanes = [self.to_engine, self.from_engine]
        self.tiers = [SimulatedTier(first, settings.capacities[0], loop, self.from_engine, self.to_engine)]
        above = first
        for medium, nbytes in zip(rest, settings.capacities[1:], strict=True):
            name, is_last = medium.spec.name, medium is rest[-1]
            source = first if is_last else above  # blocks are written to the last one from the first, mostly
            up, down = Lane(f"{name}→{top}", medium, first), Lane(f"{source.spec.name}→{name}", source, medium)
            self.lanes += [up, down]
            self.tiers.append(SimulatedTier(medium, nbytes, loop, down, up))
            above = medium
        host, *memory = self.tiers
        below = memory.pop() if memory else None
        config = config_of(settings)
        self.store = Store(
            config, clock, CompletionQueue(loop), make_residency(config),
            cast(HostTier, host),  # all that the store asks of it is what a simulated tier has
            below, memory,
        )  # fmt: skip
        self.wait_s = config.movement.acquire_wait_ms / 1000
        self._tenants = [self.store.residency.tenant(f"tenant-{number}") for number in range(tenants)]
        self.stored_blocks = self.throttled_blocks = self.bypassed_blocks = 0

    # Getting

    def prefetch(self, visit: Visit, in_pool: int) -> None:
        """Let what lies below move up; nobody waits for it. The first `in_pool` blocks are with the engine."""
        store = self.store
        for row in reversed(self._run(visit)[in_pool:]):
            if not store.residency.has(row, MAPPED):
                source = store.residency.fastest(row)
                if not store.promoter.prefetch(row):
                    break
                visit.fetched[store.residency.token(row)] = source

    def begin_get(self, visit: Visit, arrived: Callable[[int], None]) -> None:
        """Pin and lease what the store has of the chain beyond the engine's own blocks, and begin to promote what is
        not mapped, the last first. `arrived` is told how many blocks became mapped, now and later; `visit.ready` which.
        """
        residency, promoter = self.store.residency, self.store.promoter
        found = self._run(visit)
        self._touch(visit, found)
        visit.is_loading = True
        visit.ready = [True] * visit.in_pool
        rows = found[visit.in_pool :]
        residency.pin_run(rows)
        visit.pinned = [residency.token(row) for row in rows]
        mapped = [row for row in rows if residency.has(row, MAPPED)]
        visit.ready += [residency.has(row, MAPPED) for row in rows]
        tiers = Counter(visit.fetched.get(residency.token(row), residency.fastest(row)) for row in rows)
        visit.found = [tiers[position] for position in range(len(self.tiers))]
        if mapped:
            self._lease(visit, mapped)
            arrived(len(mapped))
        for position in range(len(rows) - 1, -1, -1):
            row = rows[position]
            if not visit.ready[visit.in_pool + position]:
                promotion = promoter.promote(row, Priority.DEMAND)
                promotion.add_done_callback(partial(self._promoted, visit, position, arrived))

    def end_get(self, visit: Visit) -> None:
        """The engine has its copy: everything that was held may leave."""
        self.store.leases.release_session(visit.number)
        self.store.residency.unpin_run(visit.pinned)
        visit.pinned = []

    def patience_s(self, visit: Visit) -> float:
        """How long a get waits: what the daemon's get waits at most."""
        residency = self.store.residency
        rows = [row for row in map(residency.current, visit.pinned) if row >= 0 and not residency.has(row, MAPPED)]
        return min(self.wait_s, self.store.promoter.patience_ms(rows) / 1000)

    def answered(self, visit: Visit) -> None:
        """The policies hear that the request has ended."""
        for policy in self.store.policies:
            policy.answered(visit.number, visit.answer_tokens, self._clock.monotonic_ns())

    def _promoted(
        self, visit: Visit, position: int, arrived: Callable[[int], None], promotion: asyncio.Future[bool]
    ) -> None:
        if not visit.is_loading or not promotion.result() or visit.ready[visit.in_pool + position]:
            return  # nobody waits for it any more, or it was computed meanwhile
        self._lease(visit, [self.store.residency.current(visit.pinned[position])])
        visit.ready[visit.in_pool + position] = True
        arrived(1)
        visit.changed.set()

    def _lease(self, visit: Visit, rows: Sequence[int]) -> None:
        """As a get does; its own pins are beside those that the lease takes over."""
        store = self.store
        store.residency.pin_run(rows)
        store.leases.grant(
            visit.number, self._tenants[visit.tenant], [store.residency.token(row) for row in rows],
            store.residency.slots(rows, MAPPED), self._clock.monotonic_ns() + _LEASE_NS,
        )  # fmt: skip

    def _run(self, visit: Visit) -> list[int]:
        rows = self.store.residency.find_keys(self._tenants[visit.tenant], visit.keys)
        return self.store.promoter.reachable_run(rows)

    def _touch(self, visit: Visit, rows: list[int]) -> None:
        for policy in self.store.policies:
            policy.expect(RequestContext(visit.number, visit.tokens, visit.kind, bool(visit.answer_tokens)))
        self.store.residency.request_run(
            self._tenants[visit.tenant], rows, visit.keys[len(rows) :], self._clock.monotonic_ns()
        )

    # Putting

    async def put(self, visit: Visit, *, writes_behind: bool) -> None:
        """Store the blocks of the chain that are not stored, a part at a time, as the daemon's intake does."""
        residency, tenant = self.store.residency, self._tenants[visit.tenant]
        rows = residency.find_keys(tenant, visit.keys)
        at = len(rows)
        if at < visit.blocks and not self._is_there(tenant, visit.keys[at]):
            self.store.rooms[MAPPED].announce(tenant, rows[-1] if rows else -1, visit.keys[at:])
        while at < visit.blocks:
            end = min(at + PART_BLOCKS, visit.blocks)
            tokens, began = await self._begin(tenant, visit.keys, at, end, writes_behind)
            if tokens:
                passage = self.from_engine.send(len(tokens) * self.slot_bytes, self._clock.monotonic_ns())
                await self.until(passage.end_ns)
                self._publish(tokens, writes_behind)
            if began < end:
                return
            at = end

    async def _begin(
        self, tenant: int, keys: Sequence[bytes], at: int, end: int, writes_behind: bool
    ) -> tuple[list[int], int]:
        """Slots and unreadable rows for blocks `at` up to `end`; the rows' tokens, and where it had to stop."""
        room = self.store.rooms[MAPPED]
        tokens: list[int] = []
        while at < end:
            if self._is_there(tenant, keys[at]):
                at += 1
                continue
            slot = room.allocate_now(self.slot_bytes, tenant)
            if slot is None:
                # As in the daemon: what is to be written below has to have a place above first.
                may_decline = self.store.writeback is None or not writes_behind
                newcomer = (keys[at], at) if may_decline else None
                parent = self.store.residency.find_any(tenant, keys[at - 1]) if at else -1
                found = await room.allocate_for(newcomer, self.slot_bytes, tenant, parent=parent)
                if found is BYPASSED:
                    self._pass_by(tenant, keys[at:])
                    break
                slot = found
            if slot is None:
                self.throttled_blocks += len(keys) - at
                break
            parent_key = keys[at - 1] if at else NO_PARENT
            if self._is_there(tenant, keys[at]) or (at and not self._is_there(tenant, parent_key)):
                self.store.host.free(slot)  # while room was made: somebody else stores it, or its parent has gone
                if not self._is_there(tenant, keys[at]):
                    break
                continue
            tokens.append(self._insert(tenant, keys[at], parent_key, at, slot))
            at += 1
        return tokens, at

    def _pass_by(self, tenant: int, keys: Sequence[bytes]) -> None:
        """The policy would rather keep what is here than these."""
        now_ns = self._clock.monotonic_ns()
        for key in keys:
            self.store.residency.pass_by(tenant, key, now_ns)
        self.bypassed_blocks += len(keys)

    def _insert(self, tenant: int, key: bytes, parent_key: bytes, depth: int, slot: Slot) -> int:
        residency, now_ns = self.store.residency, self._clock.monotonic_ns()
        row = residency.insert(
            tenant, key, parent_key, fingerprint_id=0, group=0, depth=depth, payload_bytes=self._block_bytes,
            now_ns=now_ns,
        )  # fmt: skip
        residency.attach(row, MAPPED, slot, now_ns, filling=True)
        return residency.token(row)

    def _is_there(self, tenant: int, key: bytes) -> bool:
        row = self.store.residency.find_any(tenant, key)
        return row >= 0 and bool(self.store.residency.tier_mask(row) or self.store.residency.being_filled(row))

    def _publish(self, tokens: Sequence[int], writes_behind: bool) -> None:
        residency, writeback, now_ns = self.store.residency, self.store.writeback, self._clock.monotonic_ns()
        rows = [residency.current(token) for token in tokens]
        for row in rows:
            residency.publish(row, MAPPED, now_ns)
        self.stored_blocks += len(rows)
        residency.touch_run(rows, now_ns)
        if writeback is None or not writes_behind:
            return
        for token in tokens:
            row = residency.current(token)
            if row >= 0 and writeback.admits(row):
                writeback.write_through(row)

    # Time

    def tick(self) -> None:
        """What the daemon's maintenance does."""
        self.store.tick()
        if not self._expires:
            return
        now_ns = self._clock.monotonic_ns()
        for policy, room in zip(self.store.policies, self.store.rooms, strict=True):
            for row in policy.expired(now_ns, _EXPIRED_A_TICK):
                room.expire(row)

    async def settle(self) -> None:
        """Let what is being written end."""
        while self.store.writeback is not None and await self.store.writeback.flush(_SETTLE_S):
            pass

    async def until(self, when_ns: int) -> None:
        while (wait_ns := when_ns - self._clock.monotonic_ns()) > 0:
            await asyncio.sleep(wait_ns / NS_PER_S)
