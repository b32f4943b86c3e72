"""The daemon: this file alone knows all parts. It puts them together, and starts and stops them in order.

Start: directories and lock, storage, services, sockets, ready: no client is served from a half-built state. Stop: no
new clients, promised durable writes, then the sockets, then the tiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import cast

from kvstore_tiers.heap import trim
from kvstore_tiers.nvme.directory_files import DirectoryError
from kvstore_tiers.nvme.early_scan import EarlyRecordScan
from kvstore_tiers.nvme.slab_file import discard_older
from kvstore_tiers.nvme.tier import NvmeTier
from kvstored import __version__
from kvstored.admin.explain import Explain
from kvstored.admin.lifetime import DaemonState, Lifetime, Phase
from kvstored.admin.live_settings import LiveSettings, LiveTenants
from kvstored.admin.reload import Reload
from kvstored.admin.sampler import MetricsSampler
from kvstored.admin.tenant_settings import ordered_settings
from kvstored.admin.views import DaemonParts, Views
from kvstored.clients.arena_grants import ArenaGrants
from kvstored.clients.certificates import Certificates
from kvstored.clients.handshake import HandshakeServer
from kvstored.clients.lookup_index import LookupIndexes
from kvstored.clients.objects import ObjectCatalogue
from kvstored.clients.own_sockets import OwnSockets
from kvstored.clients.pressure import Pressure
from kvstored.clients.reception import Reception
from kvstored.clients.sessions import ClientSessions
from kvstored.clients.shares import TenantShares
from kvstored.clients.staging import StagingPool
from kvstored.clients.tenants.listed_users import ListedUsers
from kvstored.clients.tenants.tokens import load_tokens
from kvstored.clients.weights import WeightVersions
from kvstored.clock import Clock
from kvstored.config import Config
from kvstored.health.integrity import Integrity
from kvstored.health.maintenance import Maintenance
from kvstored.lifetime.instance import (
    AlreadyRunning,
    FreshDirectories,
    InstanceLock,
    StateDirectoryError,
    leave_old_files,
    make_state_dir,
)
from kvstored.lifetime.notify import notify
from kvstored.lifetime.warm import HolderError
from kvstored.lifetime.warm.node_memory import NodeMemory
from kvstored.listening import Control, Services, listen
from kvstored.process import end_without_order, since_process_start_s
from kvstored.rpc.direct_stream import DirectStreams
from kvstored.rpc.health import HealthService
from kvstored.rpc.requests import StreamServices
from kvstored.rpc.unary import SERVICE
from kvstored.rpc.verbs import Verbs
from kvstored.socket_files import SocketFiles
from kvstored.sockets import SocketError, prepare_directory
from kvstored.state.process import StateProcess
from kvstored.storage import NodeStorage, open_storage
from kvstored.store.assembly import Store
from kvstored.store.degraded.memory import MemoryWatch
from kvstored.store.operations import Operations
from kvstored.store.operations.put import Puts
from kvstored.store.transfer.resize import HostSizer, SlabsBack, TierResize
from kvstored.telemetry import DeletionLog, Latencies, RecentMisses

log = logging.getLogger(__name__)
audit_log = logging.getLogger("kvstored.audit")
STOP_GRACE_S = 10.0
STOP_LIMIT_S = 25.0  # on a disk that hangs no stop ends by itself; less than TimeoutStopSec in deploy/systemd
INDEX_SHARE = 16  # this fraction of the memory for staging is for lookup indexes


class StartupError(Exception):
    """An error: the daemon cannot start. The message says why and what to do."""


class Daemon:
    """The daemon of one node, with all its parts. `on_shutdown` is called when an operator asks it to stop, and `read`
    reads the configuration again. `state` talks to the process with the saved state. With `new_secret`, stored blocks
    whose keys cannot be made from the secret are dropped. With `discard_old`, files that an older version wrote and
    this one cannot read are removed."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        on_shutdown: Callable[[], None],
        read: Callable[[], Config],
        state: StateProcess,
        early_scan: EarlyRecordScan | None = None,
        *,
        new_secret: bool = False,
        discard_old: bool = False,
    ) -> None:
        self.config = config
        self.memory = NodeMemory(config)
        self.asked_by = "kvctl"  # to stop
        self._clock = clock
        self._on_shutdown = on_shutdown
        self._read = read
        self._state = state
        self._early_scan = early_scan
        self._new_secret = new_secret
        self._discard_old = discard_old
        self._stack = AsyncExitStack()
        self._phase = Phase()
        self._fresh = FreshDirectories()

    async def start(self) -> None:
        """Open the storage and the sockets, and begin to serve. Raises StartupError, leaving nothing behind."""
        try:
            await self._start()
        except (SocketError, DirectoryError, AlreadyRunning, StateDirectoryError, HolderError, ValueError) as error:
            raise StartupError(str(error)) from None
        except OSError as error:
            raise StartupError(f"{error.strerror or error}: {error.filename or 'while starting'}") from None

    async def _start(self) -> None:
        config, stack, phase = self.config, self._stack, self._phase
        places, state = config.daemon, self._state
        stack.push_async_callback(state.close)  # where the lock is another's
        self._fresh = FreshDirectories(places.socket_dir, places.state_dir, config.nvme.path)
        prepare_directory(places.socket_dir, places.socket_group)
        make_state_dir(places.state_dir)
        stack.callback(InstanceLock(places.state_dir).release)
        if self._discard_old and config.nvme.enabled and discard_older(config.nvme.path):
            log.warning("--discard-old: removed the slabs in %s, which an older version wrote", config.nvme.path)
        leave_old_files(places.state_dir, discard=self._discard_old)
        stack.push_async_callback(state.close)  # else before the lock is released
        early_scan, self._early_scan = self._early_scan, None
        self._storage = open_storage(
            config, self._clock, self.memory, phase, stack, state, early_scan, new_secret=self._new_secret
        )
        self.store = store = self._storage.store
        await self._storage.saver.terms.restore_before_serving()
        await self._storage.saver.orders.read_before_serving()
        files = SocketFiles(partial(prepare_directory, places.socket_dir, places.socket_group), time.monotonic)
        services = make_services(self._storage, self.memory, phase, files, stack)
        self._handshake = services.handshake
        control = make_control(services, self._storage, self._read, stack)
        self.reload = control.reload
        self.reload.apply_orders()
        lifetime = Lifetime(
            phase, services.handshake, services.sessions, store, self._on_shutdown, self.memory.after_stop
        )
        await listen(services, control, lifetime, files, stack)
        start_tasks(services, self._storage, self.memory, stack)
        phase.state = DaemonState.SERVING
        gc.freeze()  # what start-up made lives as long as the daemon: collections need not walk it
        gc.enable()  # `kvstored serve` begins without
        phase.ready_after_s = since_process_start_s()
        notify("READY=1", f"STATUS=serving {len(store.residency)} blocks on {places.socket_dir}")
        log.info(
            "kvstored %s serves on %s: %d blocks, ready after %.2f s",
            __version__, places.socket_dir, len(store.residency), phase.ready_after_s,
        )  # fmt: skip
        trim()  # a start with many blocks needs much memory once

    async def stop(self) -> None:
        """Write the blocks that clients wait for, then close all parts in the reverse order of their making. A second
        call does nothing. When a part hangs in the kernel for `STOP_LIMIT_S` seconds, the process ends as in a crash,
        which the next start can handle.
        """
        notify("STOPPING=1")
        limit = threading.Timer(STOP_LIMIT_S, end_without_order, (STOP_LIMIT_S,))
        limit.daemon = True
        limit.start()
        try:
            if self._phase.has_served:
                await self._leave()
            await self._stack.aclose()
        finally:
            limit.cancel()
        if not self._phase.has_served:
            self._fresh.remove()

    async def _leave(self) -> None:
        """Take no new clients, and write the blocks that connected clients wait for."""
        store = self.store
        audit_log.info(
            "stopping, as %s asked, with %d blocks: %s",
            self.asked_by, len(store.residency), self.memory.after_stop(),
        )  # fmt: skip
        self._phase.state = DaemonState.STOPPING
        self._handshake.accepting = False
        if store.writeback is not None:
            store.write_again()  # of damage that no tick has seen
            await store.writeback.flush(STOP_GRACE_S)


async def settle(store: Store, put: Puts) -> None:
    """End pending puts, write the blocks that wait, and end all transfers, after the last client has been
    disconnected.
    """
    await put.finish()
    if store.writeback is not None:
        store.write_again()
        left = await store.writeback.flush(STOP_GRACE_S)
        if left:
            log.warning("%d blocks could not be written in time; they were never called durable", left)
    store.mover.close()
    store.reservations.close()
    for room in store.rooms:
        await room.settle(STOP_GRACE_S)
    await store.completions.drained()


def make_services(
    storage: NodeStorage, memory: NodeMemory, phase: Phase, files: SocketFiles, stack: AsyncExitStack
) -> Services:
    """Return the parts of the daemon between the store in `storage` and the sockets. `stack` closes them."""
    store, tenants, former = storage.store, storage.tenants, storage.former
    config, clock, limits = store.config, store.clock, store.config.limits
    deletions = DeletionLog(clock)
    stack.callback(deletions.close)
    operations = Operations(store, deletions)
    stack.push_async_callback(settle, store, operations.put)
    shares = TenantShares(tenants, store.residency, store.policies, store.retention)
    index_bytes = config.host.staging_bytes // INDEX_SHARE if config.index.slots else 0
    staging = StagingPool(config.host.staging_bytes - index_bytes, limits.staging_per_client_bytes)
    weights = WeightVersions(storage.saver.orders, tenants, store)
    storage.saver.orders.when_read(weights.begin_anew)
    sessions = ClientSessions(store, tenants, shares, staging, weights, former, memory.last_session_id)
    parts, latencies = DaemonParts(store, tenants, sessions, storage.unsaved), Latencies()
    sampler = MetricsSampler(parts, latencies)
    sizer = _host_sizer(store, stack)
    host_resize = TierResize(store.host.info.name, store.host, store.room, sizer.give_back)
    stack.push_async_callback(host_resize.close)
    watches = (store.tick, sizer.tick, deletions.tick, files.tick, sampler.sample)
    maintenance = Maintenance(store, watches)

    def is_idle() -> bool:
        """Return whether no bytes move: then the daemon does its maintenance."""
        return not store.completions.outstanding and phase.state is DaemonState.SERVING

    integrity = Integrity(store, is_idle, storage.saver)
    views = Views(parts, phase, maintenance, integrity)
    misses = RecentMisses(limits.misses_per_tenant, clock)
    explain = Explain(views, misses)
    catalogue = ObjectCatalogue(storage.saver.orders, clock)
    verbs = Verbs(store, operations, misses, explain.own, weights.bump, catalogue.answer)
    if config.daemon.record is not None:
        from kvstored.rpc.verbs.recorded import recorded, tokens_of  # only where it is asked for

        said = (partial(tokens_of, store, tenants.encrypts),) if config.daemon.record_tokens else ()
        hides_keys = tenants.data_keys is not None
        verbs = recorded(verbs, config.daemon.record, clock, stack, *said, hides_keys=hides_keys)
    if config.traces.endpoint:
        verbs = _with_traces(verbs, store, stack)
    answering = StreamServices(verbs, limits.inflight_per_client, Pressure(store), latencies, clock, store.completions)
    streams = DirectStreams(answering, limits.message_bytes)
    indexes = LookupIndexes(config.index.slots, index_bytes, store.residency, asyncio.get_running_loop().call_soon)
    store.residency.observe(indexes)
    if config.events.listen:
        from kvstored.events.opening import open_events

        open_events(config.events, config.daemon.state_dir, tenants, store, stack)
    shares.set_all()
    reception = Reception(store, sessions, ArenaGrants(store), indexes, streams, former)
    handshake = HandshakeServer(config.daemon.socket_dir / "handshake.sock", reception, limits)
    weights.hang_up, weights.puts_of = handshake.hang_up, operations.put.under_way
    return Services(
        phase, views, explain, sampler, latencies, maintenance, integrity, host_resize, operations.delete, answering,
        streams, sessions, shares, handshake, OwnSockets(config.daemon.socket_dir, handshake, files), storage.saver,
        weights,
    )  # fmt: skip


def _with_traces(verbs: Verbs, store: Store, stack: AsyncExitStack) -> Verbs:
    """Return `verbs` with spans, which are sent until `stack` ends that. Raises TracesError."""
    from kvstored.rpc.verbs.traced import traced  # only where it is asked for
    from kvstored.telemetry.spans import Sampler, Sending, SpanExporter

    section, loop = store.config.traces, asyncio.get_running_loop()

    def count(name: str, amount: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(store.counters.add, name, amount)

    exporter = SpanExporter(Sending(section.endpoint, section.queue, count), store.clock)
    stack.push_async_callback(asyncio.to_thread, exporter.close)
    return traced(verbs, store, Sampler(section.sample), exporter.note)


def _host_sizer(store: Store, stack: AsyncExitStack) -> HostSizer:
    host = store.config.host
    sizer = HostSizer(
        store.host, store.room, MemoryWatch().read, store.modes, store.clock, store.counters,
        min_free_bytes=host.min_free_bytes, arena_bytes=host.arena_bytes,
    )  # fmt: skip
    stack.push_async_callback(sizer.close)
    return sizer


def make_control(
    services: Services, storage: NodeStorage, read: Callable[[], Config], stack: AsyncExitStack
) -> Control:
    """Return the parts that change with the configuration while the daemon serves, and the health service. `read` reads
    the configuration. Raises ConfigError."""
    store, tenants, config = storage.store, storage.tenants, storage.store.config
    resizes = {store.host.info.name: services.host_resize}
    if store.nvme is not None:
        nvme = cast(NvmeTier, store.nvme)
        name, slabs = nvme.info.name, SlabsBack(nvme, store.completions)
        resizes[name] = TierResize(name, nvme, store.rooms[store.residency.durable], slabs.give_back)
        stack.push_async_callback(resizes[name].close)
    tokens_file = config.unary.tokens_in_use
    tokens = load_tokens(tokens_file, tenants.named, tenants.is_named) if tokens_file is not None else None
    certificates = Certificates.of(config.unary) if config.unary.enabled else None
    live_tenants = LiveTenants(
        tenants, store.residency, services.shares, services.handshake, services.own_sockets, services.sessions,
        ListedUsers(config.daemon.state_dir, storage.unsaved), tokens,
    )  # fmt: skip
    live_tenants.begin()
    orders = storage.saver.orders
    live = LiveSettings(store, resizes, live_tenants, certificates)
    reload = Reload(config, read, live, partial(ordered_settings, orders))
    orders.when_read(reload.apply_orders)
    served = (SERVICE, "kvstore.v1.KVStore", "kvstore.v1.Admin")
    return Control(
        reload, tokens, certificates, HealthService(services.phase, served, store.modes, store.residency.tiers)
    )


def start_tasks(services: Services, storage: NodeStorage, memory: NodeMemory, stack: AsyncExitStack) -> None:
    """Start the daemon's background tasks, which run until `stack` ends them."""
    maintenance, phase = services.maintenance, services.phase
    runs = {"maintenance": maintenance.run, "tenants": storage.tenants.keyring.run, "state": storage.saver.run}
    runs["terms"] = storage.saver.terms.run
    runs["weights"] = services.weights.run
    if memory.warm is not None:
        runs["warm restart"] = memory.warm.run
    if storage.store.config.host.prefault:
        runs["prefault"] = lambda: maintenance.prefault(lambda: phase.state is not DaemonState.STOPPING)
    for name, run in (runs | services.integrity.tasks()).items():
        stack.push_async_callback(_cancel, asyncio.create_task(_run(name, run), name=name))


async def _run(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Await `run()`. A task that fails is logged; the daemon goes on without it."""
    try:
        await run()
    except Exception:
        log.exception("%s ended", name)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
