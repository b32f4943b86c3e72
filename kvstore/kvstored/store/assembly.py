"""The storage half of the daemon, put together: tiers, residency, policies, leases, lanes and what moves between them.

`Store` composes and holds; it decides nothing. It knows no socket, no session and no verb, so that a caller with
tiers, a clock and a completion queue gets exactly the movement and the decisions of the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from kvstore_predictor.base import Predictor
from kvstore_proto.arena import DEVICE_ARENAS
from kvstore_tiers.base import Slot, Tier
from kvstore_tiers.host import HostTier
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.objects import DIGEST_BYTES
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.config import Config, ConfigError
from kvstored.config.tiers.gpu import GpuSection
from kvstored.config.tiers.remote import RemoteSection
from kvstored.policy_names import ALL, REUSED, SECOND_TOUCH
from kvstored.predictor_names import LEARNED
from kvstored.store.blocks import Residency
from kvstored.store.degraded import DegradedModes, TierBreaker
from kvstored.store.degraded.breaker import LAST_PROBE_S
from kvstored.store.endurance import EnduranceAccount
from kvstored.store.leases import LeaseTable
from kvstored.store.policies import Admission, Policy, PolicySettings, create, create_admission, succeed
from kvstored.store.policies.admission import Always, Reused
from kvstored.store.prefetch.credit import PrefetchCredit
from kvstored.store.prefetch.feed import Feed
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor, PrefetchState, create_predictor
from kvstored.store.prefetch.prefetcher import Prefetcher
from kvstored.store.prefetch.recent import RecentRequests
from kvstored.store.remote.absences import Absences
from kvstored.store.remote.compute import ComputeTimes
from kvstored.store.reservations import Reservations
from kvstored.store.transfer.backlog import Backlog
from kvstored.store.transfer.contest import Contest
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.demotion import Bounds, Demotion
from kvstored.store.transfer.device_check import DeviceCheck
from kvstored.store.transfer.dram_check import DramCheck
from kvstored.store.transfer.evacuation import Evacuation
from kvstored.store.transfer.eviction import Copier, Demoter, Eviction, NoDemotion
from kvstored.store.transfer.gate import WriteGate
from kvstored.store.transfer.group_commit import BatchLimits
from kvstored.store.transfer.intake import Intake
from kvstored.store.transfer.items import Priority
from kvstored.store.transfer.lane_plan import make_lanes
from kvstored.store.transfer.link import Link, Mover, lane_name
from kvstored.store.transfer.orphan_queue import OrphanQueue
from kvstored.store.transfer.promote import Promoter
from kvstored.store.transfer.relocation import LaneRelocation, MemoryRelocation, Relocation
from kvstored.store.transfer.remote_gate import RemoteGate, RemoteWrites
from kvstored.store.transfer.room import Room
from kvstored.store.transfer.sharing import Sharing, SharingCounts
from kvstored.store.transfer.slot_exit import SlotExit, UnmappedExit, discard
from kvstored.store.transfer.straight import StraightPromotion
from kvstored.store.transfer.victims import Victims
from kvstored.store.transfer.write_refusals import Refusals
from kvstored.store.transfer.writeback import WriteBack
from kvstored.telemetry import Counters, Flows

if TYPE_CHECKING:
    from kvstore_tiers.gpu import GpuTier

KEYED_AT_ONCE, KEYED_WAIT_S = 16, 0.02  # demotions to a key-addressed tier: one that hangs keeps so many blocks in
# place, and what makes room above it goes on without it after so long
KEYED_LAST_PROBE_S = 2.0  # another machine may be back at any moment, and a question costs it little
HELD_SHARE = 2  # at most one part in so many of the mapped tier has what was prefetched by prediction and not used yet
PREFETCH_SHARE = 4  # at most one part in so many of the mapped tier is held for prefetches that wait


class Store:
    """`residency` may hold recovered blocks already; policies and rooms take them over. `tiers` as in `make_residency`:
    `host` is the first that clients map; `nvme` is the durable one, if any; `keyed` are those addressed by key. Victims
    of the slowest of the others are demoted there, and blocks that other processes stored there can be found. Tiers
    before `host` get copies of what is used often, and demote to it.
    `predictor`, `remote_writes`: instead of the configuration's."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        completions: CompletionQueue,
        residency: Residency,
        tiers: Sequence[Tier],
        predictor: Predictor | None = None,
        remote_writes: RemoteWrites | None = None,
    ) -> None:
        self.config, self.clock, self.completions = config, clock, completions
        self.residency, self.tiers = residency, list(tiers)
        self.host = host = cast(HostTier, tiers[residency.mapped])
        self.nvme = nvme = tiers[residency.durable] if residency.durable >= 0 else None
        self.keyed = {at: cast(KeyedTier, tier) for at, tier in enumerate(tiers) if tier.info.kind == "keyed"}
        self.absences, self.compute = Absences(), ComputeTimes()
        self._remote_writes = remote_writes
        self.counters, self.flows = Counters(), Flows(len(self.tiers))
        self.modes = DegradedModes(clock, self.counters)
        self._breakers = {
            position: self._make_breaker(position) for position in range(residency.in_memory, len(self.tiers))
        }
        self.breaker = self._breakers.get(residency.durable)
        self.endurance = EnduranceAccount(
            config.daemon.state_dir, config.nvme.endurance_bytes_per_day if nvme is not None else 0, clock,
            self.counters,
        )  # fmt: skip
        self.leases = LeaseTable(
            residency.unpin_run, self._free_leased, self._mark_retired,
            limbo_limit_bytes=config.limits.limbo_per_tenant_bytes, expired_limit=config.limits.leases_per_client,
        )  # fmt: skip
        self.reservations = Reservations(host.free, residency.copies[residency.mapped].reserve)
        self.exits = self._make_exits()
        self.retire: list[Callable[[Slot, int], None]] = [exit_.retire for exit_ in self.exits]
        self.discard = list(self.retire)  # for blocks that are removed by order
        for position, tier in self.keyed.items():
            self.discard[position] = partial(discard, tier)
        self.policies = self._make_policies()
        self.orphans = OrphanQueue(residency)
        self.mover = Mover(make_lanes(config, residency, self.keyed, self._straight_to), completions, clock)
        self.damage = Damage(residency, self.tiers, self.discard, clock, self.counters, lambda: self.writeback)
        self.device_check = DeviceCheck(residency, self.exporters, completions, self.damage)
        self.writeback: WriteBack | None = None
        self.copiers: list[Copier] = []
        self.remote_gates = {position: self._make_remote_gate(position) for position in self.keyed}
        demoter, below = self._make_rooms_of_keyed()
        if nvme is not None and self.breaker is not None:
            below = [self._make_room(residency.durable, demoter, self._relocation_on(nvme, self.breaker)), *below]
            demoter = self.writeback = self._make_writeback(below[0], self.breaker)
        self.rooms = self._make_rooms_in_memory(demoter, below)
        self.dram_check = DramCheck(config.host.verify_reads, residency, host, completions, self.damage, self.counters)
        self.promoter = Promoter(
            residency, [self._link(source, residency.mapped) for source in self._unmapped], self.room,
            self.counters, self.flows, self.damage, prefetch_room_bytes=config.host.capacity_bytes // PREFETCH_SHARE,
        )  # fmt: skip
        self._contests = {position: Contest(residency, position) for position in range(residency.mapped)}
        self.sharing, self.straight = self._make_sharing(), [self._make_straight(at) for at in self._straight_to]
        self.copiers += [*self.sharing, *self.straight]
        self.prefetcher, self.feed, self.prefetch_state = self._make_prefetch(predictor)

    def _make_exits(self) -> list[SlotExit]:
        leased = 1 << self.residency.mapped | self.residency.exported
        return [
            self.leases if leased >> position & 1 else UnmappedExit(tier) for position, tier in enumerate(self.tiers)
        ]

    def exporter_of(self, container: int, tiers: int = -1) -> GpuTier | None:
        """The tier of device memory that a container is of, of those in the mask `tiers`, where clients may import
        that."""
        if container < DEVICE_ARENAS:
            return None
        exporters = (tier for position, tier in self.exporters.items() if tiers >> position & 1)
        return next((tier for tier in exporters if tier.owner(container) is not None), None)

    def tiers_on(self, device_identity: int) -> int:
        """The tiers of this device whose memory clients there may import, as a mask; of no other: whether a device can
        read another one's memory is not asked."""
        exporters = self.exporters.items()
        return sum(1 << position for position, tier in exporters if tier.device_identity == device_identity)

    @property
    def exporters(self) -> dict[int, GpuTier]:
        """By position, the tiers whose memory clients may import."""
        exported = self.residency.exported
        return {position: cast("GpuTier", tier) for position, tier in enumerate(self.tiers) if exported >> position & 1}

    def _free_leased(self, slot: Slot) -> None:
        (self.exporter_of(slot.container) or self.host).free(slot)

    def _mark_retired(self, slot: Slot) -> None:
        (self.exporter_of(slot.container) or self.host).retire(slot)

    @property
    def room(self) -> Room:
        """That of the mapped tier."""
        return self.rooms[self.residency.mapped]

    @property
    def _unmapped(self) -> list[int]:
        return [position for position in range(len(self.tiers)) if position != self.residency.mapped]

    def _make_breaker(self, position: int) -> TierBreaker:
        def on_open() -> None:
            """What waits for the tier ends now."""
            if position == self.residency.durable and self.writeback is not None:
                self.writeback.cancel_queued()
            self.promoter.fail_waiters()
            for each in self.straight:
                each.fail_waiters()

        return TierBreaker(
            self.tiers[position], self.residency.tiers[position], self.modes, self.completions, self.clock,
            self.counters, on_open, KEYED_LAST_PROBE_S if position in self.keyed else LAST_PROBE_S,
        )  # fmt: skip

    def _make_prefetch(self, predictor: Predictor | None) -> tuple[Prefetcher, Feed, PrefetchState]:
        settings, residency, recent = self.config.prefetch, self.residency, RecentRequests()
        if predictor is None and settings.enabled:
            try:
                predictor = create_predictor(settings.predictor, settings.model)
            except ValueError as error:
                if settings.predictor != LEARNED:
                    raise
                raise ConfigError(f"prefetch.model: {error}") from None
        guarded = GuardedPredictor(predictor)
        credit = PrefetchCredit(
            settings.waste_limit, settings.min_probability, self.config.host.capacity_bytes // HELD_SHARE, self.counters
        )  # fmt: skip
        prefetcher = Prefetcher(
            settings, guarded, residency, self.promoter, self.policies, self.clock, recent, credit
        )  # fmt: skip
        feed = Feed(residency, self.policies, guarded, recent, prefetcher, self.compute)

        def forget(tenant: int, keys: Sequence[bytes] | None) -> None:
            feed.forgotten(tenant, keys)
            self.absences.forget(tenant, keys)

        residency.forget_with(forget)
        return prefetcher, feed, PrefetchState(guarded, recent, credit)

    def _make_rooms_of_keyed(self) -> tuple[Demoter, list[Room]]:
        """What demotes to the first of them, and their rooms."""
        demoter: Demoter = NoDemotion()
        rooms: list[Room] = []
        mapped = self.residency.mapped
        for position, tier in reversed(self.keyed.items()):
            rooms = [self._make_room(position, demoter, MemoryRelocation(tier, self.completions)), *rooms]
            demoter = Demotion(
                self.residency, self._link(position - 1, position), rooms[0], demoter, self.damage, self.flows,
                Bounds(KEYED_AT_ONCE, KEYED_WAIT_S, self.remote_gates[position], self._link(mapped, position)),
            )  # fmt: skip
            self.copiers.append(demoter)
        return demoter, rooms

    def _make_remote_gate(self, position: int) -> RemoteGate:
        writes = self._writes_to(position)
        admission = create_admission(writes.admission, self.residency, position, self.policies[position - 1])
        early = {REUSED: Reused, ALL: Always}.get(writes.share)
        return RemoteGate(
            self.residency, admission, early(self.residency, position) if early is not None else None,
            writes.bytes_per_s, self.clock, self.counters, partial(self._refuses, self.keyed[position]),
        )  # fmt: skip

    def _refuses(self, tier: KeyedTier, tenant: int) -> bool:
        name = self.residency.tenants[tenant].name  # a tenant's digest; another name in a simulation
        return len(name) == 2 * DIGEST_BYTES and tier.refuses(bytes.fromhex(name))

    def _writes_to(self, position: int) -> RemoteWrites:
        section = self.config.tier(self.residency.tiers[position])
        if self._remote_writes is not None or not isinstance(section, RemoteSection):
            return self._remote_writes or RemoteWrites()
        return RemoteWrites(section.share, section.admission, section.rate_bytes)

    def _make_sharing(self) -> list[Sharing]:
        """What writes blocks early, to each key-addressed tier that shares them and to those before the mapped one."""
        residency, made = self.residency, []
        for position, gate in self.remote_gates.items():
            if gate.shares_early:
                intake = Intake(self._link(residency.mapped, position), self.rooms[position], gate)
                back, counts = self._link(position, residency.mapped), self._sharing_counts("shared_blocks")
                made.append(Sharing(residency, intake, back, self.absences, self.damage, counts))

        on_devices = (1 << residency.mapped) - 1

        def used(rows: Sequence[int], device_tiers: int) -> None:
            others = on_devices & ~device_tiers if device_tiers else 0  # a client on a device has no use for them
            for sharing in made:
                if not others >> sharing.destination & 1:
                    sharing.used(rows)

        for position in range(residency.mapped):
            intake = self._device_intake(residency.mapped, position)
            back, counts = self._link(position, residency.mapped), self._sharing_counts("device_blocks")
            made.append(Sharing(residency, intake, back, None, self.damage, counts))

        if made:
            residency.use_with(used)
        return made

    @property
    def _straight_to(self) -> list[int]:
        """The tiers before the mapped one that read from the durable one's files."""
        if self.nvme is None or not self.nvme.info.lends_files:
            return []
        return [at for at, tier in enumerate(self.tiers[: self.residency.mapped]) if tier.info.loads_files]

    def _make_straight(self, position: int) -> StraightPromotion:
        intake = self._device_intake(self.residency.durable, position)
        return StraightPromotion(self.residency, intake, self.promoter, self.damage, self.counters, self.flows)

    def _sharing_counts(self, copied: str) -> SharingCounts:
        add = self.counters.add
        return SharingCounts(
            partial(add, copied), partial(add, "device_rate_waits"), partial(add, "device_declined_blocks")
        )

    def _device_intake(self, source: int, position: int) -> Intake:
        """Of a tier before the mapped one, from the one at `source`. The lanes have the byte rate."""
        section = self.config.tier(self.residency.tiers[position])
        name = section.admission if isinstance(section, GpuSection) else SECOND_TOUCH
        admission = create_admission(name, self.residency, position, self.policies[self.residency.mapped])
        gate = RemoteGate(self.residency, admission, admission, 0, self.clock, self.counters, lambda _tenant: False)
        return Intake(self._link(source, position), self.rooms[position], gate, self._contests[position])

    def _make_rooms_in_memory(self, demoter: Demoter, below: list[Room]) -> list[Room]:
        """The rooms of all tiers: those in memory, then `below`. Victims of the slowest are passed to `demoter`,
        those of another one to the next slower first; that of a tier before the mapped one is the mapped one."""
        rooms = below
        mapped, in_memory = self.residency.mapped, self.residency.in_memory
        for position in reversed(range(in_memory)):
            lower = max(position + 1, mapped)
            passed_on = demoter
            if lower < in_memory:
                link, room = self._link(position, lower), rooms[lower - position - 1]
                bounds = Bounds(priority=Priority.DEMOTION if position < mapped else Priority.DEMAND)
                passed_on = demotion = Demotion(self.residency, link, room, demoter, self.damage, self.flows, bounds)
                self.copiers.append(demotion)
            if position >= mapped:
                demoter = passed_on
            copies = MemoryRelocation(self.tiers[position], self.completions)
            rooms = [self._make_room(position, passed_on, copies), *rooms]
        return rooms

    def _link(self, source: int, destination: int) -> Link:
        breaker = self._breakers.get(max(source, destination))
        lane = self._write_lane if destination == self.residency.durable else self._lane_name(source, destination)
        return Link(source, destination, self.tiers, lane, self.residency, self.mover, self.clock, breaker)

    def _lane_name(self, source: int, destination: int) -> str:
        return lane_name(self.residency.tiers, source, destination)

    @property
    def _write_lane(self) -> str:
        """One for all tiers that blocks come from: the writes of one medium wait in one queue."""
        return self._lane_name(self.residency.mapped, self.residency.durable)

    def _relocation_on(self, nvme: Tier, breaker: TierBreaker) -> Relocation:
        return LaneRelocation(nvme, self.mover, self._write_lane, breaker, self.endurance, self.completions)

    def _make_policies(self) -> list[Policy]:
        return [self._make_policy(self.config, position) for position in range(len(self.tiers))]

    def _make_policy(self, config: Config, position: int) -> Policy:
        section = config.tier(self.residency.tiers[position]) or config.listed[-1]  # not listed: as the slowest
        settings = PolicySettings(section.ttl_s or None, section.keep_worth)
        return create(section.policy, self.residency, position, settings)

    def replace_policy(self, config: Config, position: int) -> None:
        """Let the tier's policy be what `config` says. It begins with the blocks that are there, in the order of their
        last use, and with every tenant's share; one of the same name goes on from what the one before had learned."""
        former, policy = self.policies[position], self._make_policy(config, position)
        for tenant, share in former.shares.items():
            policy.set_share(tenant, share)
        succeed(policy, former, self.clock.monotonic_ns())
        self.policies[position] = policy
        self.rooms[position].follow(policy)
        self.replace_admission(config)

    def replace_admission(self, config: Config) -> None:
        """Let NVMe admit what `config` says."""
        if self.writeback is not None:
            self.writeback.gate.admission = self._make_admission(config)

    def _make_admission(self, config: Config) -> Admission:
        above = self.policies[self.residency.mapped]
        return create_admission(config.nvme.admission, self.residency, self.residency.durable, above)

    def _make_room(self, position: int, demoter: Demoter, relocation: Relocation) -> Room:
        tier, residency, exits = self.tiers[position], self.residency, self.exits[position]
        victims = Victims(self.policies[position], residency, self.orphans, self.clock)
        eviction = Eviction(position, residency, exits, demoter, self.clock, self.counters, self.flows)
        on_damage = partial(self.damage.found, position)
        evacuation = Evacuation(tier, residency, victims, eviction, exits, relocation, on_damage, self.counters)
        return Room(tier, residency, victims, eviction, evacuation)

    async def sync_keyed(self) -> bool:
        """Whether key-addressed tiers have no longer what was removed from them."""
        asked = [self.completions.outcome_of(tier.sync) for tier in self.keyed.values()]
        return all([(await outcome).ok for outcome in asked])

    def tick(self) -> None:
        """A few times a second: what waits for time alone."""
        self.endurance.tick()
        for breaker in self._breakers.values():
            breaker.tick()
        self.prefetcher.tick()
        for sharing in self.sharing:
            sharing.tick()

    def _make_writeback(self, room: Room, breaker: TierBreaker) -> WriteBack:
        config, lane = self.config, self.mover.lanes[self._write_lane]
        gate = WriteGate(
            self.residency,
            self._make_admission(config),
            self.endurance, breaker, Refusals(self.counters),
            Backlog(lambda: lane.statistics(self.clock.monotonic_ns()).service_bytes_per_s), self.clock,
            throttle_ms=config.nvme.endurance_wait_ms,
        )  # fmt: skip
        links = [self._link(source, self.residency.durable) for source in range(self.residency.in_memory)]
        return WriteBack(
            self.residency, links, room, self.completions, self.counters, self.flows, gate,
            BatchLimits(config.durability.batch_ms, config.durability.batch_blocks),
        )  # fmt: skip
