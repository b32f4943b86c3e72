"""The store of a simulated node: the daemon's `Store` and its operations, on tiers without bytes.

Owns what an engine does with them: what it asks for, and what it holds while it copies. Every get, put and decision is
the production object's. Times come from the virtual clock alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from kvstore_predictor.base import Predictor
from kvstore_proto.arena import slot_bytes
from kvstore_tiers.segments import MemoryKind
from kvstored.clock import ManualClock
from kvstored.completions import CompletionQueue
from kvstored.config import Config, load_config
from kvstored.config.tiers import MemorySection
from kvstored.policy_names import ALWAYS
from kvstored.simulator.hints import NO_HINTS, Hints
from kvstored.simulator.machine import Machine
from kvstored.simulator.media import Medium, SimulatedLane
from kvstored.simulator.simulated_client import client_of, offer_of
from kvstored.simulator.simulated_remote import SharedObjects, SimulatedRemoteTier
from kvstored.simulator.simulated_tiers import SimulatedTier
from kvstored.simulator.trace import Trace
from kvstored.simulator.virtual_time import VirtualLoop
from kvstored.simulator.visit import Visit
from kvstored.simulator.worth import Model
from kvstored.store.assembly import Store, make_residency
from kvstored.store.blocks.index import DEFAULT_GHOST_KEYS
from kvstored.store.operations import Operations
from kvstored.store.operations.get import Acquired, Expected, LeasedRun, Wanted
from kvstored.store.operations.offer import DurabilityMode
from kvstored.store.policies import ChainHint, RequestContext
from kvstored.store.transfer.remote_gate import RemoteWrites
from kvstored.telemetry import DeletionLog

MakePredictor = Callable[[Trace, float], Predictor]
Answers = AsyncGenerator[Expected | LeasedRun | Acquired, None]
_PATIENT_MS = 3_600_000  # the node decides how long it waits
_EXPIRED_A_TICK = 320
_SETTLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """`tiers`: media of the store and their bytes, fastest first. `speed`: arrivals so many times as fast.
    `predictor(trace, speed)` makes the one that prefetch listens to."""

    machine: Machine
    model: Model
    tiers: tuple[tuple[str, int], ...]
    pool_bytes: int
    policy: str
    admission: str = ALWAYS
    ttl_s: float | None = None
    ghost_keys: int = DEFAULT_GHOST_KEYS
    speed: float = 1.0
    keep_worth: float = 0.0
    policy_below: str | None = None  # of the second tier; None: the daemon's default
    hints: Hints = NO_HINTS
    predictor: MakePredictor | None = None  # None: nothing is predicted
    remote: SharedObjects | None = None  # what this node shares with others


def config_of(settings: NodeSettings, block_bytes: int) -> Config:
    """The daemon's defaults, at the size of the simulated machine: what it runs on has nothing to do with this one."""
    config = load_config(None, ["host.capacity=512MiB", "host.min_free=0", "nvme.capacity=1GiB"])
    ttl_s = settings.ttl_s or 0
    first_bytes, *more = (nbytes for _, nbytes in settings.tiers)
    below_bytes = more.pop() if more else 0
    memory = tuple(
        MemorySection(
            name=f"memory-{number}", capacity_bytes=nbytes, arena_bytes=0, copy_threads=1, policy=config.nvme.policy,
            ttl_s=ttl_s, numa_node=-1,
        )
        for number, nbytes in enumerate(more, 1)
    )  # fmt: skip
    host = replace(
        config.host, capacity_bytes=first_bytes, policy=settings.policy, ttl_s=ttl_s, keep_worth=settings.keep_worth,
        verify_reads="off",
    )  # fmt: skip
    nvme = replace(
        config.nvme, enabled=below_bytes > 0, capacity_bytes=below_bytes, ttl_s=ttl_s,
        policy=settings.policy_below or config.nvme.policy, admission=settings.admission, endurance_bytes_per_day=0,
    )  # fmt: skip
    return replace(
        config,
        listed=(host, *memory, nvme),
        prefetch=replace(config.prefetch, enabled=settings.predictor is not None),
        limits=replace(
            config.limits, max_block_bytes=max(config.limits.max_block_bytes, block_bytes),
            ghosts_per_tenant=settings.ghost_keys,
        ),
    )  # fmt: skip


class NodeStore:
    """`media`: the engine's link, then the store's tiers, fastest first. `lanes` are all there are between them."""

    def __init__(
        self,
        settings: NodeSettings,
        block_bytes: int,
        loop: VirtualLoop,
        clock: ManualClock,
        media: Sequence[Medium],
        trace: Trace,
    ) -> None:
        link, first, *rest = media
        self._loop, self._clock = loop, clock
        self.slot_bytes = slot_bytes(block_bytes)
        self._block_bytes = block_bytes
        self._expires = settings.ttl_s is not None or settings.keep_worth > 0
        top = first.spec.name
        self.to_engine = SimulatedLane(f"{top}→engine", first, link)
        self.from_engine = SimulatedLane(f"engine→{top}", link, first)
        self.lanes = [self.to_engine, self.from_engine]
        config = config_of(settings, block_bytes)
        host, *below = config.tiers
        self.tiers: list[SimulatedTier] = [
            SimulatedTier(
                host.name,
                first,
                host.capacity_bytes,
                loop,
                self.from_engine,
                self.to_engine,
                MemoryKind.SYSTEM,
                is_mapped=True,
            )
        ]
        above = first
        for medium, section in zip(rest, below, strict=True):
            name, is_last = medium.spec.name, medium is rest[-1]
            source = first if is_last else above  # blocks are written to the last one from the first, mostly
            up, down = (
                SimulatedLane(f"{name}→{top}", medium, first),
                SimulatedLane(f"{source.spec.name}→{name}", source, medium),
            )
            self.lanes += [up, down]
            kind = MemoryKind.FILE if is_last else MemoryKind.SYSTEM
            self.tiers.append(SimulatedTier(section.name, medium, section.capacity_bytes, loop, down, up, kind))
            above = medium
        writes = None
        if settings.remote is not None:
            tier = SimulatedRemoteTier(settings.remote, loop, first)
            self.tiers.append(tier)
            self.lanes += [tier.up, tier.down]
            writes = RemoteWrites(settings.remote.spec.share)
        predictor = settings.predictor(trace, settings.speed) if settings.predictor is not None else None
        self.store = Store(
            config, clock, CompletionQueue(loop), make_residency(config, self.tiers), self.tiers, predictor, writes
        )
        self.wait_s = config.movement.acquire_wait_ms / 1000
        self._operations = Operations(self.store, DeletionLog(clock))
        self._clients = [client_of(self.store.residency, number) for number in range(int(trace.tenants.max()) + 1)]

    @property
    def names(self) -> list[str]:
        """Of the media of the tiers, fastest first."""
        return [tier.medium.spec.name for tier in self.tiers]

    @property
    def stored_blocks(self) -> int:
        return self.store.counters["stored_blocks"]

    @property
    def no_room_blocks(self) -> int:
        """Blocks for which no room could be made."""
        return self.store.counters["no_room_blocks"]

    @property
    def declined_blocks(self) -> int:
        """Blocks that the policy thought worth less than what was there."""
        return self.store.counters["declined_blocks"]

    def local_blocks(self, tenant: int, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a chain this node's own tiers have: what its events say."""
        residency = self.store.residency
        own = (1 << len(self.tiers) - len(self.store.keyed)) - 1
        rows = residency.find_keys(self._clients[tenant].tenant_id, keys)
        return next((at for at, row in enumerate(rows) if not residency.rows.mask[row] & own), len(rows))

    # Getting

    def prefetch(self, visit: Visit, in_pool: int) -> None:
        """Let what is in slower tiers move up, the last block first; no request waits for it. The first `in_pool`
        blocks are with the engine."""
        residency, promoter = self.store.residency, self.store.promoter
        rows = residency.find_keys(self._clients[visit.tenant].tenant_id, visit.keys)
        rows = promoter.reachable_run(rows)
        for position in range(len(rows) - 1, in_pool - 1, -1):
            if not residency.has(rows[position], residency.mapped):
                source = residency.fastest(rows[position])
                if not promoter.prefetch(rows[position]):
                    break
                visit.fetched[position] = source

    async def begin_get(self, visit: Visit, arrived: Callable[[int], None]) -> None:
        """Lease what the store has of the chain beyond the engine's own blocks, the last first. `arrived` is called
        with the number of blocks that became mapped, now and later; `visit.ready` says which."""
        wanted = Wanted(
            b"".join(visit.keys), _PATIENT_MS, _PATIENT_MS, from_back=True,
            context=RequestContext(visit.number, visit.tokens, visit.kind, bool(visit.answer_tokens)),
        )  # fmt: skip
        answers = self._operations.get.acquire_in_order(self._clients[visit.tenant], wanted, visit.in_pool)
        expected = await anext(answers)
        assert isinstance(expected, Expected)
        below = list(enumerate(expected.tiers))[visit.in_pool :]
        sources = Counter(visit.fetched.get(position, tier) for position, tier in below)
        visit.found = [sources[tier] for tier in range(len(self.tiers))]
        visit.ready = [True] * visit.in_pool + [tier == self.store.residency.mapped for _, tier in below]
        mapped = sum(visit.ready) - visit.in_pool
        if mapped:
            arrived(mapped)
        visit.is_loading = True
        visit.answers = answers
        visit.loading = asyncio.create_task(self._load(visit, answers, arrived))

    async def _load(self, visit: Visit, answers: Answers, arrived: Callable[[int], None]) -> None:
        async for answer in answers:
            if isinstance(answer, LeasedRun):
                visit.leases.append(answer.lease_id)
                run = range(answer.first, answer.first + len(answer.rows))
                # What was computed meanwhile is not copied to the engine.
                fresh = [at for at in run if not visit.ready[at]] if visit.is_loading else []
                for at in fresh:
                    visit.ready[at] = True
                if fresh:
                    arrived(len(fresh))
                    visit.changed.set()
        visit.is_loading = False
        visit.changed.set()

    async def end_get(self, visit: Visit) -> None:
        """The engine has its copy: everything that was held may be evicted."""
        if visit.loading is not None and visit.answers is not None:
            visit.loading.cancel()
            await asyncio.wait([visit.loading])
            await visit.answers.aclose()
        self._operations.get.release(self._clients[visit.tenant], visit.leases)
        visit.leases.clear()

    def answered(self, visit: Visit) -> None:
        """The request has ended."""
        self.store.feed.answered(visit.number, visit.answer_tokens, self._clock.monotonic_ns())

    def hint(self, visit: Visit, hint: ChainHint, due_in_ms: int | None) -> None:
        """What the engine expects of the chain of a request that has ended."""
        self._operations.hints.hint(self._clients[visit.tenant], visit.keys, hint, due_in_ms)

    # Putting

    async def put(self, visit: Visit, *, writes_behind: bool) -> None:
        """Store the blocks of the chain that are not stored. Ends when they are readable."""
        mode = DurabilityMode.BATCH if writes_behind else DurabilityMode.NONE
        offer = offer_of(visit.keys, self._block_bytes)
        async with aclosing(self._operations.put.store(self._clients[visit.tenant], offer, mode)) as answers:
            await anext(answers)

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
