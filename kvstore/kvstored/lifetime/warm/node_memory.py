"""The daemon's DRAM: the host tier, and the part of it and of device memory that a restart keeps.

The module opens the tier, takes over the former process's memory, and closes it: the memory is freed, or left to its
holder.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from kvstore_console.units import human_bytes
from kvstore_proto.arena import DEVICE_ARENAS
from kvstore_tiers.base import Tier
from kvstore_tiers.host import HostTier
from kvstored.clients.tenants import TenantDirectory
from kvstored.clock import NS_PER_MS, Clock
from kvstored.config import Config
from kvstored.config.tiers import Start
from kvstored.lifetime.warm.former_clients import FormerClients
from kvstored.lifetime.warm.ledger import LEDGER_BYTES, tier_of_chunk
from kvstored.lifetime.warm.restart import Adopted, WarmRestart, open_warm
from kvstored.store.assembly import Store
from kvstored.store.blocks import Residency

log = logging.getLogger(__name__)


class NodeMemory:
    """The daemon's DRAM, and the part of device memory that is kept over a restart. Call, in this order: `open`,
    `charge_beside`, `adopt`, `restore_clients`, `close`. `warm` is the part that keeps memory over a restart, None if
    it is off. If `is_forgotten` is true, no memory is left for a next process at the end."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._host: HostTier | None = None
        self._adopted = Adopted()
        self.warm: WarmRestart | None = None
        self.is_forgotten = False

    def open(self, *, forget: bool) -> HostTier:
        """Open the DRAM tier and return it. With `forget`, free the blocks that a former process left. Raises
        HolderError, and ValueError for a capacity that is too small."""
        host = self._config.host
        warm = self.warm = open_warm(host, self._config.daemon.state_dir, forget=forget)
        tier = self._host = host.open(Start() if warm is None else Start(warm, warm.ledger.next_arena))
        if not tier.charge(host.staging_bytes, "staging"):
            raise ValueError("host.staging does not fit host.capacity")
        if warm is not None and not tier.charge(LEDGER_BYTES, "ledger"):
            raise ValueError('host.capacity is too small for host.warm_restart; raise it or set warm_restart = "off"')
        return tier

    def charge_beside(self, tier: Tier) -> None:
        """Charge what `tier` keeps in DRAM in addition to blocks (header pages of a device tier, staging for a codec)
        to the DRAM tier's capacity. Raises ValueError when there is no room for it.
        """
        nbytes, name = tier.info.dram_bytes, tier.info.name
        label, what, lower = "headers", "header pages", "capacity"
        if tier.info.coding.staging_bytes:
            label, what, lower = "staging", "staging for the codec or encryption", "codec_staging"
        if nbytes and self._host is not None and not self._host.charge(nbytes, f"{label} of {name}"):
            raise ValueError(
                f"host.capacity has no room for {human_bytes(nbytes)} of {what} of {name}: raise it, or lower "
                f"{name}.{lower}"
            )

    @property
    def last_session_id(self) -> int:
        """The last session number of the former process, 0 if unknown."""
        return self.warm.ledger.last_session_id if self.warm is not None else 0

    def start_of_device(self, start: Start, first_chunk: int) -> Start:
        """Return a copy of `start`, the parameters for opening a tier, for a tier of device memory. The copy has the
        first unused number for chunks of its memory, at or above `first_chunk`, and the part that keeps such memory
        over a restart, if there is one."""
        if self.warm is None:
            return replace(start, first_chunk=first_chunk)
        return replace(start, first_chunk=self.warm.ledger.next_chunk(first_chunk), witness=self.warm)

    def adopt(self, tiers: Sequence[Tier], residency: Residency, tenants: TenantDirectory, clock: Clock) -> None:
        """Take over the blocks that the former process left in DRAM and on devices, into `tiers` and the index."""
        if self.warm is None or self._host is None:
            return
        self._adopted = self.warm.adopt(tiers, residency, tenants, clock)
        if self._adopted.rows:
            on_device = sum(number >= DEVICE_ARENAS for number, _ in self._adopted.rows)
            log.info(
                "%d blocks of the process before are in DRAM still, %d on GPUs",
                len(self._adopted.rows) - on_device, on_device,
            )  # fmt: skip

    def settle(self) -> None:
        """Send all descriptors of memory that are not kept yet to the process that keeps them, since tiers of device
        memory are about to close."""
        if self.warm is not None:
            self.warm.settle()

    def restore_clients(self, store: Store, clock: Clock) -> FormerClients | None:
        """Return the clients of the former process, with their leases on blocks that were taken over. Return None if
        memory is not kept over a restart. The caller closes the result."""
        if self.warm is None:
            return None
        former = FormerClients(self.warm.ledger, store.leases, store.counters)
        until_ns = clock.monotonic_ns() + self._config.limits.lease_ttl_ms * NS_PER_MS
        former.restore(self._adopted, store.residency, until_ns)
        for (number, _), row in self._adopted.rows.items():
            if number >= DEVICE_ARENAS:
                store.device_check.owe(tier_of_chunk(number), row)
        self.warm.count(self._adopted, store.counters)
        self._adopted = Adopted()
        return former

    def after_stop(self) -> str:
        """Return a sentence that says what happens to DRAM, and to device memory that holds blocks, after the daemon
        has stopped.
        """
        if self.warm is None:
            return 'DRAM is given back: nothing keeps it (host.warm_restart = "off", or host.sealed)'
        text = "DRAM is given back, as Ctrl-C asks for" if self.is_forgotten else self.warm.holder.after_stop
        return text.replace("DRAM", "DRAM, with what is on GPUs,", 1) if self.warm.keeps_device_memory else text

    def close(self, *, has_served: bool) -> None:
        """Close the DRAM tier. Memory that is kept for a next process stays unchanged, with its blocks. `has_served`
        says whether the daemon has served clients."""
        host, warm = self._host, self.warm
        if warm is None:
            if host is not None:
                host.close()
            return
        if not has_served and not warm.ledger.arenas():
            self.is_forgotten = True  # a start that failed, with nothing to keep: no holder stays behind
        if host is not None and self.is_forgotten:
            host.close()
        elif host is not None:
            warm.settle()
            host.leave()
        warm.close(forget=self.is_forgotten)
