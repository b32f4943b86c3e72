"""The Admin service: what an operator sees and does. Shows keys and sizes, never token ids or payload."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import grpc

from kvstore_proto.errors import KVStoreError
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc
from kvstored.admin.accounts import Accounts
from kvstored.admin.block_list import BlockList
from kvstored.admin.block_totals import BlockTotals
from kvstored.admin.drop import Drop
from kvstored.admin.explain import Explain
from kvstored.admin.history import HistoryView
from kvstored.admin.lifetime import Lifetime
from kvstored.admin.predictor import PredictorView
from kvstored.admin.quarantine import Quarantine
from kvstored.admin.reload import Reload
from kvstored.admin.rename import RenameTenant
from kvstored.admin.settings import SettingsView
from kvstored.admin.views import Views
from kvstored.rpc.audit import audit

Call = Callable[[Any], Any]
METHODS = frozenset(method.name for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods)


def admin_calls(
    views: Views,
    explain: Explain,
    history: HistoryView,
    drop: Drop,
    rename: RenameTenant,
    lifetime: Lifetime,
    quarantine: Quarantine,
    reload: Reload,
    predictor: PredictorView,
) -> dict[str, Call]:
    """What answers each call, by its name: a request in; out, the reply or an awaitable of it."""
    accounts, blocks, settings = Accounts(views.parts), BlockList(views), SettingsView(reload)
    return {
        "Status": lambda _: views.status(),
        "Tiers": lambda _: views.tiers(),
        "Tenants": lambda _: accounts.add_to(views.tenants()),
        "Blocks": blocks.blocks,
        "BlockTotals": BlockTotals(views.parts, blocks).totals,
        "Explain": explain.explain,
        "History": history.history,
        "Drop": drop.drop,
        "Invalidate": drop.invalidate,
        "Quarantine": lambda _: quarantine.list(),
        "ReleaseQuarantine": quarantine.release,
        "Config": lambda _: settings.settings(),
        "Reload": lambda _: reload.reload(),
        "RenameTenant": rename.rename,
        "Flush": lifetime.flush,
        "Drain": lifetime.drain,
        "Shutdown": lifetime.shutdown,
        "Predictor": predictor.predictor,
    }


def serve_admin(calls: Mapping[str, Call], server: grpc.aio.Server) -> None:
    """Answer each call of the service by `calls`; a KVStoreError becomes the gRPC status of its kind."""
    assert calls.keys() == METHODS, calls.keys() ^ METHODS
    servicer: Any = SimpleNamespace(**{name: _handler(name, call) for name, call in calls.items()})
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)


def _handler(name: str, call: Call) -> Callable[[Any, Any], Any]:
    async def handle(request: Any, context: Any) -> Any:
        try:
            reply = call(request)
            if inspect.isawaitable(reply):
                reply = await reply
            audit(name, request, reply, context.invocation_metadata())
            return reply
        except KVStoreError as error:
            await context.abort(grpc.StatusCode[error.kind.grpc_status], error.message)

    return handle
