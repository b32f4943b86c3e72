"""The movement of a store, put together: the parts that move blocks between its tiers, the parts that judge that, and
the allocation of slots.

Each part is made by a function that takes its inputs and returns the part; `assembly.py` calls them in order.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from kvstore_tiers.base import Tier
from kvstore_tiers.host import HostTier
from kvstore_tiers.objects import DIGEST_BYTES
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.config import Config
from kvstored.config.tiers.gpu import LINK_SHARE, GpuSection
from kvstored.config.tiers.remote import RemoteSection
from kvstored.policy_names import ALL, REUSED, SECOND_TOUCH
from kvstored.store.blocks import Residency, ResidencyView
from kvstored.store.degraded.breaker import LAST_PROBE_S, TierBreaker
from kvstored.store.degraded.modes import DegradedModes
from kvstored.store.endurance.account import EnduranceAccount
from kvstored.store.policies import Admission, EvictionPolicy, create_admission
from kvstored.store.policies.admission import Always, Reused
from kvstored.store.policies.boundaries import Boundaries
from kvstored.store.policies.ranked import Priorities
from kvstored.store.remote import Absences
from kvstored.store.transfer.admission import FrequencyAdmission, RemoteWrites, TierGate, TierIntake
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.demotion import Bounds, Demotion
from kvstored.store.transfer.evacuation import Evacuation
from kvstored.store.transfer.eviction import Copier, Demoter, Eviction, NoDemotion, SlotExit
from kvstored.store.transfer.gate import Backlog, WriteGate
from kvstored.store.transfer.group_commit import BatchLimits, GroupCommit
from kvstored.store.transfer.lane import Lane, LaneSettings, Limits, Priority
from kvstored.store.transfer.link import TierLink, lane_name
from kvstored.store.transfer.mover import LaneTransfer, Mover
from kvstored.store.transfer.promote import Promoter
from kvstored.store.transfer.relocation import LaneRelocation, MemoryRelocation, Relocation
from kvstored.store.transfer.room import Room
from kvstored.store.transfer.staging import CodecStaging
from kvstored.store.transfer.victims import OrphanQueue, Victims
from kvstored.store.transfer.writeback import WriteBack
from kvstored.telemetry import Counters, Flows
from kvstored.tier_set import NO_TIERS, TierSet

if TYPE_CHECKING:
    from kvstore_tiers.keyed import KeyedTier
    from kvstored.store.transfer.device_promotion import DevicePromotion
    from kvstored.store.transfer.sharing import Sharing

KEYED_AT_ONCE, KEYED_WAIT_S = 16, 0.02  # demotions to a key-addressed tier: one that hangs keeps so many blocks in
# place, and what makes room above it goes on without it after so long
KEYED_LAST_PROBE_S = 2.0  # another machine may be back at any moment, and a question costs it little
KEYED_IN_FLIGHT = 32  # reads at once, which a driver takes together: each waits for a network
# Before the first read no engine should wait for a hope; after it, what was seen says more.
BLOCKS_A_GET = 8.0  # before the first get has told
KEYED_PRIOR_BYTES_PER_S, KEYED_PRIOR_US, KEYED_PRIOR_BYTES = 200e6, 2000.0, 1 << 20


class Ground(NamedTuple):
    """The objects that most parts of a store need. `keyed` maps positions to the remote (key-addressed) tiers."""

    config: Config
    clock: Clock
    completions: CompletionQueue
    residency: Residency
    tiers: Sequence[Tier]
    keyed: Mapping[int, KeyedTier]
    counters: Counters
    flows: Flows


class TierLinks:
    """A maker of links, the ways by which blocks are copied from one tier to another, over the lanes (queues of copies)
    of `mover`. `breakers` maps positions to the circuit breakers of tiers below memory."""

    def __init__(self, ground: Ground, mover: Mover, breakers: Mapping[int, TierBreaker]) -> None:
        self._ground = ground
        self.mover = mover
        self._breakers = breakers
        self._stagings: dict[int, CodecStaging] = {}

    def between(self, source: int, destination: int) -> TierLink:
        ground = self._ground
        breaker = self._breakers.get(max(source, destination))
        lane, staging = self.lane(source, destination), self._staging_of(destination)
        return TierLink(source, destination, ground.tiers, lane, self.mover, ground.clock, breaker, staging)

    def _staging_of(self, destination: int) -> CodecStaging | None:
        """Return what all links to a tier with a codec share."""
        ground = self._ground
        coding = ground.tiers[destination].info.coding
        if not coding.is_none and destination not in self._stagings:
            host = cast(HostTier, ground.tiers[ground.residency.mapped])
            up = self.mover.lanes[self.lane(destination, ground.residency.mapped)]
            self._stagings[destination] = CodecStaging(
                coding, ground.residency.shape_of, host, ground.completions, ground.counters,
                lambda nbytes: up.pauses.burst_bytes / nbytes if up.pauses.burst_bytes else BLOCKS_A_GET,
            )  # fmt: skip
        return self._stagings.get(destination)

    def lane(self, source: int, destination: int) -> str:
        """Return the name of the lane (queue of copies) from the tier at position `source` to the one at `destination`.
        All writes to the durable tier share one lane."""
        residency = self._ground.residency
        is_write = destination == residency.durable
        return lane_name(residency.tiers, residency.mapped if is_write else source, destination)


class Descent(NamedTuple):
    """The objects that evict blocks: the allocator of slots of each tier, the components that copy evicted blocks to
    slower tiers, and the one that writes blocks to NVMe, None without a durable tier."""

    rooms: list[Room]
    copiers: list[Copier]
    writeback: WriteBack | None


class RoomParts(NamedTuple):
    """The objects that every allocator of slots works with, for all tiers: policies and ways to free slots (lists by
    the tier's position), the orders of orphans and of blocks with a priority, the handler of damaged copies, and the
    modes of tiers."""

    policies: list[EvictionPolicy]
    exits: Sequence[SlotExit]
    orphans: OrphanQueue
    priorities: Priorities
    boundaries: Boundaries
    damage: Damage
    modes: DegradedModes


def device_promotion_tiers(tiers: Sequence[Tier], residency: ResidencyView) -> list[int]:
    """Return the positions of device tiers that can read files of the durable tier directly."""
    if residency.durable < 0 or not tiers[residency.durable].info.lends_files:
        return []
    return [position for position in range(residency.mapped) if tiers[position].info.loads_files]


def make_lanes(
    config: Config, residency: ResidencyView, keyed: Container[int], with_own_lane: Sequence[int] = ()
) -> list[Lane[LaneTransfer]]:
    """Return the lanes (queues of copies) of a store: one for each direction between the mapped tier and every other
    tier. The lanes of one tier share its medium, so that prefetch waits for demand on any of them. `keyed` are the
    positions of remote tiers, `with_own_lane` the positions of tiers to which the durable tier has a lane of its
    own."""
    movement, limits = config.movement, config.limits
    settings = LaneSettings(
        max_in_flight=movement.in_flight,
        limits={
            Priority.DEMAND: Limits(movement.queue_blocks, movement.in_flight),
            Priority.PREFETCH: Limits(movement.queue_blocks, 1),
            Priority.DEMOTION: Limits(
                movement.queue_blocks,
                max(1, movement.in_flight // 2),
                movement.demotion_rate_bytes or None,
            ),
            Priority.MAINTENANCE: Limits(movement.queue_blocks, 1),
        },
        quiet_s=movement.prefetch_quiet_ms / 1000,
        prefetch_item_bytes=limits.max_block_bytes + 8192,
    )
    of_keyed = replace(
        settings, max_in_flight=max(KEYED_IN_FLIGHT, movement.in_flight),
        limits=settings.limits | {
            Priority.DEMAND: Limits(movement.queue_blocks, max(KEYED_IN_FLIGHT, movement.in_flight))
        },
        prior_bytes_per_s=KEYED_PRIOR_BYTES_PER_S, prior_latency_us=KEYED_PRIOR_US,
        prior_bytes=KEYED_PRIOR_BYTES,
    )  # fmt: skip
    lanes: list[Lane[LaneTransfer]] = []
    mapped = residency.mapped
    for other in range(len(residency.tiers)):
        if other == mapped:
            continue
        source = mapped if other < mapped or other == residency.durable else other - 1
        of_other = of_keyed if other in keyed else settings
        section = config.tier(residency.tiers[other])
        if isinstance(section, GpuSection):
            of_other = _beside_engines(settings, section)
        names = [lane_name(residency.tiers, other, mapped), lane_name(residency.tiers, source, other)]
        if other in keyed and source != mapped:
            names.append(lane_name(residency.tiers, mapped, other))
        if other == residency.durable:
            names += [lane_name(residency.tiers, other, to) for to in with_own_lane]
        pair: list[Lane[LaneTransfer]] = [Lane(name, of_other) for name in names]
        for lane in pair:
            lane.share_medium(pair)
        lanes += pair
    return lanes


def _beside_engines(settings: LaneSettings, section: GpuSection) -> LaneSettings:
    """Return `settings` for a link over which engines copy as well, unseen by any lane."""
    if section.rate_bytes is None:
        return replace(settings, spare_share=LINK_SHARE)
    burst_bytes = min(settings.spare_burst_bytes, section.rate_bytes)  # of a second at most
    return replace(settings, spare_bytes_per_s=float(section.rate_bytes), spare_burst_bytes=burst_bytes)


def make_durable_admission(config: Config, residency: Residency, policies: Sequence[EvictionPolicy]) -> Admission:
    return create_admission(config.nvme.admission, residency, residency.durable, policies[residency.mapped])


def make_breakers(ground: Ground, modes: DegradedModes) -> dict[int, TierBreaker]:
    """Return the circuit breakers of the tiers below memory, by position."""
    return {
        position: TierBreaker(
            ground.tiers[position], ground.residency.tiers[position], modes, ground.completions, ground.clock,
            ground.counters, KEYED_LAST_PROBE_S if position in ground.keyed else LAST_PROBE_S,
        )
        for position in range(ground.residency.in_memory, len(ground.tiers))
    }  # fmt: skip


def make_gates(
    ground: Ground, policies: Sequence[EvictionPolicy], remote_writes: RemoteWrites | None
) -> dict[int, TierGate]:
    """Return the gates of the remote tiers, by position. A gate says which blocks are written to its tier.
    `remote_writes` replaces the configured rules."""
    residency, gates = ground.residency, {}

    def refuses(tier: KeyedTier, row: int) -> bool:
        if residency.expires_s(row):
            return True  # nothing would end it there once this daemon has forgotten it
        tenant = residency.tenant_of(row)
        name = residency.tenants[tenant].name  # a tenant's digest; another name in a simulation
        return len(name) == 2 * DIGEST_BYTES and tier.refuses(bytes.fromhex(name))

    for position, tier in ground.keyed.items():
        section, writes = ground.config.tier(residency.tiers[position]), remote_writes or RemoteWrites()
        if remote_writes is None and isinstance(section, RemoteSection):
            writes = RemoteWrites(section.share, section.admission, section.rate_bytes)
        admission = create_admission(writes.admission, residency, position, policies[position - 1])
        early = {REUSED: Reused, ALL: Always}.get(writes.share)
        gates[position] = TierGate(
            residency, admission, early(residency, position) if early is not None else None,
            writes.bytes_per_s, ground.clock, ground.counters, partial(refuses, tier),
        )  # fmt: skip
    return gates


def make_commit(
    ground: Ground,
    links: TierLinks,
    breaker: TierBreaker,
    endurance: EnduranceAccount,
    policies: Sequence[EvictionPolicy],
) -> GroupCommit:
    """Return the component that syncs writes to the durable tier, with the gate that decides which blocks are
    written."""
    config, residency, clock = ground.config, ground.residency, ground.clock
    lane = links.mover.lanes[links.lane(residency.mapped, residency.durable)]
    gate = WriteGate(
        residency, make_durable_admission(config, residency, policies), endurance, breaker, ground.counters,
        Backlog(lambda: lane.statistics(clock.monotonic_ns()).service_bytes_per_s), clock,
        throttle_ms=config.nvme.endurance_wait_ms,
    )  # fmt: skip
    batch, tier = (
        BatchLimits(config.durability.batch_ms, config.durability.batch_blocks),
        ground.tiers[residency.durable],
    )
    return GroupCommit(tier, residency, ground.completions, ground.counters, gate, batch)


def make_rooms(
    ground: Ground, links: TierLinks, parts: RoomParts, commit: GroupCommit | None, gates: Mapping[int, TierGate]
) -> Descent:
    """Return the allocators of slots of all tiers, and the components that copy evicted blocks to slower tiers. An
    evicted block goes to the next slower tier in memory, from device memory to the mapped tier, and from the slowest
    one in memory to NVMe or a remote tier."""
    residency, mapped, in_memory = ground.residency, ground.residency.mapped, ground.residency.in_memory
    rooms: dict[int, Room] = {}
    copiers: list[Copier] = []
    writeback: WriteBack | None = None
    demoter: Demoter = NoDemotion()

    def demotion(source: int, destination: int, bounds: Bounds) -> Demotion:
        link, room = links.between(source, destination), rooms[destination]
        copiers.append(made := Demotion(residency, link, room, demoter, parts.damage, ground.flows, bounds))
        return made

    for position, tier in reversed(list(enumerate(ground.tiers))):
        above, lower = demoter, max(position + 1, mapped)
        if position < in_memory and lower < in_memory:
            above = demotion(
                position, lower, Bounds(priority=Priority.DEMOTION if position < mapped else Priority.DEMAND)
            )
        if position >= mapped:
            demoter = above
        victims = Victims(parts.policies[position], residency, parts.orphans, parts.priorities, ground.clock)
        exits = parts.exits[position]
        eviction = Eviction(
            position, residency, exits, above, ground.clock, ground.counters, ground.flows, parts.boundaries.lost
        )
        relocation: Relocation = MemoryRelocation(tier, ground.completions)
        if commit is not None and position == residency.durable:
            relocation = LaneRelocation(tier, links.mover, links.lane(mapped, position), commit)
        on_damage = partial(parts.damage.found, position)
        evacuation = Evacuation(tier, residency, victims, eviction, exits, relocation, on_damage, ground.counters)
        rooms[position] = Room(tier, residency, victims, eviction, evacuation)
        if position in gates:
            direct = links.between(mapped, position)
            demoter = demotion(position - 1, position, Bounds(KEYED_AT_ONCE, KEYED_WAIT_S, gates[position], direct))
        elif commit is not None and position == residency.durable:
            sources = [links.between(source, position) for source in range(in_memory)]
            demoter = writeback = WriteBack(
                residency, sources, rooms[position], ground.counters, ground.flows, commit, parts.modes
            )
    return Descent([rooms[position] for position in range(len(ground.tiers))], copiers, writeback)


def make_early(
    ground: Ground, links: TierLinks, parts: RoomParts, rooms: Sequence[Room], gates: Mapping[int, TierGate],
    promoter: Promoter, absences: Absences,
) -> tuple[list[Sharing], list[DevicePromotion]]:  # fmt: skip
    """Return two lists of components that copy blocks although no tier evicts them: the ones that copy used blocks to
    remote and device tiers, and the ones that read blocks from NVMe straight into device memory. `absences` records
    which blocks a remote tier lacks."""
    residency, mapped, counters = ground.residency, ground.residency.mapped, ground.counters
    if gates or mapped:  # few nodes have a remote tier or one in a device
        from kvstored.store.transfer.device_promotion import DevicePromotion
        from kvstored.store.transfer.sharing import Sharing
    sharing: list[Sharing] = []
    promotions: list[DevicePromotion] = []
    for position, gate in gates.items():
        if gate.shares_early:
            intake, back = (
                TierIntake(links.between(mapped, position), rooms[position], gate),
                links.between(position, mapped),
            )
            sharing.append(Sharing(residency, intake, back, absences, parts.damage, counters, "shared_blocks"))
    for position in range(mapped):
        section = ground.config.tier(residency.tiers[position])
        name = section.admission if isinstance(section, GpuSection) else SECOND_TOUCH
        admission, frequency = (
            create_admission(name, residency, position, parts.policies[mapped]),
            FrequencyAdmission(residency, position),
        )
        # The lanes have the byte rate.
        gate = TierGate(residency, admission, admission, 0, ground.clock, counters, lambda _row: False)
        intake = TierIntake(links.between(mapped, position), rooms[position], gate, frequency)
        back = links.between(position, mapped)
        sharing.append(Sharing(residency, intake, back, None, parts.damage, counters, "device_blocks"))
        if position in device_promotion_tiers(ground.tiers, residency):
            intake = intake._replace(link=links.between(residency.durable, position))
            promotions.append(
                DevicePromotion(residency, intake, promoter, parts.damage, counters, ground.flows, parts.modes)
            )
    on_devices = TierSet.of(*range(mapped))

    def used(rows: Sequence[int], device_tiers: int) -> None:
        others = on_devices.difference(device_tiers) if device_tiers else NO_TIERS
        for each in sharing:  # a client on a device has no use for copies on another one
            if each.destination not in others:
                each.used(rows)

    if sharing:
        residency.use_with(used)
    return sharing, promotions
