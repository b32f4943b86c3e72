"""The storage half of the daemon, put together: tiers, residency, policies, leases, lanes and what moves between them.

`Store` composes and holds; it decides nothing. It knows no socket, no session and no verb, so that whoever brings
tiers, a clock and a completion queue gets the very movement and the very decisions of the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore_tiers.base import Slot, Tier
from kvstore_tiers.host import HostTier
from kvstored.clock import Clock
from kvstored.config import Config
from kvstored.dataplane.leases import LeaseTable
from kvstored.movement import promote, writeback
from kvstored.movement.completions import CompletionQueue
from kvstored.movement.lane import Lane, LaneSettings, Limits, Priority
from kvstored.movement.mover import Mover, Transfer
from kvstored.movement.promote import Promoter
from kvstored.movement.room import Room
from kvstored.movement.writeback import WriteBack
from kvstored.policies import Policy, PolicySettings, create, create_admission
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
        self.leases = LeaseTable(self._unpin, host.free)
        # Where the slots of each tier go when their block has left: host slots may still have readers.
        self.retire: list[Callable[[Slot, int], None]] = [self.leases.retire]
        if nvme is not None:
            self.retire.append(lambda slot, tenant: nvme.free(slot))
        self.policies = self._make_policies()
        self.rooms = self._make_rooms()
        self.mover = Mover(self._make_lanes(), completions, clock)
        self.promoter = Promoter(
            residency, host, nvme, self.rooms[HOST], self.mover, clock, self.counters, self.flows,
            prefetch_room_bytes=config.host.capacity_bytes // PREFETCH_SHARE,
        )  # fmt: skip
        self.writeback = self._make_writeback(nvme) if nvme is not None else None

    def _make_policies(self) -> list[Policy]:
        host, nvme = self.config.host, self.config.nvme
        chosen = [(host.policy, host.ttl_s), (nvme.policy, nvme.ttl_s)][: len(self.tiers)]
        return [
            create(name, self.residency, position, PolicySettings(ttl_s=ttl_s or None))
            for position, (name, ttl_s) in enumerate(chosen)
        ]

    def _make_rooms(self) -> list[Room]:
        return [
            Room(
                tier, position, self.policies[position], self.residency, self.retire[position],
                self._may_linger if position == HOST else lambda slot, tenant: True,
                self.clock, self.counters, self.flows, separates_owners=position == HOST,
            )
            for position, tier in enumerate(self.tiers)
        ]  # fmt: skip

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

    def _make_writeback(self, nvme: Tier) -> WriteBack:
        config = self.config
        made = WriteBack(
            self.residency, self.host, nvme, self.rooms[NVME],
            create_admission(config.nvme.admission, self.residency, NVME), self.mover, self.completions, self.clock,
            self.counters, self.flows,
            delay_ms=config.durability.batch_ms, batch_blocks=config.durability.batch_blocks,
        )  # fmt: skip
        self.rooms[HOST].demoter = made
        return made

    # Small connections between parts

    def _unpin(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.residency.unpin(row)

    def _may_linger(self, slot: Slot, tenant: int) -> bool:
        """Whether a block may leave this slot: nobody reads it, or its tenant's limbo has room for it."""
        if not self.leases.has_readers(slot):
            return True
        return self.leases.limbo_bytes(tenant) + slot.nbytes <= self.config.limits.limbo_per_tenant_bytes
