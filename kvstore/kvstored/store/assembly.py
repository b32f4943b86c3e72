"""The storage half of the daemon, put together: tiers, residency, policies, leases, lanes and the parts that move
blocks between tiers.

`Store` composes and holds; it decides nothing. Its parts are made in the order of its constructor, each by a function
that takes its inputs and returns the part. It knows no socket, no session and no verb, so that a caller with tiers, a
clock and a completion queue gets exactly the movement and the decisions of the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from kvstore_predictor.base import Predictor
from kvstore_proto.arena import DEVICE_ARENAS
from kvstore_tiers.base import Slot, Tier
from kvstore_tiers.host import HostTier
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.config import Config, ConfigError
from kvstored.predictor_names import LEARNED
from kvstored.store.blocks import Residency
from kvstored.store.degraded.modes import DegradedModes
from kvstored.store.endurance.account import EnduranceAccount
from kvstored.store.idle import IdleCopies
from kvstored.store.leases import LeaseTable
from kvstored.store.policies import EvictionPolicy, PolicySettings, create, create_empty, succeed
from kvstored.store.policies.boundaries import Boundaries
from kvstored.store.policies.ranked import Priorities
from kvstored.store.prefetch.credit import PrefetchCredit
from kvstored.store.prefetch.feed import Feed
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor, PrefetchState, create_predictor
from kvstored.store.prefetch.prefetcher import Prefetcher
from kvstored.store.prefetch.recent import RecentRequests
from kvstored.store.remote import Absences, ComputeTimes
from kvstored.store.reservations import Reservations
from kvstored.store.retention import Retention
from kvstored.store.transfer.admission import RemoteWrites
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.eviction import UnmappedExit
from kvstored.store.transfer.mover import Mover
from kvstored.store.transfer.promote import Promoter
from kvstored.store.transfer.room import Room
from kvstored.store.transfer.verification import DeviceCheck, DramCheck
from kvstored.store.transfer.victims import OrphanQueue
from kvstored.telemetry import Counters, Flows
from kvstored.tier_set import ALL_TIERS, MEMBERS, TierSet

if TYPE_CHECKING:
    from kvstore_tiers.gpu import GpuTier
    from kvstore_tiers.keyed import KeyedTier

from kvstored.store.lossy_copies import LossyCopies
from kvstored.store.movement import (
    Ground,
    RoomParts,
    TierLinks,
    device_promotion_tiers,
    make_breakers,
    make_commit,
    make_durable_admission,
    make_early,
    make_gates,
    make_lanes,
    make_rooms,
)

HELD_SHARE = 2  # at most one part in so many of the mapped tier has what was prefetched by prediction and not used yet
PREFETCH_SHARE = 4  # at most one part in so many of the mapped tier is held for prefetches that wait


def make_policy(
    config: Config,
    residency: Residency,
    position: int,
    later: Callable[[Callable[[], None]], object],
    create: Callable[..., EvictionPolicy] = create,
) -> EvictionPolicy:
    section = config.tier(residency.tiers[position]) or config.listed[-1]  # not listed: as the slowest
    return create(section.policy, residency, position, PolicySettings(section.keep_worth, later))


def _ttl_s(config: Config, residency: Residency, position: int) -> float:
    return (config.tier(residency.tiers[position]) or config.listed[-1]).ttl_s


def make_priorities(residency: Residency, policies: Sequence[EvictionPolicy]) -> Priorities:
    """Return the order in which blocks with a priority are evicted, for the block index `residency`; each of `policies`
    orders the blocks of its tier that have no priority."""
    priorities = Priorities(residency)
    for policy in policies:
        priorities.follow(policy)
    priorities.resume()
    return priorities


def make_retention(
    ground: Ground, policies: list[EvictionPolicy], parts: RoomParts, rooms: Sequence[Room],
    discard: Sequence[Callable[[Slot, int], None]], is_coming: Callable[[int], bool],
) -> Retention:  # fmt: skip
    idle = IdleCopies(ground.residency, policies, rooms)
    for position in range(len(rooms)):
        idle.set_ttl(position, _ttl_s(ground.config, ground.residency, position))
    return Retention(ground, parts.priorities, idle, discard, is_coming)


def make_prefetch(
    ground: Ground,
    promoter: Promoter,
    policies: list[EvictionPolicy],
    compute: ComputeTimes,
    predictor: Predictor | None,
) -> tuple[Prefetcher, Feed, PrefetchState]:
    settings, residency, recent = ground.config.prefetch, ground.residency, RecentRequests()
    if predictor is None and settings.enabled:
        try:
            predictor = create_predictor(settings.predictor, settings.model)
        except ValueError as error:
            if settings.predictor != LEARNED:
                raise
            raise ConfigError(f"prefetch.model: {error}") from None
    guarded = GuardedPredictor(predictor, ground.completions.later)
    held_bytes = ground.config.host.capacity_bytes // HELD_SHARE
    credit = PrefetchCredit(settings.waste_limit, settings.min_probability, held_bytes, ground.counters)
    prefetcher = Prefetcher(settings, guarded, residency, promoter, policies, ground.clock, recent, credit)
    feed = Feed(residency, policies, guarded, recent, prefetcher, compute)
    return prefetcher, feed, PrefetchState(guarded, recent, credit)


def make_promoter(ground: Ground, links: TierLinks, room: Room, damage: Damage, modes: DegradedModes) -> Promoter:
    """Return the component that copies blocks from all other tiers to the mapped tier (the one that clients map), whose
    slots `room` allocates."""
    mapped = ground.residency.mapped
    return Promoter(
        ground.residency, [links.between(at, mapped) for at in range(len(ground.tiers)) if at != mapped],
        room, ground.counters, ground.flows, damage, modes,
        prefetch_room_bytes=ground.config.host.capacity_bytes // PREFETCH_SHARE,
    )  # fmt: skip


class Store:
    """The storage half of a daemon, without sockets: tiers, block index, policies, leases, and the components that move
    blocks.

    `residency` (the block index) may hold recovered blocks already. `tiers` are in its order: `host` is the first that
    clients map; `nvme` is the durable one, if any; `keyed` are remote tiers, to which the slowest other tier demotes
    and in which blocks of other processes are found. Tiers before `host` get copies of blocks that are used often.
    `predictor` and `remote_writes` replace the configuration's."""

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
        self.config, self._policy_config, self.clock, self.completions = config, config, clock, completions
        self.residency, self.tiers = residency, list(tiers)
        self.host = host = cast(HostTier, tiers[residency.mapped])
        self.nvme = tiers[residency.durable] if residency.durable >= 0 else None
        self.keyed = {at: cast("KeyedTier", tier) for at, tier in enumerate(tiers) if tier.info.kind == "keyed"}
        self.exporters = {at: cast("GpuTier", tiers[at]) for at in MEMBERS[residency.exported]}
        self.counters, self.flows = Counters(), Flows(len(tiers))
        ground = Ground(config, clock, completions, residency, tiers, self.keyed, self.counters, self.flows)
        self.absences, self.compute, self.orphans = Absences(), ComputeTimes(), OrphanQueue(residency)
        budget_bytes = config.nvme.endurance_bytes_per_day if self.nvme is not None else 0
        self.endurance = EnduranceAccount(budget_bytes, clock, self.counters)
        self.leases = LeaseTable(
            residency.unpin_run, lambda at: self._reader(at).free(at), lambda at: self._reader(at).retire(at),
            limbo_limit_bytes=config.limits.limbo_per_tenant_bytes, expired_limit=config.limits.leases_per_client,
        )  # fmt: skip
        self.reservations = Reservations(host.free, residency.copies[residency.mapped].reserve)
        self.modes = DegradedModes(clock, self.counters)
        self._breakers = make_breakers(ground, self.modes)
        self.breaker = self._breakers.get(residency.durable)
        lanes = make_lanes(config, residency, self.keyed, device_promotion_tiers(tiers, residency))
        self.mover = Mover(lanes, completions, clock)
        links = TierLinks(ground, self.mover, self._breakers)
        self.policies = [make_policy(config, residency, at, completions.later) for at in range(len(tiers))]
        priorities = make_priorities(residency, self.policies)
        self.boundaries = Boundaries(residency, priorities, clock)
        gates, breaker = make_gates(ground, self.policies, remote_writes), self.breaker
        commit = make_commit(ground, links, breaker, self.endurance, self.policies) if breaker is not None else None
        read = TierSet.of(residency.mapped, *self.exporters)
        exits = [self.leases if at in read else UnmappedExit(tier) for at, tier in enumerate(tiers)]
        self.discard: list[Callable[[Slot, int], None]] = [  # of removals by order
            partial(_discard, self.keyed[at]) if at in self.keyed else exit_.retire for at, exit_ in enumerate(exits)
        ]
        self.damage = Damage(residency, self.tiers, self.discard, clock, self.counters, commit)
        parts = RoomParts(self.policies, exits, self.orphans, priorities, self.boundaries, self.damage, self.modes)
        self.rooms, self.copiers, self.writeback = make_rooms(ground, links, parts, commit, gates)
        is_coming = commit.backlog.__contains__ if commit is not None else lambda token: False
        self.retention = make_retention(ground, self.policies, parts, self.rooms, self.discard, is_coming)
        self.lossy_copies = LossyCopies(residency, clock, self.counters, self.discard, self.damage, is_coming)
        self.device_check = DeviceCheck(residency, self.exporters, completions, self.damage)
        self.dram_check = DramCheck(config.host.verify_reads, residency, host, completions, self.damage, self.counters)
        self.promoter = make_promoter(ground, links, self.room, self.damage, self.modes)
        self.sharing, self.device_promotions = make_early(
            ground, links, parts, self.rooms, gates, self.promoter, self.absences
        )
        self.copiers += [*self.sharing, *self.device_promotions]
        self.prefetcher, self.feed, self.prefetch_state = make_prefetch(
            ground, self.promoter, self.policies, self.compute, predictor
        )
        self.forgets: list[Callable[[int, Sequence[bytes] | None], None]] = []  # called at removals by order
        residency.forget_with(self._forget)

    @property
    def room(self) -> Room:
        """The allocation of slots in the mapped tier."""
        return self.rooms[self.residency.mapped]

    def exporter_of(self, container: int, tiers: int = ALL_TIERS) -> GpuTier | None:
        """Return the device tier, among the positions `tiers`, whose memory region number `container` clients may
        import, or None if no tier has this region."""
        if container < DEVICE_ARENAS:
            return None
        exporters = (tier for position, tier in self.exporters.items() if position in MEMBERS[tiers])
        return next((tier for tier in exporters if tier.owner(container) is not None), None)

    def tiers_on(self, device_identity: int) -> TierSet:
        """Return the tiers on the device `device_identity` whose memory clients on that device may import."""
        exporters = self.exporters.items()
        return TierSet.of(*(at for at, tier in exporters if tier.device_identity == device_identity))

    def replace_policy(self, config: Config, position: int) -> None:
        """Use the policy that `config` names for the tier at `position`. It starts with the tier's blocks in the order
        of their last use and with all tenants' shares; one of the same name also continues from what was learned.
        """
        self._policy_config, former = config, self.policies[position]
        policy = self.renew_policy(position)
        succeed(policy, former, self.clock.monotonic_ns())
        self.follow_policy(position, policy)

    def renew_policy(self, position: int, *, is_empty: bool = False) -> EvictionPolicy:
        """Return a new policy for the tier at `position`, which is notified of the tier's events from now on and has
        learned nothing. With `is_empty`, it knows none of the tier's blocks, and is not notified. Call `follow_policy`
        next, which lets it decide."""
        later, made_by = self.completions.later, create_empty if is_empty else create
        policy = make_policy(self._policy_config, self.residency, position, later, made_by)
        for tenant, share in self.policies[position].shares.items():
            policy.set_share(tenant, share)
        return policy

    def follow_policy(self, position: int, policy: EvictionPolicy) -> None:
        """Let `policy` decide which blocks leave the tier at `position`, from now on."""
        self.policies[position] = policy
        self.rooms[position].follow(policy)
        self.retention.priorities.follow(policy)
        self.retention.idle.set_ttl(position, _ttl_s(self._policy_config, self.residency, position))
        self.replace_admission(self._policy_config)

    def replace_admission(self, config: Config) -> None:
        """Let the admission that `config` names decide which blocks are written to NVMe, from now on."""
        if self.writeback is not None:
            self.writeback.gate.admission = make_durable_admission(config, self.residency, self.policies)

    async def sync_keyed(self) -> bool:
        """Have the remote tiers finish the removals of deleted blocks. Return whether all of them have done so for
        good."""
        asked = [self.completions.outcome_of(tier.sync) for tier in self.keyed.values()]
        return all([(await outcome).ok for outcome in asked])

    def write_again(self) -> None:
        """Start to write the blocks whose durable copy was found damaged, if they still exist."""
        if self.writeback is not None:
            damaged, self.damage.to_write_again = self.damage.to_write_again, []
            self.writeback.write_again(damaged)

    def tick(self) -> None:
        """Do the store's periodic work, such as expiry and waiting copies. Call it a few times a second."""
        self.endurance.tick()
        for breaker in self._breakers.values():
            breaker.tick()
        self.write_again()
        self.prefetcher.tick()
        for sharing in self.sharing:
            sharing.tick()

    def _reader(self, slot: Slot) -> GpuTier | HostTier:
        """Return the tier of a slot that clients read."""
        return self.exporter_of(slot.container) or self.host

    def _forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        self.feed.forgotten(tenant, keys)
        self.absences.forget(tenant, keys)
        for forget in self.forgets:
            forget(tenant, keys)


def _discard(tier: KeyedTier, slot: Slot, _tenant: int) -> None:
    """Discard a slot of a block that is removed by order: the store must not keep it for others."""
    tier.discard(slot)
