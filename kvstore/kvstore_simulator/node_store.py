"""The blocks of a simulated node: in the engine's own memory, and in the daemon's `Store`, on tiers without bytes.

The module plays the engine: it asks for blocks, and holds them while it copies. The production objects do every get,
put and decision. Times come from the virtual clock alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from kvstore_proto.arena import slot_bytes
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import KEY_BYTES, NO_PARENT
from kvstore_simulator.machine import GPU
from kvstore_simulator.node_settings import NodeSettings, config_of
from kvstore_simulator.simulated_remote import SimulatedRemoteTier
from kvstore_simulator.simulated_request import SimulatedRequest
from kvstore_simulator.simulated_tiers import SimulatedGpuTier, SimulatedLane, SimulatedMedium, SimulatedTier
from kvstore_simulator.trace import Trace
from kvstore_simulator.virtual_time import VirtualLoop
from kvstore_tiers.base import Slot
from kvstore_tiers.segments import MemoryKind
from kvstored.clients.tenants import Tenant
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.completions import CompletionQueue
from kvstored.config.schema import TenantSection
from kvstored.config.tiers import GpuSection, TierSection
from kvstored.config.tiers.gpu import OFF
from kvstored.lifecycle import Cause
from kvstored.policy_names import LRU
from kvstored.store.assembly import Store
from kvstored.store.blocks import Residency
from kvstored.store.operations import Client, Operations
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import Acquired, GetRequest, GrantedRun, Offer, Outlook
from kvstored.store.policies import ChainHint, RequestContext, create
from kvstored.store.residency import make_residency
from kvstored.store.transfer.admission import RemoteWrites
from kvstored.store.transfer.sharing import DELAY_S
from kvstored.telemetry import DeletionLog
from kvstored.tier_set import NO_TIERS, TIER_SETS, TierSet

POOL = 0


class EnginePool:
    """The blocks in a simulated engine's own memory: `capacity_blocks` blocks of `block_bytes` bytes, for its prefix
    cache and its running requests. A request holds all of its blocks until it has been served and its new blocks have
    been copied out. Blocks that no request holds are evicted by LRU.
    """

    def __init__(self, capacity_blocks: int, block_bytes: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._block_bytes = block_bytes
        self.residency = Residency((LRU,))
        self.policy = create(LRU, self.residency, POOL)
        self._free: list[Slot] = []
        self._made = 0

    def leading(self, tenant: int, keys: Sequence[bytes]) -> int:
        """Return the number of leading blocks of the chain `keys` that are in the engine's memory now."""
        return len(self.residency.find_keys(tenant, keys))

    def hold(self, tenant: int, keys: Sequence[bytes], now_ns: int) -> tuple[int, list[int]] | None:
        """Put the whole chain `keys` into the engine's memory. Return the number of leading blocks that were there
        already, and the row numbers of all blocks, which are pinned until `release`. Return None if the other requests
        hold too many blocks.
        """
        residency = self.residency
        rows = residency.find_keys(tenant, keys)
        residency.pin_run(rows)
        over = residency.tier_blocks(POOL) + len(keys) - len(rows) - self.capacity_blocks
        if over > 0:
            freed = residency.remove_chosen(POOL, self.policy.next_victim, over, Cause.EVICTED, now_ns)
            self._free.extend(freed)
            if len(freed) < over:
                self.release(rows)
                return None
        here = len(rows)
        if here < len(keys):
            stored = residency.store_run(
                tenant, keys[here:], rows[-1] if rows else -1, POOL, self._slots(len(keys) - here),
                fingerprint_id=0, group=0, payload_bytes=self._block_bytes, now_ns=now_ns,
            )  # fmt: skip
            residency.pin_run(stored)
            rows += stored
        if rows:
            residency.touch_run(rows, now_ns)
        return here, rows

    def release(self, rows: Sequence[int]) -> None:
        """Unpin the blocks in `rows`, a result of `hold`, so that they may be evicted."""
        for row in rows:
            self.residency.unpin(row)

    def _slots(self, count: int) -> list[Slot]:
        while len(self._free) < count:
            self._free.append(Slot(0, self._made, self._block_bytes, 1))
            self._made += 1
        taken = self._free[-count:]
        del self._free[-count:]
        return taken


_FINGERPRINT = Fingerprint("simulated", "none", groups=(LayerGroup(0),))
_NO_EXTRA = bytes(KEY_BYTES)


class NoBytes:
    """A staging memory without bytes, for simulated puts: a payload has no address or tokens. It implements
    `StagedBlocks`.
    """

    def tokens_of(self, offsets: Sequence[int]) -> list[bytes]:
        return [b""] * len(offsets)

    def payloads_at(self, offsets: Sequence[int]) -> tuple[list[int], object]:
        return [0] * len(offsets), None


_NO_BYTES = NoBytes()


def client_of(residency: Residency, number: int, device_tiers: TierSet = NO_TIERS) -> Client:
    """Return a daemon's client that stands for tenant number `number` of a trace. `device_tiers` are the GPU tiers on
    the device where the client computes.
    """
    name = f"tenant-{number}"
    return Client(
        session_id=number + 1, client_name=name, tenant=Tenant(name, bytes(16), b"", TenantSection(name)),
        tenant_id=residency.tenant(name), fingerprint=_FINGERPRINT, fingerprint_digest=_FINGERPRINT.digest(),
        fingerprint_id=0, roots={}, device_tiers=device_tiers,
    )  # fmt: skip


def offer_of(keys: Sequence[bytes], payload_bytes: int) -> Offer:
    """Return the offer that a put of the chain `keys` makes to the daemon's store. Each block has `payload_bytes`
    bytes.
    """
    count = len(keys)
    return Offer(
        0, b"".join(keys), keys, [NO_PARENT, *keys[:-1]], [_NO_EXTRA] * count, [payload_bytes] * count, _NO_BYTES,
        range(count),
    )  # fmt: skip


Arrived = Callable[[int, int], None]  # blocks in host memory, and on the device
Answers = AsyncGenerator[Outlook | GrantedRun | Acquired, None]
_PATIENT_MS = 3_600_000  # the node decides how long it waits
_SETTLE_S = 3600.0
_TICKS_OF_MAINTENANCE = 5  # of the daemon, for one of a node's


class NodeStore:
    """The daemon's own store in a simulated node, over simulated tiers. `media` are the engine's link and then the
    media of the store's tiers, fastest first. `lanes` are the queues of transfers between them.
    """

    def __init__(
        self,
        settings: NodeSettings,
        block_bytes: int,
        loop: VirtualLoop,
        clock: ManualClock,
        media: Sequence[SimulatedMedium],
        trace: Trace,
    ) -> None:
        link, *more = media
        first, *rest = (medium for medium in more if medium.spec.name != GPU)
        self._loop, self._clock = loop, clock
        self.slot_bytes = slot_bytes(block_bytes)
        self._block_bytes = block_bytes
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
        self, first: SimulatedMedium, rest: Sequence[SimulatedMedium], sections: Sequence[TierSection]
    ) -> list[SimulatedTier]:
        """Return the mapped tier on `first`, and the tiers below it on `rest`."""
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
        self,
        section: TierSection,
        medium: SimulatedMedium,
        link: SimulatedMedium,
        host: SimulatedMedium,
        below: SimulatedTier | None,
    ) -> SimulatedTier:
        """Return the GPU tier. `below`: the slowest tier, if blocks may come from its files past DRAM."""
        reads_files = isinstance(section, GpuSection) and section.from_nvme != OFF
        nvme = below.medium if reads_files and below is not None and below.info.lends_files else None
        tier = SimulatedGpuTier(section.name, medium, section.capacity_bytes, self._loop, link, host, nvme)
        self._from_gpu = tier.to_engine
        self.lanes += [tier.to_engine, tier.up, tier.down, *([tier.nvme_to_gpu] if tier.nvme_to_gpu else [])]
        return tier

    @property
    def names(self) -> list[str]:
        """The names of the tiers' media, fastest first."""
        return [tier.medium.spec.name for tier in self.tiers]

    def local_blocks(self, tenant: int, keys: Sequence[bytes]) -> int:
        """Return the number of leading blocks of the chain `keys` that are in this node's own tiers. A router learns as
        much from the node's KV events.
        """
        residency = self.store.residency
        own = TierSet.of(*range(len(self.tiers) - len(self.store.keyed)))
        rows = residency.find_keys(self._clients[tenant].tenant_id, keys)
        return next((at for at, row in enumerate(rows) if not residency.rows.mask[row] & own), len(rows))

    # Getting

    def prefetch(self, request: SimulatedRequest, in_pool: int) -> None:
        """Start to move the blocks of `request` from slower tiers to faster ones, the last block first, without
        waiting. The first `in_pool` blocks are left out, because the engine has them.
        """
        residency, promoter = self.store.residency, self.store.promoter
        mask, readable = residency.rows.mask, residency.readable(residency.exported)
        rows = residency.find_keys(self._clients[request.tenant].tenant_id, request.keys)
        rows = promoter.reachable_run(rows)
        for position in range(len(rows) - 1, in_pool - 1, -1):
            if not mask[rows[position]] & readable:
                source = residency.fastest(rows[position])
                if not promoter.prefetch(rows[position]):
                    break
                request.fetched[position] = source

    async def begin_get(self, request: SimulatedRequest, arrived: Arrived) -> None:
        """Lease the stored blocks of `request` that the engine does not have, the last block first. `arrived` is called
        whenever blocks became readable, with the number of them in host memory and in device memory. `request.ready`
        says which blocks.
        """
        wanted = GetRequest(
            b"".join(request.keys), _PATIENT_MS, _PATIENT_MS, from_back=True,
            context=RequestContext(request.number, request.tokens, request.kind, bool(request.answer_tokens)),
        )  # fmt: skip
        answers = self._operations.get.acquire_in_order(self._clients[request.tenant], wanted, request.in_pool)
        expected = await anext(answers)
        assert isinstance(expected, Outlook)
        residency, below = self.store.residency, list(enumerate(expected.tiers))[request.in_pool :]
        request.on_device = self._on_device(request, len(expected.tiers))
        sources = Counter(
            request.on_device.get(position, request.fetched.get(position, tier)) for position, tier in below
        )
        request.found = [sources[tier] for tier in range(len(self.tiers))]
        request.ready = [True] * request.in_pool
        request.ready += [tier == residency.mapped or position in request.on_device for position, tier in below]
        mapped = sum(request.ready) - request.in_pool - len(request.on_device)
        if mapped or request.on_device:
            arrived(mapped, len(request.on_device))
        request.is_loading = True
        request.answers = answers
        request.loading = asyncio.create_task(self._load(request, answers, arrived))

    def _on_device(self, request: SimulatedRequest, blocks: int) -> dict[int, int]:
        """Return the tier of each block that the engine reads in the device's memory, by position."""
        residency = self.store.residency
        if not residency.exported:
            return {}
        rows = residency.find_keys(self._clients[request.tenant].tenant_id, request.keys[:blocks])
        return self._device_tiers({at: row for at, row in enumerate(rows) if at >= request.in_pool})

    def _device_tiers(self, rows: Mapping[int, int]) -> dict[int, int]:
        """Return the tier of each block of `rows` that is in the device's memory, by position."""
        residency = self.store.residency
        found = {at: residency.rows.mask[row] & residency.exported for at, row in rows.items()}
        return {at: TIER_SETS[here].first for at, here in found.items() if here}

    def copy(self, mapped: int, on_device: int) -> int:
        """Copy `mapped` blocks from host memory to the engine, and `on_device` blocks within the device's memory.
        Return the virtual time, in nanoseconds, at which all of them are copied.
        """
        now_ns = self._clock.monotonic_ns()
        ends_ns = [now_ns]
        for lane, blocks in ((self.to_engine, mapped), (self._from_gpu, on_device)):
            if blocks and lane is not None:
                ends_ns.append(lane.send(blocks * self.slot_bytes, now_ns).end_ns)
        return max(ends_ns)

    async def _load(self, request: SimulatedRequest, answers: Answers, arrived: Arrived) -> None:
        async for answer in answers:
            if isinstance(answer, GrantedRun):
                request.leases.append(answer.lease_id)
                run = range(answer.first, answer.first + len(answer.rows))
                # What was computed meanwhile is not copied to the engine.
                fresh = [at for at in run if not request.ready[at]] if request.is_loading else []
                for at in fresh:
                    request.ready[at] = True
                if fresh:
                    to_device = self._device_tiers({at: answer.rows[at - answer.first] for at in fresh})
                    request.on_device |= to_device
                    arrived(len(fresh) - len(to_device), len(to_device))
                    request.changed.set()
        request.is_loading = False
        request.changed.set()

    async def end_get(self, request: SimulatedRequest) -> None:
        """Release the leased blocks of `request`, which the engine has copied, so that they may be evicted."""
        if request.loading is not None and request.answers is not None:
            request.loading.cancel()
            await asyncio.wait([request.loading])
            await request.answers.aclose()
        self._operations.get.release(self._clients[request.tenant], request.leases)
        request.leases.clear()

    def answered(self, request: SimulatedRequest) -> None:
        """Report to the predictor and the policies that `request` has ended."""
        self.store.feed.answered(request.number, request.answer_tokens, self._clock.monotonic_ns())

    def hint(self, request: SimulatedRequest, hint: ChainHint, due_in_ms: int | None) -> None:
        """Report to the predictor and the policies the engine's expectation `hint` about the chain of `request`, which
        has ended. `due_in_ms` is the number of milliseconds until the chain will be used, or None.
        """
        self._operations.hints.hint(self._clients[request.tenant], request.keys, hint, due_in_ms)

    # Putting

    async def put(self, request: SimulatedRequest, *, writes_behind: bool) -> None:
        """Store the blocks of `request` that are not stored, and return when they are readable. With `writes_behind`
        they are also written to the tiers below DRAM at once.
        """
        mode = DurabilityMode.BATCH if writes_behind else DurabilityMode.NONE
        offer = offer_of(request.keys, self._block_bytes)
        async with aclosing(self._operations.put.store(self._clients[request.tenant], offer, mode)) as answers:
            await anext(answers)

    # Time

    def tick(self) -> None:
        """Do the store's periodic maintenance once, as the daemon does."""
        self.store.tick()
        for _ in range(_TICKS_OF_MAINTENANCE):
            self.store.retention.tick()

    async def settle(self) -> None:
        """Wait until all writes under way have ended."""
        while self.store.writeback is not None and await self.store.writeback.flush(_SETTLE_S):
            pass
        until_ns = self._clock.monotonic_ns() + round(_SETTLE_S * NS_PER_S)
        while any(each.waiting for each in self.store.sharing) and self._clock.monotonic_ns() < until_ns:
            await asyncio.sleep(DELAY_S)
