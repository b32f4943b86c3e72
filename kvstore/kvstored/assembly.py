"""The storage half of the daemon, put together: tiers, residency, policies, leases, lanes and what moves between them.

`Store` composes and holds; it decides nothing. It knows no socket, no session and no verb, so that whoever brings
tiers, a clock and a completion queue gets the very movement and the very decisions of the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore_tiers.base import Slot, Tier
from kvstore_tiers.host import HostTier
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.config import Config
from kvstored.dataplane.leases import LeaseTable
from kvstored.degraded import DegradedModes, TierBreaker
from kvstored.endurance import EnduranceAccount
from kvstored.movement import promote, writeback
from kvstored.movement.cut_off import CutOff
from kvstored.movement.damage import Damage
from kvstored.movement.dram_check import DramCheck
from kvstored.movement.evacuation import Evacuation
from kvstored.movement.eviction import Demoter, Eviction, NoDemotion
from kvstored.movement.gate import WriteGate
from kvstored.movement.lane import Lane, LaneSettings, Limits, Priority
from kvstored.movement.mover import Mover, Transfer
from kvstored.movement.promote import Promoter
from kvstored.movement.refusals import Refusals
from kvstored.movement.relocation import LaneRelocation, MemoryRelocation, Relocation
from kvstored.movement.room import Room
from kvstored.movement.slot_exit import SlotExit, UnmappedExit
from kvstored.movement.victims import Victims
from kvstored.movement.writeback import WriteBack
from kvstored.policies import Admission, Policy, PolicySettings, create, create_admission
from kvstored.residency import Residency
from kvstored.telemetry import Counters, Flows
from kvstored.tiering import HOST, NVME, TIER_NAMES

PREFETCH_SHARE = 4  # at most one part in so many of the host tier is held for prefetches that wait


def make_residency(config: Config) -> Residency:
    """An empty index over the tiers that `config` names."""
    names = TIER_NAMES if config.nvme.enabled else TIER_NAMES[:1]
    return Residency(names, ghost_keys=config.limits.ghosts_per_tenant)


class Store:
    """`residency` may hold recovered blocks already; policies and rooms take them over. `nvme` None: DRAM only."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        completions: CompletionQueue,
        residency: Residency,
        host: HostTier,
        nvme: Tier | None,
    ) -> None:
        self.config, self.clock, self.completions = config, clock, completions
        self.residency, self.host, self.nvme = residency, host, nvme
        self.tiers: list[Tier] = [host] if nvme is None else [host, nvme]
        self.counters = Counters()
        self.flows = Flows(len(self.tiers))
        self.modes = DegradedModes(clock, self.counters)
        self.breaker: TierBreaker | None = None
        if nvme is not None:
            self.breaker = TierBreaker(
                nvme, TIER_NAMES[NVME], self.modes, completions, clock, self.counters, self._on_reads_shed
            )
        self.endurance = EnduranceAccount(
            config.daemon.state_dir, config.nvme.endurance_bytes_per_day if nvme is not None else 0, clock,
            self.counters,
        )  # fmt: skip
        self.leases = LeaseTable(
            self._unpin, host.free, host.retire, limbo_limit_bytes=config.limits.limbo_per_tenant_bytes
        )
        self.exits: list[SlotExit] = [self.leases]
        if nvme is not None:
            self.exits.append(UnmappedExit(nvme))
        self.retire: list[Callable[[Slot, int], None]] = [exit_.retire for exit_ in self.exits]
        self.policies = self._make_policies()
        self.cut_off = CutOff(residency)
        self.mover = Mover(self._make_lanes(), completions, clock)
        self.damage = Damage(residency, nvme, self.leases.retire, clock, self.counters)
        self.writeback: WriteBack | None = None
        below: list[Room] = []
        if nvme is not None and self.breaker is not None:
            relocation = LaneRelocation(nvme, self.mover, writeback.LANE, self.breaker, self.endurance, completions)
            below = [self._make_room(NVME, NoDemotion(), relocation, self.damage.on_nvme)]
            self.writeback = self._make_writeback(nvme, below[0], self.breaker)
            self.damage.rewrite = self.writeback.write_through
            self.damage.is_coming = self.writeback.is_coming
            self.damage.make_durable = self.writeback.sync
        demoter: Demoter = self.writeback if self.writeback is not None else NoDemotion()
        in_memory = MemoryRelocation(host, completions)
        self.rooms = [self._make_room(HOST, demoter, in_memory, self.damage.on_host), *below]
        self.dram_check = DramCheck(config.host.verify_reads, residency, host, completions, self.damage, self.counters)
        self.promoter = Promoter(
            residency, host, nvme, self.rooms[HOST], self.mover, clock, self.counters, self.flows, self.breaker,
            prefetch_room_bytes=config.host.capacity_bytes // PREFETCH_SHARE, damage=self.damage,
        )  # fmt: skip

    def _make_policies(self) -> list[Policy]:
        return [self._make_policy(self.config, position) for position in range(len(self.tiers))]

    def _make_policy(self, config: Config, position: int) -> Policy:
        host, nvme = config.host, config.nvme
        name, ttl_s, keep_worth = (
            (host.policy, host.ttl_s, host.keep_worth) if position == HOST else (nvme.policy, nvme.ttl_s, 0.0)
        )
        return create(name, self.residency, position, PolicySettings(ttl_s or None, keep_worth))

    def replace_policy(self, config: Config, position: int) -> None:
        """Let the tier's policy be what `config` says. It begins with the blocks that are there, in the order of their
        last use, and with every tenant's share; what the one before had learned is gone."""
        former, policy = self.policies[position], self._make_policy(config, position)
        for tenant, share in former.shares.items():
            policy.set_share(tenant, share)
        self.policies[position] = policy
        self.rooms[position].follow(policy)
        self.replace_admission(config)

    def replace_admission(self, config: Config) -> None:
        """Let NVMe admit what `config` says."""
        if self.writeback is not None:
            self.writeback.gate.admission = self._make_admission(config)

    def _make_admission(self, config: Config) -> Admission:
        return create_admission(config.nvme.admission, self.residency, NVME, self.policies[HOST])

    def _make_room(
        self, position: int, demoter: Demoter, relocation: Relocation, on_damage: Callable[[int, str], None]
    ) -> Room:
        tier, residency, exits = self.tiers[position], self.residency, self.exits[position]
        victims = Victims(self.policies[position], residency, self.cut_off, self.clock)
        eviction = Eviction(position, residency, exits, demoter, self.clock, self.counters, self.flows)
        evacuation = Evacuation(tier, residency, victims, eviction, exits, relocation, on_damage, self.counters)
        return Room(tier, residency, victims, eviction, evacuation)

    def _make_lanes(self) -> list[Lane[Transfer]]:
        """One lane a direction. Both directions of the disk share it, so that prefetch waits for demand on either."""
        if self.nvme is None:
            return []
        movement, limits = self.config.movement, self.config.limits
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
        lanes: list[Lane[Transfer]] = [Lane(name, settings) for name in (promote.LANE, writeback.LANE)]
        for lane in lanes:
            lane.share_medium(lanes)
        return lanes

    def tick(self) -> None:
        """A few times a second: what waits for time alone."""
        self.endurance.tick()
        if self.breaker is not None:
            self.breaker.tick()

    def _make_writeback(self, nvme: Tier, room: Room, breaker: TierBreaker) -> WriteBack:
        config, lane = self.config, self.mover.lanes[writeback.LANE]
        gate = WriteGate(
            self.residency,
            self._make_admission(config),
            self.endurance, breaker, Refusals(self.counters),
            lambda: lane.statistics(self.clock.monotonic_ns()).service_bytes_per_s, self.clock,
            throttle_ms=config.nvme.endurance_wait_ms,
        )  # fmt: skip
        return WriteBack(
            self.residency, self.host, nvme, room, self.mover, self.completions, self.clock,
            self.counters, self.flows, gate,
            delay_ms=config.durability.batch_ms, batch_blocks=config.durability.batch_blocks,
        )  # fmt: skip

    # Small connections between parts

    def _on_reads_shed(self) -> None:
        """The breaker has opened: what waits for NVMe ends now."""
        if self.writeback is not None:
            self.writeback.cancel_queued()
        self.promoter.fail_waiters()

    def _unpin(self, tokens: Iterable[int]) -> None:
        """What a lease pinned and is still there; a block that was found damaged took its pins along."""
        for row in map(self.residency.current, tokens):
            if row >= 0:
                self.residency.unpin(row)
