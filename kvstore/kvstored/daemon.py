"""The daemon: the only file that knows all parts. Puts them together, starts and stops them in order.

Start: directories and lock, tiers and recovery, then sockets, then ready: nobody is served from a half-built state.
Stop: no new clients, everything that was promised durable is written, then the sockets, then the tiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc

from kvstore_proto.state_identity import read_ownership
from kvstore_proto.v1 import admin_pb2_grpc, kvstore_pb2_grpc
from kvstore_tiers.base import Tier
from kvstore_tiers.heap import trim
from kvstore_tiers.nvme.directory import TierDirectory, make_directory
from kvstore_tiers.nvme.errors import DirectoryError
from kvstore_tiers.nvme.judging_ahead import JudgingAhead
from kvstored import __version__
from kvstored.admin.accounts import Accounts
from kvstored.admin.block_list import BlockList
from kvstored.admin.block_totals import BlockTotals
from kvstored.admin.drop import Drop
from kvstored.admin.explain import Explain
from kvstored.admin.history import HistoryView
from kvstored.admin.lifetime import Lifetime, State
from kvstored.admin.live_settings import LiveSettings
from kvstored.admin.live_tenants import LiveTenants
from kvstored.admin.quarantine import Quarantine
from kvstored.admin.reload import Reload
from kvstored.admin.rename import RenameTenant
from kvstored.admin.sampling import Sampler
from kvstored.admin.settings import SettingsView
from kvstored.admin.views import Parts, Views
from kvstored.clients.arena_grants import ArenaGrants
from kvstored.clients.handshake import HandshakeServer
from kvstored.clients.lookup_index import LookupIndexes
from kvstored.clients.reception import Reception
from kvstored.clients.session_factory import SessionFactory
from kvstored.clients.sessions import Session, SessionTable
from kvstored.clients.shares import TenantShares
from kvstored.clients.staging import StagingPool
from kvstored.clients.tenants import Peer, TenantDirectory
from kvstored.clients.tenants.keyring import Keyring
from kvstored.clients.tenants.reach import follow_users
from kvstored.clients.tenants.tokens import load_tokens, names_in
from kvstored.clock import Clock, SystemClock
from kvstored.completions import CompletionQueue
from kvstored.config import Config
from kvstored.config.tiers import Start
from kvstored.health.integrity import Integrity
from kvstored.health.maintenance import Maintenance
from kvstored.lifetime.fresh_directories import FreshDirectories
from kvstored.lifetime.instance import AlreadyRunning, InstanceLock, who_else_can_change
from kvstored.lifetime.notify import notify
from kvstored.lifetime.recovery import drop_blocks, recover_blocks
from kvstored.lifetime.usage_file import UsageFile
from kvstored.lifetime.warm import KeeperError
from kvstored.lifetime.warm.node_memory import NodeMemory
from kvstored.process import end_without_order, raise_descriptor_limit, set_priority, since_process_start_s
from kvstored.rpc import unary
from kvstored.rpc.admin import AdminService, Looks
from kvstored.rpc.direct_stream import DirectStreams
from kvstored.rpc.health import Health
from kvstored.rpc.requests import Answering
from kvstored.rpc.serving import bind_grpc, private_umask
from kvstored.rpc.session_stream import SessionService
from kvstored.rpc.unary_doors import UnaryDoors
from kvstored.rpc.verbs import Verbs
from kvstored.rpc.verbs.assembly import make_verbs
from kvstored.rpc.verbs.delete import Deleting
from kvstored.rpc.verbs.inline import InlineCalls
from kvstored.sockets import (
    SocketError,
    clear_stale,
    listen_seqpacket,
    open_to_group,
    prepare_directory,
    restrict_to_admins,
)
from kvstored.store.assembly import Store, make_residency
from kvstored.store.blocks import Residency
from kvstored.store.degraded.memory import MemoryWatch
from kvstored.store.operations import Operations
from kvstored.store.operations.put import Put
from kvstored.store.tiering import MAPPED
from kvstored.store.transfer.pressure import HostSizer
from kvstored.store.transfer.resize import SlabsBack, TierResize
from kvstored.telemetry import DeletionLog, Latencies, RecentMisses

if TYPE_CHECKING:
    from kvstore_tiers.nvme.tier import NvmeTier

log = logging.getLogger(__name__)
audit_log = logging.getLogger("kvstored.audit")
# No thread of ours computes for long with the GIL held, so a short interval wins nothing and costs the control thread
# the GIL in the middle of a request: with 0.5 ms lookups beside two clients at full load took half as long again.
SWITCH_INTERVAL_S = 0.005
STOP_GRACE_S = 10.0
STOP_LIMIT_S = 25.0  # on a disk that hangs no stop ends by itself; less than TimeoutStopSec in deploy/systemd
INDEX_SHARE = 16  # one part in so many of what is set aside for staging is for lookup indexes


class StartupError(Exception):
    """The daemon cannot start; the message says why and what to do."""


def run(
    config: Config, read: Callable[[], Config], ahead: JudgingAhead | None = None, *, new_secret: bool = False
) -> int:
    """Serve until SIGTERM, SIGINT or a shutdown request, with what was judged `ahead` of NVMe. `new_secret`: blocks
    that the secret does not reach are dropped, not a reason to refuse. Raises StartupError, ConfigError."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # token ids in memory
    raise_descriptor_limit()
    set_priority(config.daemon.nice)
    return asyncio.run(_serve(config, read, ahead, new_secret))


async def _serve(config: Config, read: Callable[[], Config], ahead: JudgingAhead | None, new_secret: bool) -> int:
    stop_wanted = asyncio.Event()
    loop = asyncio.get_running_loop()
    daemon = Daemon(config, SystemClock(), stop_wanted.set, read, ahead, new_secret=new_secret)

    def interrupted() -> None:
        """By somebody at a terminal, who wants the memory back; a service manager sends SIGTERM."""
        daemon.memory.is_forgotten = True
        daemon.asked_by = "SIGINT"
        stop_wanted.set()

    def terminated() -> None:
        daemon.asked_by = "SIGTERM"
        stop_wanted.set()

    loop.add_signal_handler(signal.SIGTERM, terminated)
    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        await daemon.start()
        loop.add_signal_handler(signal.SIGHUP, daemon.reload.on_signal)
        await stop_wanted.wait()
    finally:
        await daemon.stop()
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_IGN)  # it has stopped in order, and its exit status is to say so
    return 0


class Daemon:
    """One running daemon. `on_shutdown` is called when an operator asks it to stop."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        on_shutdown: Callable[[], None],
        read: Callable[[], Config],
        ahead: JudgingAhead | None = None,
        *,
        new_secret: bool = False,
    ) -> None:
        self.config = config
        self._new_secret = new_secret
        self._ahead = ahead
        self._clock = clock
        self._on_shutdown = on_shutdown
        self._read = read
        self._stack = contextlib.AsyncExitStack()
        self._ready_after_s = 0.0
        self._has_served = False
        self._fresh = FreshDirectories()
        self.memory = NodeMemory(config)
        self.lifetime: Lifetime | None = None
        self.asked_by = "kvctl"  # to stop

    async def start(self) -> None:
        """Everything up to serving. Raises StartupError, leaving nothing behind."""
        try:
            await self._start()
        except (SocketError, DirectoryError, AlreadyRunning, KeeperError, ValueError) as error:
            raise StartupError(str(error)) from None
        except OSError as error:
            raise StartupError(f"{error.strerror or error}: {error.filename or 'while starting'}") from None

    async def _start(self) -> None:
        config = self.config
        self._fresh = FreshDirectories(config.daemon.socket_dir, config.daemon.state_dir, config.nvme.path)
        prepare_directory(config.daemon.socket_dir, config.daemon.socket_group)
        _make_state_dir(config.daemon.state_dir)
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
                if self._store.writeback is not None:  # while clients who wait for that word can still hear it
                    await self._store.writeback.flush(STOP_GRACE_S)
            await self._stack.aclose()
        finally:
            limit.cancel()
        if not self._has_served:
            self._fresh.remove()

    async def _settle(self, put: Put) -> None:
        """Nobody asks any more: end what is under way, write what waits, leave no transfer in flight."""
        await put.finish()
        if self._store.writeback is not None:
            left = await self._store.writeback.flush(STOP_GRACE_S)
            if left:
                log.warning("%d blocks could not be written in time; they were never called durable", left)
        self._store.mover.close()
        for room in self._store.rooms:
            await room.settle(STOP_GRACE_S)
        await self._completions.drained()

    # Putting the parts together

    def _build(self) -> None:
        config = self.config
        self._completions = CompletionQueue(asyncio.get_running_loop())
        keyring = self._open_keyring()
        self._tenants = TenantDirectory(config.daemon.state_dir, config.tenants, config.tenant_default, keyring)
        self._stack.callback(self._tenants.close)
        memory = self.memory
        self._stack.callback(lambda: memory.close(has_served=self._has_served))
        tiers = self._open_tiers(memory.open(forget=keyring.dram_is_lost))
        residency = make_residency(config, tiers)
        self._sessions = SessionTable(memory.last_session_id)
        if residency.durable >= 0:
            self._recover(tiers[residency.durable], residency, forget=keyring.nvme_is_lost)
        keyring.settle()  # with what `TenantDirectory` claimed
        memory.adopt(residency, self._tenants, self._clock)
        usage = self._usage = UsageFile(config.daemon.state_dir, residency, self._clock)
        durable = tiers[residency.durable] if residency.durable >= 0 else None
        usage.restore({tenant.index_name for tenant in self._tenants.all()}, durable)
        self._store = Store(config, self._clock, self._completions, residency, tiers)
        self._former = memory.restore_clients(self._store, self._clock)
        if self._former is not None:
            self._stack.callback(self._former.close)
        usage.follow(self._store.policies, self._store.counters)
        self._stack.push_async_callback(usage.save)
        self._stack.push_async_callback(self._store.endurance.close)
        follow_users(self._tenants, residency, self._with_tokens())
        self._make_services()

    def _open_keyring(self) -> Keyring:
        nvme, state_dir = self.config.nvme, self.config.daemon.state_dir
        nvme_dir = nvme.path if nvme.enabled else None
        if nvme_dir is not None and nvme_dir.is_dir() and read_ownership(state_dir, nvme_dir).problem:
            TierDirectory(nvme_dir, create=False).close()  # that another daemon has it is the better reason
        return Keyring(state_dir, nvme_dir, new_secret=self._new_secret)

    def _open_tiers(self, mapped: Tier) -> list[Tier]:
        """All tiers, fastest first; `mapped` is open."""
        tiers, start = [mapped], Start(ahead=self._ahead)
        for section in self.config.tiers[len(tiers) :]:
            tiers.append(section.open(start))
            self._stack.callback(tiers[-1].close)
        self._ahead = None
        return tiers

    def _recover(self, tier: Tier, residency: Residency, *, forget: bool) -> None:
        if forget:
            drop_blocks(tier)
        recovered = 0 if forget else recover_blocks(tier, residency, self._tenants, self._clock)
        if recovered:
            log.info("%d blocks found on NVMe", recovered)

    def _make_views(self) -> None:
        parts, store = self._parts(), self._store
        self._views = Views(
            parts,
            lambda: self._state(),
            lambda: self._ready_after_s,
            lambda: self._maintenance.prefaulted,
            lambda: self._integrity.report,
        )
        self._explain = Explain(parts, self._views, store.host, self._misses, store.promoter.estimate_us)

    def _make_services(self) -> None:
        config, clock, store = self.config, self._clock, self._store
        limits, residency = config.limits, store.residency
        self._misses = RecentMisses(limits.misses_per_tenant, clock)
        deletions = DeletionLog(clock)
        self._stack.callback(deletions.close)
        operations = Operations(store, deletions)
        self._stack.push_async_callback(self._settle, operations.put)
        self._make_views()
        self._deleting = Deleting(operations.delete, max_keys=limits.max_keys)
        self._verbs = self._recorded(make_verbs(store, operations, self._misses, self._deleting, self._explain.own))
        self._integrity = Integrity(store, self._is_idle)
        self._latencies = Latencies()
        self._answering = Answering(self._verbs, limits.inflight_per_client, self._latencies, clock)
        self._streams = DirectStreams(self._answering, limits.message_bytes)
        self._sampler = Sampler(self._parts(), self._latencies)
        sizer = self._host_sizer()
        self._host_resize = TierResize(store.host.info.name, store.host, store.rooms[MAPPED], sizer.give_back)
        self._stack.push_async_callback(self._host_resize.close)
        self._maintenance = Maintenance(
            store.leases, store.policies, store.rooms, store.host, clock, store.counters, self._sampler.sample,
            (store.tick, sizer.tick, deletions.tick),
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
        self._shares = TenantShares(self._tenants, residency, store.policies)
        self._shares.set_all()
        staging = StagingPool(config.host.staging_bytes - index_bytes, limits.staging_per_client_bytes)
        self._factory = SessionFactory(self._sessions, self._tenants, residency, self._shares, staging)
        reception = Reception(
            config, self._factory, ArenaGrants(store.host, config), indexes, self._streams, store.counters,
            end_session, self._former,
        )  # fmt: skip
        self._handshake = HandshakeServer(config.daemon.socket_dir / "handshake.sock", reception, limits.max_clients)
        self.lifetime = Lifetime(
            self._handshake, self._sessions, store.leases, residency, store.writeback, self._on_shutdown,
            self.memory.after_stop,
        )  # fmt: skip

    def _recorded(self, verbs: Verbs) -> Verbs:
        """`verbs`, with a recorder listening where the configuration asks for one."""
        if self.config.daemon.record is None:
            return verbs
        from kvstored.rpc.verbs.recorded import RecordedVerbs
        from kvstored.telemetry.recorder import Recorder

        recorder = Recorder(self.config.daemon.record, self._clock.monotonic_ns())
        self._stack.callback(recorder.close)
        return RecordedVerbs(verbs, recorder, self._clock)

    def _host_sizer(self) -> HostSizer:
        store, host = self._store, self.config.host
        sizer = HostSizer(
            store.host, store.rooms[MAPPED], MemoryWatch().read, store.modes, self._clock, store.counters,
            min_free_bytes=host.min_free_bytes, arena_bytes=host.arena_bytes,
        )  # fmt: skip
        self._stack.push_async_callback(sizer.close)
        return sizer

    # Listening

    async def _listen(self) -> None:
        assert self.lifetime is not None
        store, sockets = self._store, self.config.daemon.socket_dir
        names = ["handshake", "data", "admin"] + (["unary"] if self.config.unary.enabled else [])
        paths = {name: sockets / f"{name}.sock" for name in names}
        for path in paths.values():
            clear_stale(path)
        drop = Drop(store.residency, self._tenants, store.writeback, store.retire, self._clock)
        rename = RenameTenant(self._tenants, store.residency, drop, self._handshake, self._with_tokens)
        admin = await self._serve_grpc(paths["admin"])
        quarantine = Quarantine(
            store.nvme, store.residency, self._tenants, self.config.nvme.quarantine_slots,
            store.writeback.sync if store.writeback is not None else None,
        )  # fmt: skip
        reload = self.reload = self._make_reload()
        parts = self._parts()
        blocks = BlockList(parts, self._views)
        looks = Looks(
            self._views, Accounts(parts), blocks, BlockTotals(parts, blocks),
            self._explain,
            HistoryView(self._sampler.history, store.flows, lambda: reload.config, self._clock),
            SettingsView(reload),
        )  # fmt: skip
        admin_pb2_grpc.add_AdminServicer_to_server(
            AdminService(looks, drop, rename, self.lifetime, quarantine, self.reload), admin
        )
        data = await self._serve_grpc(paths["data"])
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(SessionService(self._sessions, self._answering), data)
        services = (unary.SERVICE, "kvstore.v1.KVStore", "kvstore.v1.Admin")
        health = Health(self.lifetime, services, store.modes, store.residency.tiers)
        health.serve_on(admin)
        health.serve_on(data)
        await admin.start()
        restrict_to_admins(paths["admin"], self.config.daemon.admin_group)
        await data.start()
        open_to_group(paths["data"], self.config.daemon.socket_group)
        if self.config.unary.enabled:
            await self._listen_unary(paths["unary"], health)
        if self.config.metrics.listen:
            self._listen_metrics(self.config.metrics.listen)
        self._handshake.start(listen_seqpacket(paths["handshake"], self.config.daemon.socket_group))
        self._stack.push_async_callback(self._streams.close)
        self._stack.callback(self._handshake.close)
        for path in paths.values():
            self._stack.callback(path.unlink, missing_ok=True)

    def _listen_metrics(self, address: str) -> None:
        from kvstored.admin.metrics import Snapshot  # 40 ms and 3 MB that only who scrapes needs
        from kvstored.admin.metrics_endpoint import MetricsEndpoint

        views, flows = self._views, self._store.flows

        def take() -> Snapshot:
            misses = {cause.name.lower(): blocks for cause, blocks in flows.misses.items()}
            return Snapshot(views.status(), views.tiers(), views.tenants(), misses, self._latencies.snapshot())

        host, port = address.rsplit(":", 1)
        try:
            endpoint = MetricsEndpoint(host, int(port), take)
        except OSError as error:
            raise StartupError(f"cannot listen on metrics.listen {address}: {error.strerror or error}") from None
        self._stack.callback(endpoint.close)

    def _make_reload(self) -> Reload:
        store, tokens_file = self._store, self.config.unary.tokens_in_use
        resizes = {store.host.info.name: self._host_resize}
        self._tokens = None
        if tokens_file is not None:
            self._tokens = load_tokens(tokens_file, self._tenants.named)
        if store.nvme is not None:
            nvme = cast("NvmeTier", store.nvme)
            name, slabs = nvme.info.name, SlabsBack(nvme, self._completions)
            resizes[name] = TierResize(name, nvme, store.rooms[store.residency.durable], slabs.give_back)
            self._stack.push_async_callback(resizes[name].close)
        tenants = LiveTenants(self._tenants, store.residency, self._shares, self._handshake, self._tokens)
        return Reload(self.config, self._read, LiveSettings(store, resizes, tenants))

    async def _listen_unary(self, path: Path, health: Health) -> None:
        lifetime, config, store = self.lifetime, self.config, self._store
        assert lifetime is not None
        calls = InlineCalls(
            self._verbs, self._deleting, store.residency, store.host, self._completions, store.counters,
            message_bytes=config.unary.message_bytes, max_block_bytes=config.limits.max_block_bytes,
        )  # fmt: skip
        limit = unary.CallLimit(config.unary.calls)
        doors = UnaryDoors(
            config.unary, path,
            lambda callers: unary.UnaryService(
                calls, callers, self._factory, lifetime, limit, config.limits.max_keys
            ),
            lambda: self._tenants.resolve(Peer(os.getpid(), os.geteuid(), os.getegid())),
            self._tokens, health,
        )  # fmt: skip
        with private_umask():
            servers = doors.bind()
        for server in servers:
            self._stack.push_async_callback(server.stop, 0.5)
            await server.start()

    async def _serve_grpc(self, path: Path) -> grpc.aio.Server:
        server = bind_grpc(path, max_message_bytes=self.config.limits.message_bytes)
        self._stack.push_async_callback(server.stop, 0.5)
        return server

    def _start_tasks(self) -> None:
        tasks = [asyncio.create_task(self._maintenance.run(), name="maintenance")]
        tasks.append(asyncio.create_task(self._tenants.run(), name="names"))
        if (warm := self.memory.warm) is not None:
            tasks.append(asyncio.create_task(warm.run(), name="warm restart"))
        tasks.append(asyncio.create_task(self._usage.run(), name="usage"))
        if self.config.host.prefault:
            wanted = lambda: self._state() != State.STOPPING.value  # noqa: E731
            tasks.append(asyncio.create_task(self._maintenance.prefault(wanted), name="prefault"))
        tasks += [asyncio.create_task(run(), name=name) for name, run in self._integrity.tasks().items()]
        for task in tasks:
            task.add_done_callback(_report_failure)
            self._stack.push_async_callback(_cancel, task)

    # Small connections between parts

    def _parts(self) -> Parts:
        store = self._store
        paths = [section.place for section in self.config.tiers]
        return Parts(
            self.config, self._clock, store.residency, store.tiers, store.policies, paths, self._sessions,
            store.leases, self._tenants, store.mover, store.writeback, store.counters, store.flows, store.modes,
            store.endurance,
        )  # fmt: skip

    def _with_tokens(self) -> frozenset[str]:
        return names_in(self.config.unary.tokens_in_use)

    def _is_idle(self) -> bool:
        """Whether nothing moves: then the daemon looks after itself."""
        return not self._completions.outstanding and self._state() == State.SERVING.value

    def _state(self) -> str:
        return self.lifetime.state.value if self.lifetime is not None else State.STARTING.value


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s ended", task.get_name(), exc_info=task.exception())


def _make_state_dir(path: Path) -> None:
    try:
        make_directory(path)
    except OSError as error:
        raise StartupError(
            f"cannot make state directory {path}: {error.strerror}; set daemon.state_dir to a writable place"
        ) from None
    if (others := who_else_can_change(path)) is not None:
        raise StartupError(f"state directory {path} {others}: with the secret in it, blocks and keys are theirs")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StartupError(f"state directory {path} is not writable by uid {os.geteuid()}")
