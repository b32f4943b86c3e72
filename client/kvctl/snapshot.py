"""Everything that `top` and `report` show, asked of the daemon at one moment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvctl.admin import AdminSocket
from kvctl.output import plain
from kvctl.past import Past
from kvstore_proto.v1 import admin_pb2 as wire


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The replies as they came."""

    status: wire.StatusReply
    tiers: wire.TiersReply
    tenants: wire.TenantsReply
    history: wire.HistoryReply

    @property
    def past(self) -> Past:
        return Past(self.history)

    def document(self) -> dict[str, Any]:
        """For --json; what was not known is null, since JSON has no NaN."""
        return {
            "status": plain(self.status),
            "tiers": plain(self.tiers)["tiers"],
            "tenants": plain(self.tenants)["tenants"],
            "history": without_nan(plain(self.history)),
        }


def take(admin: AdminSocket, *, since_s: float, settings: bool = False, resolution_s: int = 0) -> Snapshot:
    """Four calls. Raises CommandError."""
    request = wire.HistoryRequest(resolution_s=resolution_s, since_s=since_s, settings=settings)
    return Snapshot(
        admin.call("Status", wire.StatusRequest(), wire.StatusReply),
        admin.call("Tiers", wire.TiersRequest(), wire.TiersReply),
        admin.call("Tenants", wire.TenantsRequest(), wire.TenantsReply),
        admin.call("History", request, wire.HistoryReply),
    )


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
