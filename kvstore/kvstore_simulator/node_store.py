"""The store of a simulated node: the daemon's `Store` and its operations, on tiers without bytes.

Owns what an engine does with them: what it asks for, and what it holds while it copies. Every get, put and decision is
the production object's. Times come from the virtual clock alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore_predictor.base import Predictor
from kvstore_proto.arena import slot_bytes
from kvstore_simulator.hints import NO_HINTS, Hints
from kvstore_simulator.machine import GPU, Machine
from kvstore_simulator.policies import address_of
from kvstore_simulator.simulated_client import client_of, offer_of
from kvstore_simulator.simulated_remote import SharedObjects, SimulatedRemoteTier
from kvstore_simulator.simulated_tiers import Medium, SimulatedGpuTier, SimulatedLane, SimulatedTier
from kvstore_simulator.trace import Trace
from kvstore_simulator.virtual_time import VirtualLoop
from kvstore_simulator.visit import Visit
from kvstore_simulator.worth import Model
from kvstore_tiers.segments import MemoryKind
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.completions import CompletionQueue
from kvstored.config import Config, load_config
from kvstored.config.tiers import GpuSection, MemorySection, TierSection
from kvstored.config.tiers import Machine as Host
from kvstored.config.tiers.gpu import OFF
from kvstored.policy_names import ALWAYS
from kvstored.store.assembly import Store
from kvstored.store.blocks.index import DEFAULT_GHOST_KEYS
from kvstored.store.operations import Operations
from kvstored.store.operations.get import Acquired, Expected, LeasedRun, Wanted
from kvstored.store.operations.offer import DurabilityMode
from kvstored.store.policies import ChainHint, RequestContext
from kvstored.store.residency import make_residency
from kvstored.store.transfer.remote_gate import RemoteWrites
from kvstored.store.transfer.sharing import DELAY_S
from kvstored.telemetry import DeletionLog

MakePredictor = Callable[[Trace, float], Predictor]
Arrived = Callable[[int, int], None]  # blocks in host memory, and on the device
Answers = AsyncGenerator[Expected | LeasedRun | Acquired, None]
_PATIENT_MS = 3_600_000  # the node decides how long it waits
_EXPIRED_A_TICK = 320
_SETTLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """`tiers`: media of the store and their bytes, fastest first. `speed`: arrivals so many times as fast.
    `predictor(trace, speed)` makes the one that prefetch listens to. `gpu`: settings of the tier of that name, as in
    the daemon's configuration."""

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
    gpu: Mapping[str, str] = field(default_factory=dict)

    @property
    def without_gpu(self) -> NodeSettings:
        """With the memory of that tier for the engine's own blocks."""
        tiers = dict(self.tiers)
        return replace(self, pool_bytes=self.pool_bytes + tiers.pop(GPU, 0), tiers=tuple(tiers.items()))


def config_of(settings: NodeSettings, block_bytes: int) -> Config:
    """The daemon's defaults, at the size of the simulated machine: what it runs on has nothing to do with this one."""
    config = load_config(None, ["host.capacity=512MiB", "host.min_free=0", "nvme.capacity=1GiB"])
    ttl_s = settings.ttl_s or 0
    first_bytes, *more = (nbytes for name, nbytes in settings.tiers if name != GPU)
    below_bytes = more.pop() if more else 0
    memory = tuple(
        MemorySection(
            name=f"memory-{number}", capacity_bytes=nbytes, arena_bytes=0, copy_threads=1, policy=config.nvme.policy,
            ttl_s=ttl_s, numa_node=-1,
        )
        for number, nbytes in enumerate(more, 1)
    )  # fmt: skip
    host = replace(
        config.host, capacity_bytes=first_bytes, policy=address_of(settings.policy), ttl_s=ttl_s,
        keep_worth=settings.keep_worth, verify_reads="off",
    )  # fmt: skip
    nvme = replace(
        config.nvme, enabled=below_bytes > 0, capacity_bytes=below_bytes, ttl_s=ttl_s,
        policy=address_of(settings.policy_below or config.nvme.policy), admission=settings.admission,
        endurance_bytes_per_day=0,
    )  # fmt: skip
    listed: list[TierSection] = [host, *memory, nvme]
    for position, (name, nbytes) in enumerate(settings.tiers):
        if name == GPU:  # before the host's tier or right after it
            listed.insert(position, _gpu_section(settings, nbytes))
    return replace(
        config,
        listed=tuple(listed),
        prefetch=replace(config.prefetch, enabled=settings.predictor is not None),
        limits=replace(
            config.limits, max_block_bytes=max(config.limits.max_block_bytes, block_bytes),
            ghosts_per_tenant=settings.ghost_keys,
        ),
    )  # fmt: skip


def _gpu_section(settings: NodeSettings, capacity_bytes: int) -> GpuSection:
    table = {**GpuSection.DEFAULTS, **settings.gpu, "capacity": str(capacity_bytes), "ttl_s": settings.ttl_s or 0}
    section = GpuSection.read(GPU, table, Host(capacity_bytes, Path()))
    return replace(section, policy=address_of(section.policy))


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
        link, *more = media
        first, *rest = (medium for medium in more if medium.spec.name != GPU)
        self._loop, self._clock = loop, clock
        self.slot_bytes = slot_bytes(block_bytes)
        self._block_bytes = block_bytes
        self._expires = settings.ttl_s is not None or settings.keep_worth > 0
        top = first.spec.name
        self.to_engine = SimulatedLane(f"{top}→engine", first, link)
        self.from_engine = SimulatedLane(f"engine→{top}", link, first)
        self.lanes = [self.to_engine, self.from_engine]
        config = config_of(settings, block_bytes)
        sections = [section for section in config.tiers if not isinstance(section, GpuSection)]
        self.tiers = self._make_tiers(first, rest, sections)
        self._from_gpu: SimulatedLane | None = None
        for position, medium in enumerate(more):
            if medium.spec.name == GPU:
                below = self.tiers[-1] if position == 0 else None
                self.tiers.insert(position, self._make_gpu(config.tiers[position], medium, link, first, below))
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
        residency = self.store.residency
        self._clients = [
            client_of(residency, number, residency.exported) for number in range(int(trace.tenants.max()) + 1)
        ]

    def _make_tiers(
        self, first: Medium, rest: Sequence[Medium], sections: Sequence[TierSection]
    ) -> list[SimulatedTier]:
        """The mapped tier on `first`, and those below it on `rest`."""
        host, *below = sections
        top, loop = first.spec.name, self._loop
        tiers = [
            SimulatedTier(
                host.name, first, host.capacity_bytes, loop, self.from_engine, self.to_engine, MemoryKind.SYSTEM,
                is_mapped=True,
            )
        ]  # fmt: skip
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
            tiers.append(SimulatedTier(section.name, medium, section.capacity_bytes, loop, down, up, kind))
            above = medium
        return tiers

    def _make_gpu(
        self, section: TierSection, medium: Medium, link: Medium, host: Medium, below: SimulatedTier | None
    ) -> SimulatedTier:
        """`below`: the slowest tier, if blocks may come from its files past DRAM."""
        reads_files = isinstance(section, GpuSection) and section.from_nvme != OFF
        nvme = below.medium if reads_files and below is not None and below.info.lends_files else None
        tier = SimulatedGpuTier(section.name, medium, section.capacity_bytes, self._loop, link, host, nvme)
        self._from_gpu = tier.to_engine
        self.lanes += [tier.to_engine, tier.up, tier.down, *([tier.straight] if tier.straight else [])]
        return tier

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
        mask, readable = residency.rows.mask, residency.readable(residency.exported)
        rows = residency.find_keys(self._clients[visit.tenant].tenant_id, visit.keys)
        rows = promoter.reachable_run(rows)
        for position in range(len(rows) - 1, in_pool - 1, -1):
            if not mask[rows[position]] & readable:
                source = residency.fastest(rows[position])
                if not promoter.prefetch(rows[position]):
                    break
                visit.fetched[position] = source

    async def begin_get(self, visit: Visit, arrived: Arrived) -> None:
        """Lease what the store has of the chain beyond the engine's own blocks, the last first. `arrived` is called
        with the number of blocks that became readable in host and in device memory, now and later; `visit.ready` says
        which."""
        wanted = Wanted(
            b"".join(visit.keys), _PATIENT_MS, _PATIENT_MS, from_back=True,
            context=RequestContext(visit.number, visit.tokens, visit.kind, bool(visit.answer_tokens)),
        )  # fmt: skip
        answers = self._operations.get.acquire_in_order(self._clients[visit.tenant], wanted, visit.in_pool)
        expected = await anext(answers)
        assert isinstance(expected, Expected)
        residency, below = self.store.residency, list(enumerate(expected.tiers))[visit.in_pool :]
        visit.on_device = self._on_device(visit, len(expected.tiers))
        sources = Counter(visit.on_device.get(position, visit.fetched.get(position, tier)) for position, tier in below)
        visit.found = [sources[tier] for tier in range(len(self.tiers))]
        visit.ready = [True] * visit.in_pool
        visit.ready += [tier == residency.mapped or position in visit.on_device for position, tier in below]
        mapped = sum(visit.ready) - visit.in_pool - len(visit.on_device)
        if mapped or visit.on_device:
            arrived(mapped, len(visit.on_device))
        visit.is_loading = True
        visit.answers = answers
        visit.loading = asyncio.create_task(self._load(visit, answers, arrived))

    def _on_device(self, visit: Visit, blocks: int) -> dict[int, int]:
        """By position of those that the engine reads in the device's memory: the tier."""
        residency = self.store.residency
        if not residency.exported:
            return {}
        rows = residency.find_keys(self._clients[visit.tenant].tenant_id, visit.keys[:blocks])
        return self._device_tiers({at: row for at, row in enumerate(rows) if at >= visit.in_pool})

    def _device_tiers(self, rows: Mapping[int, int]) -> dict[int, int]:
        """By position, of those of `rows` that are in the device's memory: the tier."""
        residency = self.store.residency
        found = {at: residency.rows.mask[row] & residency.exported for at, row in rows.items()}
        return {at: (here & -here).bit_length() - 1 for at, here in found.items() if here}

    def copy(self, mapped: int, on_device: int) -> int:
        """Copy so many blocks from host memory to the engine, and so many within the device's; when all are there."""
        now_ns = self._clock.monotonic_ns()
        ends_ns = [now_ns]
        for lane, blocks in ((self.to_engine, mapped), (self._from_gpu, on_device)):
            if blocks and lane is not None:
                ends_ns.append(lane.send(blocks * self.slot_bytes, now_ns).end_ns)
        return max(ends_ns)

    async def _load(self, visit: Visit, answers: Answers, arrived: Arrived) -> None:
        async for answer in answers:
            if isinstance(answer, LeasedRun):
                visit.leases.append(answer.lease_id)
                run = range(answer.first, answer.first + len(answer.rows))
                # What was computed meanwhile is not copied to the engine.
                fresh = [at for at in run if not visit.ready[at]] if visit.is_loading else []
                for at in fresh:
                    visit.ready[at] = True
                if fresh:
                    straight = self._device_tiers({at: answer.rows[at - answer.first] for at in fresh})
                    visit.on_device |= straight
                    arrived(len(fresh) - len(straight), len(straight))
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
        until_ns = self._clock.monotonic_ns() + round(_SETTLE_S * NS_PER_S)
        while any(each.waiting for each in self.store.sharing) and self._clock.monotonic_ns() < until_ns:
            await asyncio.sleep(DELAY_S)
