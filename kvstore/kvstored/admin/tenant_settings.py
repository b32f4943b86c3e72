"""Settings of tenants that an operator gives the running daemon: shares of tiers, and the terms of new blocks.

They hold at once, are saved before the call is answered, and precede the configuration file's until they are reset. The
module owns their form in the small state.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.reload import Reload, shown_tenant
from kvstored.clients.tenants import TenantDirectory
from kvstored.clients.tenants.reach import nobody
from kvstored.config import ConfigError
from kvstored.config.parse import ORDERED_KEYS, share_keys
from kvstored.state.orders import TENANTS, Orders


def ordered_settings(orders: Orders) -> dict[str, dict[str, Any]]:
    """Return the settings in `orders` by tenant name and key. An entry of another form is left out."""
    found = {}
    for name, value in orders.items(TENANTS):
        try:
            settings = json.loads(value)
            found[name.decode()] = {str(key): each for key, each in settings.items()}
        except (ValueError, AttributeError):
            continue
    return found


class TenantSettings:
    """A service by which an operator sets and resets settings of tenants while the daemon runs."""

    def __init__(self, reload: Reload, tenants: TenantDirectory, orders: Orders) -> None:
        self._reload, self._tenants, self._orders = reload, tenants, orders
        self._turn = asyncio.Lock()

    async def set(self, request: pb.SetTenantRequest) -> pb.SetTenantReply:
        """Give the tenant that `request` names its settings, and take back the ones it lists or, with `reset`, all.
        Return the tenant with the settings in force. Raises KVStoreError, having changed nothing."""
        async with self._turn:
            name = request.name
            if (section := self._tenants.section(name)) is not None and section.is_pool:
                raise KVStoreError(
                    ErrorKind.INVALID,
                    f"{name!r} is a shared pool, which counts as its publisher's: set tenant {section.publisher!r}, or "
                    "change the pool in the configuration file, and reload",
                )
            if not self._tenants.is_named(name):
                known = ", ".join(sorted(tenant.name for tenant in self._tenants.all())) or "none yet"
                raise KVStoreError(ErrorKind.NOT_FOUND, f"no tenant {name!r} is listed or may connect; known: {known}")
            orders = ordered_settings(self._orders)
            settings = {} if request.reset else orders.pop(name, {})
            orders.pop(name, None)
            settings |= self._parsed(request.settings)
            settings = {key: value for key, value in settings.items() if key not in request.unset}
            if settings:
                orders[name] = settings
            try:
                self._reload.check_orders(orders)
            except ConfigError as error:
                raise KVStoreError(ErrorKind.INVALID, f"nothing was changed: {error}") from None
            value = json.dumps(settings, sort_keys=True).encode() if settings else None
            await self._orders.save(TENANTS, name.encode(), value)
            self._orders.entries[TENANTS].pop(name.encode(), None)
            if value is not None:
                self._orders.entries[TENANTS][name.encode()] = value
            self._reload.apply_orders()
            section = self._tenants.section(name)
            why = nobody(name, self._tenants) if settings else ""
            return pb.SetTenantReply(tenant=name if section is None else shown_tenant(section), nobody=why)

    def _parsed(self, settings: Mapping[str, str]) -> dict[str, Any]:
        keys = {*share_keys(self._reload.config), *ORDERED_KEYS}
        found: dict[str, Any] = {}
        for key, value in settings.items():
            if key not in keys:
                raise KVStoreError(
                    ErrorKind.INVALID, f"{key} cannot be set while the daemon runs; what can: {', '.join(sorted(keys))}"
                )
            is_number = key.endswith("_weight") or key in ORDERED_KEYS
            try:
                found[key] = int(value) if is_number else value
            except ValueError:
                raise KVStoreError(ErrorKind.INVALID, f"{key} must be a whole number, got {value!r}") from None
        return found
