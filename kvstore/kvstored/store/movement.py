"""The movement of a store, put together: what moves blocks between its tiers, what judges that, and the rooms there.

Each part is made by a function that takes what it needs and gives back what it made; `assembly.py` calls them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvstore_tiers.base import Tier
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.objects import DIGEST_BYTES
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.config import Config
from kvstored.config.tiers.gpu import GpuSection
from kvstored.config.tiers.remote import RemoteSection
from kvstored.policy_names import ALL, REUSED, SECOND_TOUCH
from kvstored.store.blocks import Residency
from kvstored.store.degraded.breaker import LAST_PROBE_S, TierBreaker
from kvstored.store.degraded.modes import DegradedModes
from kvstored.store.endurance.account import EnduranceAccount
from kvstored.store.policies import Admission, Policy, create_admission
from kvstored.store.policies.admission import Always, Reused
from kvstored.store.remote import Absences
from kvstored.store.transfer.admission import Contest, Intake, RemoteWrites, TierGate
from kvstored.store.transfer.damage import Damage
from kvstored.store.transfer.demotion import Bounds, Demotion
from kvstored.store.transfer.evacuation import Evacuation
from kvstored.store.transfer.eviction import Copier, Demoter, Eviction, NoDemotion, SlotExit
from kvstored.store.transfer.gate import Backlog, WriteGate
from kvstored.store.transfer.group_commit import BatchLimits, GroupCommit
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.link import Link, Mover, lane_name
from kvstored.store.transfer.relocation import LaneRelocation, MemoryRelocation, Relocation
from kvstored.store.transfer.room import Room
from kvstored.store.transfer.sharing import Sharing, SharingCounts
from kvstored.store.transfer.victims import OrphanQueue, Victims
from kvstored.store.transfer.writeback import WriteBack
from kvstored.telemetry import Counters, Flows
from kvstored.tier_set import NO_TIERS, TierSet

if TYPE_CHECKING:
    pass

KEYED_AT_ONCE, KEYED_WAIT_S = 16, 0.02  # demotions to a key-addressed tier: one that hangs keeps so many blocks in
# place, and what makes room above it goes on without it after so long
KEYED_LAST_PROBE_S = 2.0  # another machine may be back at any moment, and a question costs it little


@dataclass(frozen=True, slots=True)
class Ground:
    """The things that most parts of a store need. `keyed` are the tiers addressed by key, by position."""

    config: Config
    clock: Clock
    completions: CompletionQueue
    residency: Residency
    tiers: Sequence[Tier]
    keyed: Mapping[int, KeyedTier]
    counters: Counters
    flows: Flows


class Links:
    """Makes links over the lanes of `mover`. `breakers` are those of the tiers below memory, by position."""

    def __init__(self, ground: Ground, mover: Mover, breakers: Mapping[int, TierBreaker]) -> None:
        self._ground = ground
        self._mover = mover
        self._breakers = breakers

    def between(self, source: int, destination: int) -> Link:
        ground = self._ground
        breaker = self._breakers.get(max(source, destination))
        lane = self.lane(source, destination)
        return Link(source, destination, ground.tiers, lane, ground.residency, self._mover, ground.clock, breaker)

    def lane(self, source: int, destination: int) -> str:
        """Return the name of the lane. The writes of the durable medium wait in one queue, whatever tier they come
        from."""
        residency = self._ground.residency
        is_write = destination == residency.durable
        return lane_name(residency.tiers, residency.mapped if is_write else source, destination)


class Durable(NamedTuple):
    """Parts of the durable tier that are made before its room."""

    breaker: TierBreaker
    gate: WriteGate
    commit: GroupCommit
    relocation: Relocation
    batch: BatchLimits


class Descent(NamedTuple):
    """The ways down: the room of each tier, what copies blocks to slower tiers, and the last of it, write-back."""

    rooms: list[Room]
    copiers: list[Copier]
    writeback: WriteBack | None


class RoomParts(NamedTuple):
    """Parts that all rooms need. Lists are by position."""

    policies: list[Policy]
    exits: Sequence[SlotExit]
    orphans: OrphanQueue
    damage: Damage


def make_durable_admission(config: Config, residency: Residency, policies: Sequence[Policy]) -> Admission:
    return create_admission(config.nvme.admission, residency, residency.durable, policies[residency.mapped])


def make_breakers(ground: Ground, modes: DegradedModes) -> dict[int, TierBreaker]:
    """Make the breakers of the tiers below memory, by position."""
    return {
        position: TierBreaker(
            ground.tiers[position], ground.residency.tiers[position], modes, ground.completions, ground.clock,
            ground.counters, KEYED_LAST_PROBE_S if position in ground.keyed else LAST_PROBE_S,
        )
        for position in range(ground.residency.in_memory, len(ground.tiers))
    }  # fmt: skip


def make_gates(ground: Ground, policies: Sequence[Policy], remote_writes: RemoteWrites | None) -> dict[int, TierGate]:
    """Make the gates of the key-addressed tiers, by position. `remote_writes` instead of the configuration's."""
    residency, gates = ground.residency, {}

    def refuses(tier: KeyedTier, tenant: int) -> bool:
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


def make_durable(
    ground: Ground, links: Links, mover: Mover, breaker: TierBreaker, endurance: EnduranceAccount,
    policies: Sequence[Policy],
) -> Durable:  # fmt: skip
    """Make what judges and commits the writes to the durable tier."""
    config, residency, clock = ground.config, ground.residency, ground.clock
    tier, name = ground.tiers[residency.durable], links.lane(residency.mapped, residency.durable)
    lane, batch = mover.lanes[name], BatchLimits(config.durability.batch_ms, config.durability.batch_blocks)
    gate = WriteGate(
        residency, make_durable_admission(config, residency, policies), endurance, breaker, ground.counters,
        Backlog(lambda: lane.statistics(clock.monotonic_ns()).service_bytes_per_s), clock,
        throttle_ms=config.nvme.endurance_wait_ms,
    )  # fmt: skip
    commit = GroupCommit(tier, residency, ground.completions, ground.counters, gate, batch)
    relocation = LaneRelocation(tier, mover, name, breaker, endurance, ground.completions)
    return Durable(breaker, gate, commit, relocation, batch)


def make_rooms(
    ground: Ground, links: Links, parts: RoomParts, durable: Durable | None, gates: Mapping[int, TierGate]
) -> Descent:
    """Make the rooms of all tiers, the slowest first, and what demotes to them. Victims of a tier in memory are passed
    to the next slower one there, victims of a tier before the mapped one to that one, and all others to write-back or a
    key-addressed tier."""
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
        victims = Victims(parts.policies[position], residency, parts.orphans, ground.clock)
        exits = parts.exits[position]
        eviction = Eviction(position, residency, exits, above, ground.clock, ground.counters, ground.flows)
        relocation: Relocation = MemoryRelocation(tier, ground.completions)
        if durable is not None and position == residency.durable:
            relocation = durable.relocation
        on_damage = partial(parts.damage.found, position)
        evacuation = Evacuation(tier, residency, victims, eviction, exits, relocation, on_damage, ground.counters)
        rooms[position] = Room(tier, residency, victims, eviction, evacuation)
        if position in gates:
            direct = links.between(mapped, position)
            demoter = demotion(position - 1, position, Bounds(KEYED_AT_ONCE, KEYED_WAIT_S, gates[position], direct))
        elif durable is not None and position == residency.durable:
            demoter = writeback = WriteBack(
                residency, [links.between(source, position) for source in range(in_memory)], rooms[position],
                ground.counters, ground.flows, durable.gate, durable.commit, durable.batch,
            )  # fmt: skip
    return Descent([rooms[position] for position in range(len(ground.tiers))], copiers, writeback)


def make_device_intakes(
    ground: Ground, links: Links, rooms: Sequence[Room], policies: Sequence[Policy]
) -> dict[int, Callable[[int], Intake]]:
    """Return by position what makes an intake of a tier before the mapped one, from the tier at a position. The lanes
    have the byte rate."""
    residency, made = ground.residency, dict[int, Callable[[int], Intake]]()

    def intake(position: int, contest: Contest, source: int) -> Intake:
        section = ground.config.tier(residency.tiers[position])
        name = section.admission if isinstance(section, GpuSection) else SECOND_TOUCH
        admission = create_admission(name, residency, position, policies[residency.mapped])
        gate = TierGate(residency, admission, admission, 0, ground.clock, ground.counters, lambda _tenant: False)
        return Intake(links.between(source, position), rooms[position], gate, contest)

    for position in range(residency.mapped):
        made[position] = partial(intake, position, Contest(residency, position))
    return made


def make_sharing(
    ground: Ground, links: Links, rooms: Sequence[Room], gates: Mapping[int, TierGate],
    intakes: Mapping[int, Callable[[int], Intake]], absences: Absences, damage: Damage,
) -> list[Sharing]:  # fmt: skip
    """Make what writes blocks early, to each key-addressed tier that shares them and to those before the mapped one."""
    residency, mapped, add = ground.residency, ground.residency.mapped, ground.counters.add

    def sharing(intake: Intake, known: Absences | None, copied: str) -> Sharing:
        counts = SharingCounts(
            partial(add, copied), partial(add, "device_rate_waits"), partial(add, "device_declined_blocks")
        )
        back = links.between(intake.link.destination, mapped)
        return Sharing(residency, intake, back, known, damage, counts)

    made = [
        sharing(Intake(links.between(mapped, position), rooms[position], gate), absences, "shared_blocks")
        for position, gate in gates.items()
        if gate.shares_early
    ]
    made += [sharing(intake(mapped), None, "device_blocks") for intake in intakes.values()]
    on_devices = TierSet.of(*range(mapped))

    def used(rows: Sequence[int], device_tiers: int) -> None:
        others = on_devices.difference(device_tiers) if device_tiers else NO_TIERS
        for each in made:  # a client on a device has no use for copies on another one
            if each.destination not in others:
                each.used(rows)

    if made:
        residency.use_with(used)
    return made
