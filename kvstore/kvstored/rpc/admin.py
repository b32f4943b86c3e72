"""The Admin service: what an operator sees and does. Shows keys and sizes, never token ids or payload."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from kvstore_proto.errors import KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstore_proto.v1 import admin_pb2_grpc
from kvstored.admin.accounts import Accounts
from kvstored.admin.block_list import BlockList
from kvstored.admin.block_totals import BlockTotals
from kvstored.admin.drop import Drop
from kvstored.admin.explain import Explain
from kvstored.admin.history import HistoryView
from kvstored.admin.lifetime import Lifetime
from kvstored.admin.quarantine import Quarantine
from kvstored.admin.reload import Reload
from kvstored.admin.rename import RenameTenant
from kvstored.admin.settings import SettingsView
from kvstored.admin.views import Views
from kvstored.rpc.audit import audit

Handler = Callable[[Any, Any, Any], Awaitable[Any]]


def _reporting(handler: Handler) -> Handler:
    """Turn a KVStoreError into the gRPC status that its kind maps to."""

    async def call(self: Any, request: Any, context: Any) -> Any:
        try:
            reply = await handler(self, request, context)
            audit(handler.__name__, request, reply, context.invocation_metadata())
            return reply
        except KVStoreError as error:
            await context.abort(grpc.StatusCode[error.kind.grpc_status], error.message)

    return call


@dataclass(frozen=True)
class Looks:
    """What shows the daemon and changes nothing."""

    views: Views
    accounts: Accounts
    blocks: BlockList
    totals: BlockTotals
    explain: Explain
    history: HistoryView
    settings: SettingsView


class AdminService(admin_pb2_grpc.AdminServicer):
    """Translates. `looks` shows; `drop` takes away, `rename` gives to another name, `lifetime` flushes, drains and
    stops, `quarantine` shows and releases what is damaged, `reload` reads the configuration again.
    """

    def __init__(
        self,
        looks: Looks,
        drop: Drop,
        rename: RenameTenant,
        lifetime: Lifetime,
        quarantine: Quarantine,
        reload: Reload,
    ) -> None:
        self._looks = looks
        self._drop = drop
        self._rename = rename
        self._lifetime = lifetime
        self._quarantine = quarantine
        self._reload = reload

    @_reporting
    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        return self._looks.views.status()

    @_reporting
    async def Tiers(self, request: pb.TiersRequest, context: Any) -> pb.TiersReply:  # noqa: N802
        return self._looks.views.tiers()

    @_reporting
    async def Tenants(self, request: pb.TenantsRequest, context: Any) -> pb.TenantsReply:  # noqa: N802
        return await self._looks.accounts.add_to(self._looks.views.tenants())

    @_reporting
    async def Blocks(self, request: pb.BlocksRequest, context: Any) -> pb.BlocksReply:  # noqa: N802
        return await self._looks.blocks.blocks(request)

    @_reporting
    async def BlockTotals(self, request: pb.BlockTotalsRequest, context: Any) -> pb.BlockTotalsReply:  # noqa: N802
        return await self._looks.totals.totals(request)

    @_reporting
    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainReply:  # noqa: N802
        return await self._looks.explain.explain(request)

    @_reporting
    async def History(self, request: pb.HistoryRequest, context: Any) -> pb.HistoryReply:  # noqa: N802
        return await self._looks.history.history(request)

    @_reporting
    async def Drop(self, request: pb.DropRequest, context: Any) -> pb.DropReply:  # noqa: N802
        return await self._drop.drop(request)

    @_reporting
    async def Invalidate(self, request: pb.InvalidateRequest, context: Any) -> pb.InvalidateReply:  # noqa: N802
        return await self._drop.invalidate(request)

    @_reporting
    async def Quarantine(self, request: pb.QuarantineRequest, context: Any) -> pb.QuarantineReply:  # noqa: N802
        return await self._quarantine.list()

    @_reporting
    async def ReleaseQuarantine(  # noqa: N802
        self, request: pb.ReleaseQuarantineRequest, context: Any
    ) -> pb.ReleaseQuarantineReply:
        return await self._quarantine.release(request)

    @_reporting
    async def Config(self, request: pb.ConfigRequest, context: Any) -> pb.ConfigReply:  # noqa: N802
        return self._looks.settings.settings()

    @_reporting
    async def Reload(self, request: pb.ReloadRequest, context: Any) -> pb.ReloadReply:  # noqa: N802
        return self._reload.reload()

    @_reporting
    async def RenameTenant(  # noqa: N802
        self, request: pb.RenameTenantRequest, context: Any
    ) -> pb.RenameTenantReply:
        return await self._rename.rename(request)

    @_reporting
    async def Flush(self, request: pb.FlushRequest, context: Any) -> pb.FlushReply:  # noqa: N802
        return await self._lifetime.flush(request)

    @_reporting
    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:  # noqa: N802
        return await self._lifetime.drain(request)

    @_reporting
    async def Shutdown(self, request: pb.ShutdownRequest, context: Any) -> pb.ShutdownReply:  # noqa: N802
        return self._lifetime.shutdown(request)
