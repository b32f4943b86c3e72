"""The daemon: the only file that knows all parts. Puts them together, starts and stops them in order.

Start: directories and lock, storage (storage.py), sockets, ready: no client is served from a half-built state.
Stop: no new clients, everything that was promised durable is written, then the sockets, then the tiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc

from kvstore_proto.v1 import kvstore_pb2_grpc
from kvstore_tiers.heap import trim
from kvstore_tiers.nvme.early_scan import EarlyRecordScan
from kvstore_tiers.nvme.errors import DirectoryError
from kvstored import __version__
from kvstored.admin.drop import Drop
from kvstored.admin.explain import Explain
from kvstored.admin.history import HistoryView
from kvstored.admin.lifetime import Lifetime, State
from kvstored.admin.live_settings import LiveSettings
from kvstored.admin.live_tenants import LiveTenants
from kvstored.admin.predictor import PredictorView
from kvstored.admin.quarantine import Quarantine
from kvstored.admin.reload import Reload
from kvstored.admin.rename import RenameTenant
from kvstored.admin.sampler import Sampler
from kvstored.admin.views import Parts, Views
from kvstored.background import run_until_closed
from kvstored.clients.arena_grants import ArenaGrants
from kvstored.clients.certificates import Certificates
from kvstored.clients.handshake import HandshakeServer
from kvstored.clients.lookup_index import LookupIndexes
from kvstored.clients.reception import Reception
from kvstored.clients.session_factory import SessionFactory
from kvstored.clients.sessions import Session, SessionTable
from kvstored.clients.shares import TenantShares
from kvstored.clients.staging import StagingPool
from kvstored.clients.tenants import ourselves
from kvstored.clients.tenants.tokens import load_tokens
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.config import Config
from kvstored.events.opening import open_events
from kvstored.health.integrity import Integrity
from kvstored.health.maintenance import Maintenance
from kvstored.lifetime.instance import (
    AlreadyRunning,
    FreshDirectories,
    InstanceLock,
    StateDirectoryError,
    make_state_dir,
)
from kvstored.lifetime.notify import notify
from kvstored.lifetime.warm import KeeperError
from kvstored.lifetime.warm.node_memory import NodeMemory
from kvstored.process import end_without_order, since_process_start_s
from kvstored.rpc import unary
from kvstored.rpc.admin import Call, admin_calls, serve_admin
from kvstored.rpc.direct_stream import DirectStreams
from kvstored.rpc.grpc_socket import bind_grpc
from kvstored.rpc.health import Health
from kvstored.rpc.requests import StreamServices
from kvstored.rpc.session_stream import SessionService
from kvstored.rpc.unary_doors import UnaryDoors
from kvstored.rpc.verbs import Verbs
from kvstored.rpc.verbs.delete import DeleteVerb
from kvstored.rpc.verbs.inline import InlineCalls
from kvstored.rpc.verbs.recorded import recorded
from kvstored.socket_files import SocketFiles
from kvstored.sockets import (
    SocketError,
    clear_stale,
    listen_seqpacket,
    open_to_group,
    prepare_directory,
    restrict_to_admins,
)
from kvstored.storage import NodeStorage
from kvstored.store.degraded.memory import MemoryWatch
from kvstored.store.operations import Operations
from kvstored.store.operations.put import Put
from kvstored.store.transfer.resize import HostSizer, SlabsBack, TierResize
from kvstored.telemetry import DeletionLog, Latencies, RecentMisses

if TYPE_CHECKING:
    from kvstore_tiers.nvme.tier import NvmeTier

log = logging.getLogger(__name__)
audit_log = logging.getLogger("kvstored.audit")
STOP_GRACE_S = 10.0
STOP_LIMIT_S = 25.0  # on a disk that hangs no stop ends by itself; less than TimeoutStopSec in deploy/systemd
_LEAVING_S = 86_400.0  # for the calls of a server whose socket file was removed
INDEX_SHARE = 16  # this fraction of the memory for staging is for lookup indexes


class StartupError(Exception):
    """The daemon cannot start; the message says why and what to do."""


class Daemon:
    """One running daemon. `on_shutdown` is called when an operator asks it to stop."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        on_shutdown: Callable[[], None],
        read: Callable[[], Config],
        early_scan: EarlyRecordScan | None = None,
        *,
        new_secret: bool = False,
    ) -> None:
        self.config = config
        self._early_scan = early_scan
        self._clock = clock
        self._on_shutdown = on_shutdown
        self._read = read
        self._stack = contextlib.AsyncExitStack()
        self._servers: dict[Path, grpc.aio.Server] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._ready_after_s = 0.0
        self._has_served = False
        self._fresh = FreshDirectories()
        self.memory = NodeMemory(config)
        self._storage = NodeStorage(config, clock, self.memory, self._stack, new_secret=new_secret)
        self.lifetime: Lifetime | None = None
        self.asked_by = "kvctl"  # to stop

    async def start(self) -> None:
        """Everything up to serving. Raises StartupError, leaving nothing behind."""
        try:
            await self._start()
        except (SocketError, DirectoryError, AlreadyRunning, StateDirectoryError, KeeperError, ValueError) as error:
            raise StartupError(str(error)) from None
        except OSError as error:
            raise StartupError(f"{error.strerror or error}: {error.filename or 'while starting'}") from None

    async def _start(self) -> None:
        config = self.config
        self._fresh = FreshDirectories(config.daemon.socket_dir, config.daemon.state_dir, config.nvme.path)
        prepare_directory(config.daemon.socket_dir, config.daemon.socket_group)
        make_state_dir(config.daemon.state_dir)
        lock = InstanceLock(config.daemon.state_dir)
        self._stack.callback(lock.release)
        self._build()
        await self._listen()
        self._start_tasks()
        assert self.lifetime is not None
        self.lifetime.state = State.SERVING
        self._has_served = True
        gc.freeze()  # what start-up made lives as long as the daemon: collections need not walk it
        gc.enable()  # `kvstored serve` begins without
        self._ready_after_s = since_process_start_s()
        notify("READY=1", f"STATUS=serving {len(self._store.residency)} blocks on {config.daemon.socket_dir}")
        log.info(
            "kvstored %s serves on %s: %d blocks, ready after %.2f s",
            __version__, config.daemon.socket_dir, len(self._store.residency), self._ready_after_s,
        )  # fmt: skip
        trim()  # a start with many blocks needs much memory once

    async def stop(self) -> None:
        """Flush, then take everything down in the reverse order of its making. Idempotent. What hangs in the kernel
        cannot be waited for: after `STOP_LIMIT_S` the process ends as in a crash, which the next start is made for."""
        notify("STOPPING=1")
        limit = threading.Timer(STOP_LIMIT_S, end_without_order, (STOP_LIMIT_S,))
        limit.daemon = True
        limit.start()
        try:
            if self.lifetime is not None:
                if self._has_served:
                    blocks = len(self._store.residency)
                    audit_log.info(
                        "stopping, as %s asked, with %d blocks: %s", self.asked_by, blocks, self.memory.after_stop()
                    )
                self.lifetime.state = State.STOPPING
                self._handshake.accepting = False
                if self._store.writeback is not None:  # while clients that wait for that answer are connected
                    await self._store.writeback.flush(STOP_GRACE_S)
            await self._stack.aclose()
        finally:
            limit.cancel()
        if not self._has_served:
            self._fresh.remove()

    async def _settle(self, put: Put) -> None:
        """No client is connected any more: end pending puts, write what waits, leave no transfer in flight."""
        await put.finish()
        if self._store.writeback is not None:
            left = await self._store.writeback.flush(STOP_GRACE_S)
            if left:
                log.warning("%d blocks could not be written in time; they were never called durable", left)
        self._store.mover.close()
        self._store.reservations.close()
        for room in self._store.rooms:
            await room.settle(STOP_GRACE_S)
        await self._completions.drained()

    # Putting the parts together

    def _build(self) -> None:
        self._completions = CompletionQueue(asyncio.get_running_loop())
        early_scan, self._early_scan = self._early_scan, None
        storage = self._storage
        storage.open(self._completions, early_scan, lambda: self._has_served)
        self._tenants, self._store, self._former = storage.tenants, storage.store, storage.former
        self._sessions = SessionTable(self.memory.last_session_id)
        self._make_services()

    def _make_views(self) -> None:
        store, self._parts = self._store, self._make_parts()
        self._views = Views(
            self._parts,
            lambda: self._state(),
            lambda: self._ready_after_s,
            lambda: self._maintenance.prefaulted,
            lambda: self._integrity.report,
        )
        self._explain = Explain(self._views, store.host, self._misses, store.promoter.estimate_us)

    def _make_services(self) -> None:
        config, clock, store = self.config, self._clock, self._store
        limits, residency = config.limits, store.residency
        self._misses = RecentMisses(limits.misses_per_tenant, clock)
        deletions = DeletionLog(clock)
        self._stack.callback(deletions.close)
        operations = Operations(store, deletions)
        self._stack.push_async_callback(self._settle, operations.put)
        self._make_views()
        self._deleting = DeleteVerb(operations.delete, max_keys=limits.max_keys)
        self._verbs = Verbs(store, operations, self._misses, self._deleting, self._explain.own)
        if config.daemon.record is not None:
            self._verbs = recorded(self._verbs, config.daemon.record, clock, self._stack)
        self._integrity = Integrity(store, self._is_idle, self._storage.unsaved)
        self._latencies = Latencies()
        self._answering = StreamServices(self._verbs, limits.inflight_per_client, self._latencies, clock)
        self._streams = DirectStreams(self._answering, limits.message_bytes)
        self._sampler = Sampler(self._parts, self._latencies)
        sizer = self._host_sizer()
        self._host_resize = TierResize(store.host.info.name, store.host, store.room, sizer.give_back)
        self._stack.push_async_callback(self._host_resize.close)
        daemon = config.daemon
        self._socket_files = SocketFiles(
            partial(prepare_directory, daemon.socket_dir, daemon.socket_group), time.monotonic
        )
        self._maintenance = Maintenance(
            store.leases, store.policies, store.rooms, store.host, clock, store.counters, self._sampler.sample,
            (store.tick, sizer.tick, deletions.tick, self._socket_files.tick),
        )  # fmt: skip

        def end_session(session: Session) -> None:
            self._verbs.left(session)
            if self._former is None or self.memory.is_forgotten or self._state() != State.STOPPING.value:
                store.leases.release_session(session.session_id)
                if self._former is not None:
                    self._former.left(session)  # else it may come back to the next process, for its leases

        index_bytes = config.host.staging_bytes // INDEX_SHARE if config.index.slots else 0
        indexes = LookupIndexes(config.index.slots, index_bytes, residency, asyncio.get_running_loop().call_soon)
        residency.observe(indexes)
        open_events(config.events, config.daemon.state_dir, self._tenants, store, self._stack)
        self._shares = TenantShares(self._tenants, residency, store.policies)
        self._shares.set_all()
        staging = StagingPool(config.host.staging_bytes - index_bytes, limits.staging_per_client_bytes)
        self._factory = SessionFactory(self._sessions, self._tenants, residency, self._shares, staging)
        reception = Reception(
            config, self._factory, ArenaGrants(store.host, config, store.exporter_of), indexes, self._streams,
            store.counters, end_session, store.tiers_on, self._former,
        )  # fmt: skip
        self._handshake = HandshakeServer(config.daemon.socket_dir / "handshake.sock", reception, limits)
        self.lifetime = Lifetime(
            self._handshake, self._sessions, store.leases, residency, store.writeback, self._on_shutdown,
            self.memory.after_stop,
        )  # fmt: skip

    def _host_sizer(self) -> HostSizer:
        store, host = self._store, self.config.host
        sizer = HostSizer(
            store.host, store.room, MemoryWatch().read, store.modes, self._clock, store.counters,
            min_free_bytes=host.min_free_bytes, arena_bytes=host.arena_bytes,
        )  # fmt: skip
        self._stack.push_async_callback(sizer.close)
        return sizer

    # Listening

    async def _listen(self) -> None:
        assert self.lifetime is not None
        store, config = self._store, self.config
        sockets, group = config.daemon.socket_dir, config.daemon.socket_group
        binds = {"admin": self._bind_admin, "data": self._bind_data, "unary": self._bind_unary}
        if not config.unary.enabled:
            del binds["unary"]
        for name in ("handshake", *binds):
            clear_stale(sockets / f"{name}.sock")
        self._calls = self._admin_calls()
        services = (unary.SERVICE, "kvstore.v1.KVStore", "kvstore.v1.Admin")
        self._health = Health(self.lifetime, services, store.modes, store.residency.tiers)
        self._doors = self._unary_doors()
        for name, bind in binds.items():
            path = sockets / f"{name}.sock"
            await self._socket_files.bind(path, partial(bind, path))
        if config.unary.enabled and config.unary.listen:
            await self._start_server(self._doors.bind_remote())
        if config.metrics.listen:
            from kvstored.admin.metrics_endpoint import MetricsEndpoint  # 40 ms and 3 MB, only where it is asked for

            metrics = MetricsEndpoint(config.metrics, self._views, store.flows, self._latencies)
            self._stack.push_async_callback(asyncio.to_thread, metrics.close)

        async def bind_handshake() -> None:
            self._handshake.start(listen_seqpacket(self._handshake.path, group))

        await self._socket_files.bind(self._handshake.path, bind_handshake)
        self._stack.push_async_callback(self._streams.close)
        self._stack.callback(self._handshake.close)
        self._stack.push_async_callback(self._socket_files.close)

    async def _bind_admin(self, path: Path) -> None:
        limits = self.config.limits
        server = bind_grpc(path, max_message_bytes=limits.message_bytes, connections=limits.admin_connections)
        serve_admin(self._calls, server)
        self._health.serve_on(server)
        await self._start_server(server, path)
        restrict_to_admins(path, self.config.daemon.admin_group)

    async def _bind_data(self, path: Path) -> None:
        limits = self.config.limits
        server = bind_grpc(path, max_message_bytes=limits.message_bytes, connections=limits.stream_connections)
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(SessionService(self._sessions, self._answering), server)
        self._health.serve_on(server)
        await self._start_server(server, path)
        open_to_group(path, self.config.daemon.socket_group)

    async def _bind_unary(self, path: Path) -> None:
        await self._start_server(self._doors.bind_local(path), path)

    async def _start_server(self, server: grpc.aio.Server, path: Path | None = None) -> None:
        """Start a bound server. The one that had `path` before takes nothing new, and ends with its last call."""
        self._stack.push_async_callback(server.stop, 0.5)
        await server.start()
        if path is not None:
            former = self._servers.get(path)
            self._servers[path] = server
            if former is not None:
                self._leaving.add(leaving := asyncio.create_task(former.stop(_LEAVING_S)))
                leaving.add_done_callback(self._leaving.discard)

    def _admin_calls(self) -> dict[str, Call]:
        assert self.lifetime is not None
        store, tenants = self._store, self._tenants
        reload = self.reload = self._make_reload()
        history = HistoryView(self._sampler.history, store.flows, lambda: reload.config, self._clock)
        drop = Drop(store.residency, tenants, store.writeback, store.discard, self._clock, store.sync_keyed)
        rename = RenameTenant(tenants, store.residency, drop, self._handshake, self._storage.with_tokens)
        quarantine = Quarantine(
            store.nvme, store.residency, tenants, self.config.nvme.quarantine_slots,
            store.writeback.sync if store.writeback is not None else None,
        )  # fmt: skip
        predictor = PredictorView(store.prefetcher, store.residency)
        return admin_calls(
            self._views, self._explain, history, drop, rename, self.lifetime, quarantine, reload, predictor
        )

    def _make_reload(self) -> Reload:
        store, tokens_file = self._store, self.config.unary.tokens_in_use
        resizes = {store.host.info.name: self._host_resize}
        self._tokens = None
        if tokens_file is not None:
            self._tokens = load_tokens(tokens_file, self._tenants.named, self._tenants.is_named)
        if store.nvme is not None:
            nvme = cast("NvmeTier", store.nvme)
            name, slabs = nvme.info.name, SlabsBack(nvme, self._completions)
            resizes[name] = TierResize(name, nvme, store.rooms[store.residency.durable], slabs.give_back)
            self._stack.push_async_callback(resizes[name].close)
        tenants = LiveTenants(self._tenants, store.residency, self._shares, self._handshake, self._tokens)
        self._certificates = Certificates.of(self.config.unary) if self.config.unary.enabled else None
        return Reload(self.config, self._read, LiveSettings(store, resizes, tenants, self._certificates))

    def _unary_doors(self) -> UnaryDoors:
        lifetime, config = self.lifetime, self.config
        assert lifetime is not None
        calls = InlineCalls(self._verbs, self._deleting, self._store, message_bytes=config.unary.message_bytes)
        limit = unary.CallLimit(config.unary.calls)
        return UnaryDoors(
            config.unary,
            lambda callers: unary.UnaryService(
                calls, callers, self._factory, lifetime, limit, config.limits.max_keys
            ),
            lambda: self._tenants.resolve(ourselves()),
            self._tokens, self._certificates, self._health,
        )  # fmt: skip

    def _start_tasks(self) -> None:
        runs = {"maintenance": self._maintenance.run, "names": self._tenants.run, "usage": self._storage.usage.run}
        if (warm := self.memory.warm) is not None:
            runs["warm restart"] = warm.run
        if self.config.host.prefault:
            runs["prefault"] = lambda: self._maintenance.prefault(lambda: self._state() != State.STOPPING.value)
        for name, run in (runs | self._integrity.tasks()).items():
            run_until_closed(name, run, self._stack)

    # Small connections between parts

    def _make_parts(self) -> Parts:
        store = self._store
        paths = [section.place for section in self.config.tiers]
        return Parts(
            self.config, self._clock, store.residency, store.tiers, store.policies, paths, self._sessions,
            store.leases, self._tenants, store.mover, store.writeback, store.counters, store.flows, store.modes,
            store.endurance, self._storage.unsaved,
        )  # fmt: skip

    def _is_idle(self) -> bool:
        """Whether nothing moves: then the daemon looks after itself."""
        return not self._completions.outstanding and self._state() == State.SERVING.value

    def _state(self) -> str:
        return self.lifetime.state.value if self.lifetime is not None else State.STARTING.value
