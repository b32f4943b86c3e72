"""What a node holds, opened in order: tenants, tiers with what survived in them, residency, and the store over them.

Owns the order of a start: identity before tiers, tiers before residency, recovery before policies. Serves no client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from kvstore_proto.arena import DEVICE_ARENAS
from kvstore_proto.state_identity import read_ownership
from kvstore_tiers.base import Tier
from kvstore_tiers.host import HostTier
from kvstore_tiers.nvme.directory import TierDirectory
from kvstore_tiers.nvme.early_scan import EarlyRecordScan
from kvstored.clients.tenants import TenantDirectory
from kvstored.clients.tenants.cluster_secret import read_cluster_secret
from kvstored.clients.tenants.keyring import Keyring
from kvstored.clients.tenants.reach import follow_users
from kvstored.clients.tenants.tokens import names_in
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.config import Config
from kvstored.config.tiers import Cluster, Start
from kvstored.lifetime.recovery import drop_blocks, recover_blocks
from kvstored.lifetime.usage_file import UsageFile
from kvstored.lifetime.warm.ledger import CHUNKS_A_TIER
from kvstored.lifetime.warm.node_memory import NodeMemory
from kvstored.store.assembly import Store
from kvstored.store.blocks import Residency
from kvstored.store.residency import make_residency
from kvstored.unsaved import Unsaved

log = logging.getLogger(__name__)


class NodeStorage:
    """`open` once, on the control loop. `former`: clients of the process before, None without warm restart."""

    def __init__(
        self, config: Config, clock: Clock, memory: NodeMemory, stack: AsyncExitStack, *, new_secret: bool
    ) -> None:
        """What is opened is closed by `stack`. `new_secret`: blocks that the secret does not reach are dropped."""
        self.unsaved = Unsaved()
        self._config = config
        self._clock = clock
        self._memory = memory
        self._stack = stack
        self._new_secret = new_secret

    def open(
        self, completions: CompletionQueue, early_scan: EarlyRecordScan | None, has_served: Callable[[], bool]
    ) -> None:
        """Raises what the parts raise. `has_served()`: whether the daemon came so far, asked at the end."""
        config, memory, stack = self._config, self._memory, self._stack
        state_dir = config.daemon.state_dir
        keyring = self._open_keyring()
        self.tenants = TenantDirectory(state_dir, config.tenants, config.tenant_default, keyring, self.unsaved)
        stack.callback(self.tenants.close)
        stack.callback(lambda: memory.close(has_served=has_served()))
        tiers = self._open_tiers(memory.open(forget=keyring.dram_is_lost), self._start(keyring, early_scan))
        residency = make_residency(config, tiers)
        durable = tiers[residency.durable] if residency.durable >= 0 else None
        if durable is not None:
            self._recover(durable, residency, forget=keyring.nvme_is_lost)
        keyring.begin()  # with what `TenantDirectory` claimed
        memory.adopt(tiers, residency, self.tenants, self._clock)
        self.usage = UsageFile(state_dir, residency, self._clock, self.unsaved)
        self.usage.restore({tenant.index_name for tenant in self.tenants.all()}, durable)
        self.store = Store(config, self._clock, completions, residency, tiers)
        self.former = memory.restore_clients(self.store, self._clock)
        if self.former is not None:
            stack.callback(self.former.close)
        self.usage.follow(self.store.policies, self.store.counters, self.store.prefetch_state)
        stack.push_async_callback(self.usage.save)
        stack.push_async_callback(self.store.endurance.close)
        self._follow_users(residency)

    def with_tokens(self) -> frozenset[str]:
        """Names of the tenants that the tokens file lists."""
        return names_in(self._config.unary.tokens_in_use)

    def _follow_users(self, residency: Residency) -> None:
        try:
            follow_users(self.tenants, residency, self.with_tokens())
        except OSError as error:
            cost = "what users stored does not follow them to tenants that are newly listed, until a restart"
            self.unsaved.failed(self.tenants.keyring.path, error, cost)

    def _open_keyring(self) -> Keyring:
        nvme, state_dir = self._config.nvme, self._config.daemon.state_dir
        nvme_dir = nvme.path if nvme.enabled else None
        if nvme_dir is not None and nvme_dir.is_dir() and read_ownership(state_dir, nvme_dir).problem:
            TierDirectory(nvme_dir, create=False).close()  # that another daemon has it is the better reason
        given = read_cluster_secret(self._config.cluster.secret_file)
        return Keyring(state_dir, nvme_dir, new_secret=self._new_secret, given=given, unsaved=self.unsaved)

    def _start(self, keyring: Keyring, early_scan: EarlyRecordScan | None) -> Start:
        def mode_of(digest: bytes) -> str:
            tenant = self.tenants.by_digest(digest)
            return tenant.limits.remote if tenant is not None else ""

        return Start(early_scan=early_scan, cluster=Cluster(keyring.secret, mode_of))

    def _open_tiers(self, mapped: Tier, start: Start) -> list[Tier]:
        """All tiers, fastest first; `mapped` is open."""
        tiers = []
        for position, section in enumerate(self._config.tiers):
            own = self._memory.start_of_device(start, DEVICE_ARENAS + position * CHUNKS_A_TIER)
            tiers.append(mapped if section is self._config.host else section.open(own))
            if section is not self._config.host:
                self._stack.callback(tiers[-1].close)
                self._memory.charge_headers(tiers[-1])
        self._stack.callback(self._memory.settle)  # before tiers close what may not be kept yet
        borrowers = [tier for tier in tiers if tier.info.shares_memory]
        for tier in tiers:
            if isinstance(tier, HostTier):
                tier.lend_to(borrowers)
        return tiers

    def _recover(self, tier: Tier, residency: Residency, *, forget: bool) -> None:
        if forget:
            drop_blocks(tier)
            return
        recovered = recover_blocks(tier, residency, self.tenants, self._clock)
        if recovered:
            log.info("%d blocks found on NVMe", recovered)
