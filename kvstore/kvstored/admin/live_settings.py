"""The settings that take effect while the daemon serves, and how.

Owns the list. What a setting does belongs to the part that has it. See docs/kvstored.md for the same list in words.
"""

from __future__ import annotations

import logging

from kvstored.admin.live_tenants import LiveTenants
from kvstored.config import Config, ConfigError
from kvstored.config.sizes import show_size
from kvstored.store.assembly import Store
from kvstored.store.tiering import MAPPED
from kvstored.store.transfer.resize import TierResize

HOST_POLICY = frozenset({"host.policy", "host.ttl_s", "host.keep_worth"})
NVME_POLICY = frozenset({"nvme.policy", "nvme.ttl_s"})
TENANTS = frozenset({"[[tenant]]", "tenants.default"})


class LiveSettings:
    """`nvme` is None where there is no NVMe tier."""

    def __init__(self, store: Store, host: TierResize, nvme: TierResize | None, tenants: LiveTenants) -> None:
        self._store = store
        self._host = host
        self._nvme = nvme
        self._tenants = tenants

    def prepare(self, config: Config) -> None:
        """Raises ConfigError for what cannot be applied to this daemon, having changed nothing."""
        host = self._store.host
        least_bytes = host.charged_bytes + config.host.arena_bytes
        if config.host.capacity_bytes < least_bytes:
            raise ConfigError(
                f"host.capacity {show_size(config.host.capacity_bytes)} does not hold one arena beside the "
                f"{show_size(host.charged_bytes)} of staging and ledger that this daemon has; restart it for so little"
            )
        self._tenants.prepare(config)

    def apply(self, config: Config, names: set[str]) -> set[str]:
        """Let the settings `names` be as in `config`; those that took effect. Raises ConfigError, with everything as it
        was."""
        applied = names & (TENANTS | {"daemon.log_level"})
        if applied & TENANTS:  # first, since it alone may fail
            self._tenants.relist(config)
        self._tenants.renew_tokens()  # their file may have changed although no setting did
        if "daemon.log_level" in applied:
            logging.getLogger().setLevel(config.daemon.log_level.upper())
        if "host.capacity" in names:
            self._host.resize(config.host.capacity_bytes)
            applied.add("host.capacity")
        if names & HOST_POLICY:
            self._store.replace_policy(config, MAPPED)
            applied |= names & HOST_POLICY
        if self._nvme is not None:
            applied |= self._apply_nvme(config, names, self._nvme)
        return applied

    def _apply_nvme(self, config: Config, names: set[str], resize: TierResize) -> set[str]:
        applied = names & (NVME_POLICY | {"nvme.capacity", "nvme.admission"})
        if "nvme.capacity" in applied:
            resize.resize(config.nvme.capacity_bytes)
        if applied & NVME_POLICY:
            self._store.replace_policy(config, self._store.residency.durable)
        if "nvme.admission" in applied:
            self._store.replace_admission(config)
        return applied
