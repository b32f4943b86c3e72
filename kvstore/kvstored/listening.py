"""The daemon's sockets: the service on each, and who may connect.

It serves the objects that `daemon.py` has made: the gRPC servers and the handshake socket are bound last, when all
parts are there.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from kvstore_proto.v1 import kvstore_pb2_grpc
from kvstored.admin.accounts import add_accounts
from kvstored.admin.block_list import BlockList
from kvstored.admin.block_totals import BlockTotals
from kvstored.admin.drop import OperatorDrop
from kvstored.admin.drop_tenant import DropTenant
from kvstored.admin.explain import Explain
from kvstored.admin.history import history
from kvstored.admin.keep import Keeping
from kvstored.admin.lifetime import Lifetime, Phase
from kvstored.admin.predictor import predictor
from kvstored.admin.quarantine import Quarantine
from kvstored.admin.reload import Reload
from kvstored.admin.rename import RenameTenant
from kvstored.admin.sampler import MetricsSampler
from kvstored.admin.settings import settings
from kvstored.admin.state import state
from kvstored.admin.tenant_settings import TenantSettings
from kvstored.admin.versions import Versions
from kvstored.admin.views import Views
from kvstored.clients.certificates import Certificates
from kvstored.clients.handshake import HandshakeServer
from kvstored.clients.own_sockets import OwnSockets
from kvstored.clients.sessions import ClientSessions
from kvstored.clients.shares import TenantShares
from kvstored.clients.tenants import ourselves
from kvstored.clients.tenants.tokens import Tokens, names_in
from kvstored.clients.weights import WeightVersions
from kvstored.health.integrity import Integrity
from kvstored.health.maintenance import Maintenance
from kvstored.lifetime.notify import listening_socket
from kvstored.rpc.admin import Call, serve_admin
from kvstored.rpc.callers import Callers
from kvstored.rpc.direct_stream import DirectStreams
from kvstored.rpc.grpc_socket import bind_grpc
from kvstored.rpc.health import HealthService
from kvstored.rpc.requests import StreamServices
from kvstored.rpc.session_stream import SessionService
from kvstored.rpc.unary import CallLimit, UnaryListeners, UnaryService
from kvstored.rpc.verbs.inline import InlineCalls
from kvstored.socket_files import SocketFiles, serve_grpc, start_server
from kvstored.sockets import clear_stale, listen_seqpacket, open_to_group, restrict_to_admins
from kvstored.state.saver import StateSaver
from kvstored.store.operations.delete import Delete
from kvstored.store.transfer.resize import TierResize
from kvstored.telemetry import Latencies

NAMES_S = 5.0  # to read saved names in, at the start; less than kvctl waits for an answer


class Services(NamedTuple):
    """The parts of the daemon that serve clients and look after the store. `listen` makes them reachable through
    sockets."""

    phase: Phase
    views: Views
    explain: Explain
    sampler: MetricsSampler
    latencies: Latencies
    maintenance: Maintenance
    integrity: Integrity
    host_resize: TierResize
    delete: Delete
    answering: StreamServices
    streams: DirectStreams
    sessions: ClientSessions
    shares: TenantShares
    handshake: HandshakeServer
    own_sockets: OwnSockets
    state: StateSaver
    weights: WeightVersions


class Control(NamedTuple):
    """The parts of the daemon that change while it serves: the configuration's reload, tokens, certificates, and the
    health service."""

    reload: Reload
    tokens: Tokens | None
    certificates: Certificates | None
    health: HealthService


async def listen(
    services: Services, control: Control, lifetime: Lifetime, files: SocketFiles, stack: AsyncExitStack
) -> None:
    """Bind all sockets of the daemon, and serve `services` and `control` on them until `stack` ends that. `files` binds
    a socket again if its file is removed."""
    handshake, store = services.handshake, services.views.parts.store
    config, limits, group = store.config, store.config.limits, store.config.daemon.socket_group
    names = ("handshake", "admin", "data", *(("unary",) if config.unary.enabled else ()))
    paths = {name: config.daemon.socket_dir / f"{name}.sock" for name in names}
    passed = listening_socket(handshake.path)  # by a .socket unit
    for path in paths.values():
        if passed is None or path != handshake.path:
            clear_stale(path)
    calls = _operators_calls(services, control, lifetime)

    def bind(name: str, connections: int) -> grpc.aio.Server:
        server = bind_grpc(paths[name], max_message_bytes=limits.message_bytes, connections=connections)
        control.health.serve_on(server)
        return server

    def admin() -> grpc.aio.Server:
        serve_admin(calls, server := bind("admin", limits.admin_connections))
        return server

    def data() -> grpc.aio.Server:
        service = SessionService(services.sessions, services.answering)
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(service, server := bind("data", limits.stream_connections))
        return server

    async def bind_handshake() -> None:
        nonlocal passed
        handshake.start(passed or listen_seqpacket(handshake.path, group))
        passed = None  # where its file is removed, the daemon makes one of its own

    await serve_grpc(files, paths["admin"], admin, partial(restrict_to_admins, group=config.daemon.admin_group), stack)
    await serve_grpc(files, paths["data"], data, partial(open_to_group, group=group), stack)
    if config.unary.enabled:
        await _listen_to_unary(services, control, files, paths["unary"], stack)
    if config.metrics.listen:
        from kvstored.admin.metrics_endpoint import serve_metrics  # 40 ms and 3 MB, only where it is asked for

        metrics = serve_metrics(config.metrics, services.views, services.latencies)
        stack.push_async_callback(asyncio.to_thread, metrics.close)
    await files.bind(handshake.path, bind_handshake, stays=passed is not None)
    services.own_sockets.follow(config.tenants, required=True)
    stack.push_async_callback(services.streams.close)
    stack.callback(handshake.close)
    stack.push_async_callback(files.close)


def _operators_calls(services: Services, control: Control, lifetime: Lifetime) -> dict[str, Call]:
    """Return the functions that answer the calls of the Admin service: each takes a request and returns the reply or an
    awaitable of it.
    """
    views, reload, parts = services.views, control.reload, services.views.parts
    store, tenants = parts.store, parts.tenants
    tokens_file = store.config.unary.tokens_in_use
    drop, quarantine, blocks = OperatorDrop(store, tenants), Quarantine(store, tenants), BlockList(views)
    rename = RenameTenant(tenants, store.residency, drop, services.handshake, lambda: names_in(tokens_file))
    drop_tenant = DropTenant(store, tenants, drop, services.handshake, services.state)
    return {
        "Status": lambda _: views.status(),
        "Tiers": lambda _: views.tiers(),
        "Tenants": lambda _: add_accounts(parts, views.tenants()),
        "Blocks": blocks.blocks,
        "BlockTotals": BlockTotals(parts, blocks).totals,
        "Explain": services.explain.explain,
        "History": lambda request: history(request, services.sampler.history, store, reload.config),
        "Drop": partial(_once_named, services.state, drop.drop),
        "Invalidate": partial(_once_named, services.state, drop.invalidate),
        "Quarantine": lambda _: quarantine.list(),
        "ReleaseQuarantine": quarantine.release,
        "Config": lambda _: settings(reload),
        "Reload": lambda _: reload.reload(),
        "RenameTenant": partial(_once_named, services.state, rename.rename),
        "DropTenant": partial(_once_named, services.state, drop_tenant.drop),
        "Flush": lifetime.flush,
        "Drain": lifetime.drain,
        "Shutdown": lifetime.shutdown,
        "Predictor": partial(predictor, store.prefetcher, store.residency),
        "State": partial(state, services.state),
        "SetTenant": TenantSettings(reload, tenants, services.state.orders).set,
        "Keep": Keeping(store, blocks).keep,
        "Versions": partial(_once_named, services.state, Versions(parts, services.weights).versions),
    }


async def _once_named(saver: StateSaver, call: Call, request: Any) -> Any:
    """Answer a call that names tenants or fingerprints once their names are read, or cannot be."""
    with suppress(TimeoutError):
        async with asyncio.timeout(NAMES_S):
            await saver.was_tried.wait()
    return await call(request)


async def _listen_to_unary(
    services: Services, control: Control, files: SocketFiles, path: Path, stack: AsyncExitStack
) -> None:
    store, tenants = services.views.parts.store, services.views.parts.tenants
    config, max_keys = store.config.unary, store.config.limits.max_keys
    verbs = services.answering.verbs
    calls = InlineCalls(verbs, services.delete, store, message_bytes=config.message_bytes)
    limit = CallLimit(config.calls)

    def service(callers: Callers) -> UnaryService:
        pressure = services.answering.pressure
        return UnaryService(calls, callers, services.sessions, services.phase, limit, pressure, max_keys)

    listeners = UnaryListeners(
        config, service, lambda: tenants.resolve(ourselves()), tenants.by_certificate, control.tokens,
        control.certificates, control.health,
    )  # fmt: skip
    await serve_grpc(files, path, partial(listeners.bind_local, path), lambda _path: None, stack)
    if config.listen:
        await start_server(listeners.bind_remote(), stack)
