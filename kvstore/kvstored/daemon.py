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
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import grpc

from kvstore_proto.v1 import admin_pb2_grpc, kvstore_pb2_grpc
from kvstore_tiers.base import Slot, Tier
from kvstore_tiers.host import HostTier
from kvstore_tiers.nvme.errors import DirectoryError
from kvstored import __version__
from kvstored.clock import Clock, SystemClock
from kvstored.config import Config
from kvstored.dataplane.handshake import HandshakeServer
from kvstored.dataplane.leases import LeaseTable
from kvstored.dataplane.lookup_index import LookupIndexes
from kvstored.dataplane.reception import Reception
from kvstored.dataplane.sessions import Session, SessionTable
from kvstored.dataplane.staging import StagingPool
from kvstored.instance import AlreadyRunning, InstanceLock
from kvstored.maintenance import Maintenance
from kvstored.movement import promote, writeback
from kvstored.movement.completions import CompletionQueue
from kvstored.movement.lane import Lane, LaneSettings, Limits, Priority
from kvstored.movement.mover import Mover, Transfer
from kvstored.movement.promote import Promoter
from kvstored.movement.room import Room
from kvstored.movement.writeback import WriteBack
from kvstored.notify import notify
from kvstored.operations.drop import Drop
from kvstored.operations.explain import Explain
from kvstored.operations.history import HistoryView
from kvstored.operations.lifetime import Lifetime, State
from kvstored.operations.sampling import Sampler
from kvstored.operations.views import Parts, Views
from kvstored.policies import Policy, PolicySettings, create, create_admission
from kvstored.recovery import recover_blocks
from kvstored.residency import Residency
from kvstored.rpc import unary
from kvstored.rpc.admin import AdminService
from kvstored.rpc.health import Health
from kvstored.rpc.session_stream import SessionService
from kvstored.rpc.unary_doors import UnaryDoors
from kvstored.sockets import (
    SocketError,
    clear_stale,
    listen_seqpacket,
    open_to_group,
    prepare_directory,
    restrict_to_admins,
)
from kvstored.telemetry import Counters, Flows, Latencies, RecentMisses
from kvstored.tenants import Peer, TenantDirectory
from kvstored.tiering import HOST, NVME, TIER_NAMES
from kvstored.verbs import Delete, Get, Hints, LookUp, Put, Verbs
from kvstored.verbs.inline import InlineCalls

log = logging.getLogger(__name__)
# No thread of ours computes for long with the GIL held, so a short interval wins nothing and costs the control thread
# the GIL in the middle of a request: with 0.5 ms lookups beside two clients at full load took half as long again.
SWITCH_INTERVAL_S = 0.005
STOP_GRACE_S = 10.0
INDEX_SHARE = 16  # one part in so many of what is set aside for staging is for lookup indexes
PREFETCH_SHARE = 4  # at most one part in so many of the host tier is held for prefetches that wait


class StartupError(Exception):
    """The daemon cannot start; the message says why and what to do."""


def run(config: Config) -> int:
    """Serve until SIGTERM, SIGINT or a shutdown request. Raises StartupError."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # token ids in memory
    _raise_descriptor_limit()
    return asyncio.run(_serve(config))


async def _serve(config: Config) -> int:
    stop_wanted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_wanted.set)
    daemon = Daemon(config, SystemClock(), stop_wanted.set)
    try:
        await daemon.start()
        await stop_wanted.wait()
    finally:
        await daemon.stop()
    return 0


class Daemon:
    """One running daemon. `on_shutdown` is called when an operator asks it to stop."""

    def __init__(self, config: Config, clock: Clock, on_shutdown: Callable[[], None]) -> None:
        self.config = config
        self._clock = clock
        self._on_shutdown = on_shutdown
        self._stack = contextlib.AsyncExitStack()
        self._ready_after_s = 0.0
        self.lifetime: Lifetime | None = None

    async def start(self) -> None:
        """Everything up to serving. Raises StartupError, leaving nothing behind."""
        try:
            await self._start()
        except (SocketError, DirectoryError, AlreadyRunning, ValueError) as error:
            raise StartupError(str(error)) from None
        except OSError as error:
            raise StartupError(f"{error.strerror or error}: {error.filename or 'while starting'}") from None

    async def _start(self) -> None:
        config = self.config
        prepare_directory(config.daemon.socket_dir, config.daemon.socket_group)
        _make_state_dir(config.daemon.state_dir)
        lock = InstanceLock(config.daemon.state_dir)
        self._stack.callback(lock.release)
        self._build()
        await self._listen()
        self._start_tasks()
        assert self.lifetime is not None
        self.lifetime.state = State.SERVING
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the daemon: full collections need not walk it
        self._ready_after_s = _since_process_start_s()
        notify("READY=1", f"STATUS=serving {len(self.residency)} blocks on {config.daemon.socket_dir}")
        log.info(
            "kvstored %s serves on %s: %d blocks, ready after %.2f s",
            __version__, config.daemon.socket_dir, len(self.residency), self._ready_after_s,
        )  # fmt: skip

    async def stop(self) -> None:
        """Flush, then take everything down in the reverse order of its making. Idempotent."""
        notify("STOPPING=1")
        if self.lifetime is not None:
            self.lifetime.state = State.STOPPING
            self._handshake.accepting = False
            if self._writeback is not None:  # while clients who wait for that word can still hear it
                await self._writeback.flush(STOP_GRACE_S)
        await self._stack.aclose()

    async def _settle(self, put: Put) -> None:
        """Nobody asks any more: end what is under way, write what waits, leave no transfer in flight."""
        await put.finish()
        if self._writeback is not None:
            left = await self._writeback.flush(STOP_GRACE_S)
            if left:
                log.warning("%d blocks could not be written in time; they were never called durable", left)
        self._mover.close()
        await self._completions.drained()

    # Putting the parts together

    def _build(self) -> None:
        config, clock = self.config, self._clock
        self.counters = Counters()
        self._completions = CompletionQueue(asyncio.get_running_loop())
        self._tenants = TenantDirectory(config.daemon.state_dir, config.tenants, config.tenant_default)
        self._sessions = SessionTable()
        self._open_tiers()
        self.flows = Flows(len(self._tiers))
        self._leases = LeaseTable(self._unpin, self._host.free)
        self._policies = self._make_policies()
        rooms = self._make_rooms()
        self._mover = Mover(self._make_lanes(), self._completions, clock)
        nvme = self._nvme
        promoter = Promoter(
            self.residency, self._host, nvme, rooms[HOST], self._mover, clock, self.counters, self.flows,
            prefetch_room_bytes=config.host.capacity_bytes // PREFETCH_SHARE,
        )  # fmt: skip
        self._writeback: WriteBack | None = None
        if nvme is not None:
            self._writeback = WriteBack(
                self.residency, self._host, nvme, rooms[NVME],
                create_admission(config.nvme.admission, self.residency, NVME), self._mover, self._completions, clock,
                self.counters, self.flows,
                delay_ms=config.durability.batch_ms, batch_blocks=config.durability.batch_blocks,
            )  # fmt: skip
            rooms[HOST].demoter = self._writeback
        self._make_services(promoter, rooms)

    def _open_tiers(self) -> None:
        config = self.config
        host = config.host
        self._host = HostTier(
            host.capacity_bytes,
            arena_bytes=host.arena_bytes,
            mode="sealed" if host.sealed else "owned",
            copy_threads=host.copy_threads,
        )
        self._stack.callback(self._host.close)
        if not self._host.charge(host.staging_bytes, "staging"):
            raise StartupError("host.staging does not fit host.capacity")
        self._nvme: Tier | None = None
        self._tiers: list[Tier] = [self._host]
        self.residency = Residency(
            TIER_NAMES if config.nvme.enabled else TIER_NAMES[:1], ghost_keys=config.limits.ghosts_per_tenant
        )
        if config.nvme.enabled:
            from kvstore_tiers.nvme.tier import NvmeTier

            self._nvme = NvmeTier.open(
                config.nvme.path,
                config.nvme.capacity_bytes,
                slab_bytes=config.nvme.slab_bytes,
                io_threads=config.nvme.io_threads,
                require_direct=config.nvme.require_direct,
            )
            self._stack.callback(self._nvme.close)
            self._tiers.append(self._nvme)
            recovered = recover_blocks(self._nvme, self.residency, self._tenants, self._clock)
            if recovered:
                log.info("%d blocks found on NVMe", recovered)

    def _make_policies(self) -> list[Policy]:
        host, nvme = self.config.host, self.config.nvme
        chosen = [(host.policy, host.ttl_s), (nvme.policy, nvme.ttl_s)][: len(self._tiers)]
        return [
            create(name, self.residency, position, PolicySettings(ttl_s=ttl_s or None))
            for position, (name, ttl_s) in enumerate(chosen)
        ]

    def _make_rooms(self) -> list[Room]:
        retire = self._retire_of_tier()
        return [
            Room(
                tier, position, self._policies[position], self.residency, retire[position],
                self._may_linger if position == HOST else lambda slot, tenant: True,
                self._clock, self.counters, self.flows, separates_owners=position == HOST,
            )
            for position, tier in enumerate(self._tiers)
        ]  # fmt: skip

    def _make_lanes(self) -> list[Lane[Transfer]]:
        """One lane a direction. Both directions of the disk share it, so that prefetch waits for demand on either."""
        if self._nvme is None:
            return []
        movement, limits = self.config.movement, self.config.limits
        settings = LaneSettings(
            max_in_flight=movement.in_flight,
            limits={
                Priority.DEMAND: Limits(movement.queue_blocks, movement.in_flight),
                Priority.PREFETCH: Limits(movement.queue_blocks, 1),
                Priority.DEMOTION: Limits(
                    movement.queue_blocks,
                    max(1, movement.in_flight // 2),
                    movement.demotion_rate_bytes or None,
                ),
                Priority.MAINTENANCE: Limits(movement.queue_blocks, 1),
            },
            quiet_s=movement.prefetch_quiet_ms / 1000,
            prefetch_item_bytes=limits.max_block_bytes + 8192,
        )
        lanes: list[Lane[Transfer]] = [Lane(name, settings) for name in (promote.LANE, writeback.LANE)]
        for lane in lanes:
            lane.share_medium(lanes)
        return lanes

    def _make_services(self, promoter: Promoter, rooms: list[Room]) -> None:
        config, clock = self.config, self._clock
        limits, movement = config.limits, config.movement
        put = Put(
            self.residency, self._sessions, self._host, rooms[HOST], self._writeback, self._completions, clock,
            self.counters, max_keys=limits.max_keys, max_block_bytes=limits.max_block_bytes,
            reservation_ttl_ms=limits.reservation_ttl_ms, default_mode=config.durability.mode,
        )  # fmt: skip
        self._promoter = promoter
        self._misses = RecentMisses(limits.misses_per_tenant, clock)
        get = Get(
            self.residency, self._leases, promoter, clock, self.counters, self.flows, self._misses,
            max_keys=limits.max_keys, leases_per_client=limits.leases_per_client, lease_ttl_ms=limits.lease_ttl_ms,
            wait_ms=movement.acquire_wait_ms,
        )  # fmt: skip
        hints = Hints(
            self.residency, self._leases, promoter, clock, max_keys=limits.max_keys,
            lease_ttl_ms=limits.lease_ttl_ms, prefetch_budget_bytes=movement.prefetch_budget_bytes,
        )  # fmt: skip
        self._stack.push_async_callback(self._settle, put)
        look_up = LookUp(self.residency, promoter, self.counters, self.flows, self._misses, limits.max_keys)
        self._delete = Delete(self.residency, self._writeback, self._retire_of_tier(), clock, max_keys=limits.max_keys)
        self._verbs = Verbs(look_up, put, get, hints, self._delete)
        self._latencies = Latencies()
        self._sampler = Sampler(self._parts(), self._latencies)
        self._maintenance = Maintenance(
            put, self._leases, self._policies, rooms, self._host, clock, self.counters, self._sampler.sample
        )

        def end_session(session: Session) -> None:
            put.end_session(session)
            self._leases.release_session(session.session_id)

        index_bytes = config.host.staging_bytes // INDEX_SHARE if config.index.slots else 0
        indexes = LookupIndexes(config.index.slots, index_bytes, self.residency, asyncio.get_running_loop().call_soon)
        self.residency.observe(indexes)
        sockets = config.daemon.socket_dir
        self._reception = Reception(
            config, self._sessions, self._tenants, self.residency, self._host,
            StagingPool(config.host.staging_bytes - index_bytes, limits.staging_per_client_bytes), self._policies,
            indexes, self.counters, end_session, epoch=os.urandom(16), data_socket=sockets / "data.sock",
        )  # fmt: skip
        self._handshake = HandshakeServer(sockets / "handshake.sock", self._reception, limits.max_clients)
        self.lifetime = Lifetime(
            self._handshake, self._sessions, self._leases, self.residency, self._writeback, self._on_shutdown
        )

    # Listening

    async def _listen(self) -> None:
        assert self.lifetime is not None
        sockets, limits = self.config.daemon.socket_dir, self.config.limits
        names = ["handshake", "data", "admin"] + (["unary"] if self.config.unary.enabled else [])
        paths = {name: sockets / f"{name}.sock" for name in names}
        for path in paths.values():
            clear_stale(path)
        views = Views(
            self._parts(),
            lambda: self._state(),
            lambda: self._ready_after_s,
            lambda: self._maintenance.prefaulted,
        )
        drop = Drop(self.residency, self._tenants, self._writeback, self._retire_of_tier(), self._clock)
        admin = await self._serve_grpc(paths["admin"], max_message_bytes=limits.message_bytes)
        explain = Explain(self._parts(), views, self._host, self._misses, self._promoter.estimate_us)
        history = HistoryView(self._sampler.history, self.flows, self.config, self._clock)
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(views, explain, history, drop, self.lifetime), admin)
        data = await self._serve_grpc(paths["data"], max_message_bytes=limits.message_bytes)
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(
            SessionService(self._sessions, self._verbs, limits.inflight_per_client, self._latencies, self._clock), data
        )
        health = Health(self.lifetime, (unary.SERVICE, "kvstore.v1.KVStore", "kvstore.v1.Admin"))
        health.serve_on(admin)
        health.serve_on(data)
        await admin.start()
        restrict_to_admins(paths["admin"], self.config.daemon.admin_group)
        await data.start()
        open_to_group(paths["data"], self.config.daemon.socket_group)
        if self.config.unary.enabled:
            await self._listen_unary(paths["unary"], health)
        self._handshake.start(listen_seqpacket(paths["handshake"], self.config.daemon.socket_group))
        self._stack.callback(self._handshake.close)
        for path in paths.values():
            self._stack.callback(path.unlink, missing_ok=True)

    async def _listen_unary(self, path: Path, health: Health) -> None:
        lifetime, config, writeback = self.lifetime, self.config, self._writeback
        assert lifetime is not None
        calls = InlineCalls(
            self._verbs, self._delete, self.residency, self._host, self._completions, self.counters,
            writeback.is_durable if writeback is not None else lambda row: False,
            message_bytes=config.unary.message_bytes,
        )  # fmt: skip
        limit = unary.CallLimit(config.unary.calls)
        doors = UnaryDoors(
            config.unary, path,
            lambda callers: unary.UnaryService(
                calls, callers, self._reception, lifetime, limit, config.limits.max_keys
            ),
            lambda: self._tenants.resolve(Peer(os.getpid(), os.geteuid(), os.getegid())),
            self._tenants.named, health,
        )  # fmt: skip
        with _private_umask():
            servers = doors.bind()
        for server in servers:
            self._stack.push_async_callback(server.stop, 0.5)
            await server.start()

    async def _serve_grpc(self, path: Path, *, max_message_bytes: int) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", 2 * max_message_bytes),
            ]
        )
        with _private_umask():  # nobody else connects between bind and chmod
            try:
                server.add_insecure_port(f"unix:{path}")
            except RuntimeError as error:
                raise StartupError(f"cannot listen on {path}: {error}") from None
        self._stack.push_async_callback(server.stop, 0.5)
        return server

    def _start_tasks(self) -> None:
        tasks = [asyncio.create_task(self._maintenance.run(), name="maintenance")]
        if self.config.host.prefault:
            wanted = lambda: self._state() != State.STOPPING.value  # noqa: E731
            tasks.append(asyncio.create_task(self._maintenance.prefault(wanted), name="prefault"))
        for task in tasks:
            task.add_done_callback(_report_failure)
            self._stack.push_async_callback(_cancel, task)

    # Small connections between parts

    def _parts(self) -> Parts:
        paths = ["memfd arenas"] + ([str(self.config.nvme.path)] if self._nvme is not None else [])
        return Parts(
            self.config, self._clock, self.residency, self._tiers, self._policies, paths, self._sessions,
            self._leases, self._tenants, self._mover, self._writeback, self.counters, self.flows,
        )  # fmt: skip

    def _retire_of_tier(self) -> list[Callable[[Slot, int], None]]:
        """Where the slots of each tier go when their block has left: host slots may still have readers."""
        nvme = self._nvme
        if nvme is None:
            return [self._leases.retire]
        return [self._leases.retire, lambda slot, tenant: nvme.free(slot)]

    def _state(self) -> str:
        return self.lifetime.state.value if self.lifetime is not None else State.STARTING.value

    def _unpin(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.residency.unpin(row)

    def _may_linger(self, slot: Slot, tenant: int) -> bool:
        """Whether a block may leave this slot: nobody reads it, or its tenant's limbo has room for it."""
        if not self._leases.has_readers(slot):
            return True
        return self._leases.limbo_bytes(tenant) + slot.nbytes <= self.config.limits.limbo_per_tenant_bytes


@contextlib.contextmanager
def _private_umask() -> Iterator[None]:
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _raise_descriptor_limit() -> None:
    """A client takes a few descriptors; the usual soft limit of 1024 would not do for `limits.max_clients`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s ended", task.get_name(), exc_info=task.exception())


def _make_state_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"cannot make state directory {path}: {error.strerror}; set daemon.state_dir to a writable place"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise StartupError(f"state directory {path} is not writable by uid {os.geteuid()}")


def _since_process_start_s() -> float:
    """Seconds since this process was started, by the kernel's account."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
