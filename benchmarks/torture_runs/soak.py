"""A daemon that runs on while all about it comes and goes, and must not grow: clients, tenants, their keys, pins, times
to live, weights, reloads, and now and then a full disk.

Owns rounds of some seconds: threads are clients of a keeper and of guests; the operator replaces guests, reloads, sets,
bumps and drops. After each round nothing is connected, and the kernel says what the daemon's processes have. The judge
is the model of bytes, the keeper's pinned chain, the daemon's walk over its books, and growth from the second quarter
of the rounds to the last; slabs may grow within the capacity of their tier. The disk is full by RLIMIT_FSIZE (EFBIG),
under which shared memory cannot grow either.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import resource
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from kvstore_client import Fingerprint, KVStoreError, Session
from kvstore_proto.framing import frame
from kvstore_proto.v1 import admin_pb2, keeping_pb2
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from torture_runs.figures import Assignment, Clock, Figures
from torture_runs.hostile_inputs import Caller
from torture_runs.kill_model import Conversation
from torture_runs.mortal_daemon import MortalDaemon

SETTINGS = (
    "host.capacity=48MiB", "host.staging=12MiB", "host.arena=2MiB", "host.prefault=false", "host.prefault_ahead=2MiB",
    "host.min_free=0", "nvme.capacity=48MiB", "nvme.slab=4MiB", "nvme.io_threads=2", "limits.max_block=1MiB",
    "limits.staging_per_client=1MiB", "nvme.codec_staging=4MiB",
)  # fmt: skip
KEEPER, GUESTS, CLIENTS, BLOCKS, CHAINS = "keeper", 3, 4, 6, 120
ROUND_S, SETTLED_S, FULL_S, TTL_S = 8.0, 60.0, 1.5, 1.0
FULL_BYTES = 1 << 20
ROUNDS_JUDGED = 12
SLABS_BYTES = (48 << 20) + (1 << 20)  # nvme.capacity, and what a file system adds; they fill it for half an hour
ALLOWED = {"memory_bytes": 32 << 20, "descriptors": 24, "threads": 8, "disk_bytes": 8 << 20}  # of growth


class ChurnedDaemon(MortalDaemon):
    """A daemon whose tenants are a keeper and the guests of the moment."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory, *SETTINGS)
        self.rng, self._names = random.Random(seed), (f"guest-{number}" for number in itertools.count())
        self.guests = [next(self._names) for _ in range(GUESTS)]
        (directory / "master").touch(0o600)
        (directory / "master").write_bytes(os.urandom(48))
        self.configure()

    def arguments(self) -> list[str]:
        return [*super().arguments(), "--config", str(self.directory / "kvstored.toml")]

    def configure(self) -> None:
        text = ""
        if importlib.util.find_spec("cryptography"):
            text = f'[encryption]\nkey_file = "{self.directory}/master"\ndefault = true\n'
        text += f'[[tenant]]\nname = "{KEEPER}"\nsocket = true\nhost_min = "4MiB"\nnvme_min = "4MiB"\n'
        for name in self.guests:
            quota = f'host_max = "{self.rng.choice((8, 12, 24))}MiB"\nhost_weight = {self.rng.randint(1, 9)}\n'
            text += f'[[tenant]]\nname = "{name}"\nsocket = true\n{quota}'
        (self.directory / "kvstored.toml").write_text(text)

    def another_guest(self) -> str:
        """Let a new guest take the place of one, whose name is returned."""
        gone = self.guests.pop(0)
        self.guests.append(next(self._names))
        self.configure()
        return gone

    def used(self) -> dict[str, int]:
        """Return what the kernel says that the daemon's processes have."""
        mark, used = os.fsencode(self.directory) + b"/", dict.fromkeys((*ALLOWED, "slab_bytes"), 0)
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "cmdline").read_bytes() and path.name != str(os.getpid()):
                    status = (path / "status").read_text()
                    used["memory_bytes"] += int(status.partition("RssAnon:")[2].split()[0]) * 1024
                    used["threads"] += int(status.partition("Threads:")[2].split()[0])
                    used["descriptors"] += len(os.listdir(path / "fd"))
        for path in self.state_dir.rglob("*"):
            with suppress(OSError):  # files come and go
                name = "slab_bytes" if path.suffix == ".slab" else "disk_bytes"
                used[name] += path.stat().st_blocks * 512 if path.is_file() else 0
        return used


def torture(assignment: Assignment, figures: Figures) -> None:
    """Figures: `soak_rounds`, `soak_actions`, `soak_refused`, `soak_wrong`, and growth beyond what is `ALLOWED`."""
    clock, seen = Clock(assignment), []
    with ChurnedDaemon(assignment.directory / "soak", assignment.seed) as daemon:
        daemon.start()
        with daemon.connect_as(KEEPER, Conversation(KEEPER, 0, 0, BLOCKS).fingerprint) as session:
            kept = Conversation(KEEPER, 0, 0, BLOCKS)
            session.put(
                kept.tokens(BLOCKS), payloads=kept.payloads(BLOCKS), durability="always", wait="settled", pin="kept"
            )
        scene = Scene(daemon, figures, assignment.seed)
        while figures.counts["soak_rounds"] == 0 or clock.goes_on(figures.counts["soak_rounds"]):
            scene.round(min(ROUND_S, max(clock.left_s, TTL_S)))
            scene.judge(kept)
            seen.append(daemon.used())
            if seen[-1]["slab_bytes"] > SLABS_BYTES:
                figures.fail("soak_wrong", f"slabs take {seen[-1]['slab_bytes']} bytes of {SLABS_BYTES}")
            figures.add("soak_rounds")
            figures.heartbeat(now=True)
        for name, allowed in ALLOWED.items():
            values = [used[name] for used in seen]
            figures.at_least(f"most_soak_{name}", max(values))
            if len(values) >= ROUNDS_JUDGED:
                quarter = len(values) // 4
                grown = statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])
                figures.at_least(f"most_soak_growth_{name}", grown)
                figures.at_least(f"over_soak_{name}", max(0, grown - allowed))
        if status := daemon.stop():
            figures.fail("soak_wrong", f"an orderly stop ended with status {status}: {daemon.log}")
        if (found := daemon.whole_log.find("Traceback")) >= 0:
            figures.fail("daemon_tracebacks", daemon.whole_log[max(found - 500, 0) : found + 3000])


class Scene:
    """The clients and the operator of one daemon."""

    def __init__(self, daemon: ChurnedDaemon, figures: Figures, seed: int) -> None:
        self.daemon, self.figures, self.seed = daemon, figures, seed
        self._lock = threading.Lock()  # of the figures
        self._own_chains = itertools.count(1000)
        self._version = 0

    def round(self, seconds: float) -> None:
        """Let clients and the operator do as they like for some seconds, and end all of them."""
        self.seed += 1
        until_s = time.monotonic() + seconds
        rngs = [random.Random(self.seed * 100 + number) for number in range(CLIENTS)]
        threads = [threading.Thread(target=self._client, args=(rng, until_s), daemon=True) for rng in rngs]
        for thread in threads:
            thread.start()
        while time.monotonic() < until_s:
            self._operate()
            time.sleep(0.3)
        for thread in threads:
            thread.join(SETTLED_S)
            if thread.is_alive():
                self.wrong("a client hangs")

    def judge(self, kept: Conversation) -> None:
        """Look whether all is gone that clients had, and the keeper's pinned chain is there."""
        with self.daemon.connect_as(KEEPER, kept.fingerprint) as session:
            found = self._read(session, kept, BLOCKS)
            if found < BLOCKS:
                self.wrong(f"{found} of {BLOCKS} pinned blocks are left")
        deadline = time.monotonic() + SETTLED_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            self.wrong(f"nobody is connected, and there is {left}")
        status = self.daemon.admin("Status", admin_pb2.StatusRequest())
        for fault in status.books.broken:
            self.wrong(f"broken invariant: {fault}")
        for name, tier in self.daemon.tiers().items():
            if tier.used_bytes > tier.capacity_bytes:
                self.wrong(f"{name} holds {tier.used_bytes} of {tier.capacity_bytes} bytes")

    def wrong(self, what: str) -> None:
        with self._lock:
            self.figures.fail("soak_wrong", what)

    def did(self, name: str, what: str) -> None:
        with self._lock:
            self.figures.add_kind(name, what)

    def _left(self) -> str:
        status = self.daemon.admin("Status", admin_pb2.StatusRequest())
        held = {"clients": status.clients, "leases": status.leases, "limbo_bytes": status.limbo_bytes}
        return ", ".join(f"{count} {name}" for name, count in held.items() if count)

    # The operator

    def _operate(self) -> None:
        rng = self.daemon.rng
        actions = (self._new_guest, self._reload, self._set, self._bump, self._keep, self._drop, self._full)
        action = rng.choices(actions, (2, 2, 2, 2, 2, 1, 1))[0]
        try:
            action(rng)
        except grpc.RpcError as error:
            self.did("soak_refused", f"{action.__name__[1:]}: {error.code().name.lower()}")
        self.did("soak_actions", action.__name__[1:])

    def _new_guest(self, _: random.Random) -> None:
        gone = self.daemon.another_guest()
        self.daemon.admin("Reload", admin_pb2.ReloadRequest())
        reply = self.daemon.admin("DropTenant", keeping_pb2.DropTenantRequest(name=gone))
        if reply.readable_slots:
            self.wrong(f"{reply.readable_slots} slots of a dropped tenant can be read")

    def _reload(self, _: random.Random) -> None:
        self.daemon.configure()
        self.daemon.admin("Reload", admin_pb2.ReloadRequest())

    def _set(self, rng: random.Random) -> None:
        settings = {"host_weight": str(rng.randint(1, 9)), "ttl_s": str(rng.choice((60, 600)))}
        request = keeping_pb2.SetTenantRequest(name=rng.choice(self.daemon.guests), settings=settings)
        self.daemon.admin("SetTenant", request)

    def _bump(self, rng: random.Random) -> None:
        self._version += 1
        request = keeping_pb2.VersionsRequest(tenant=rng.choice(self.daemon.guests), weights="policy")
        request.version = self._version
        self.daemon.admin("Versions", request)

    def _keep(self, rng: random.Random) -> None:
        terms = rng.choice((pb.Terms(pin="operator", pin_ttl_s=5), pb.Terms(unpin="operator"), pb.Terms(ttl_s=30)))
        request = keeping_pb2.KeepRequest(terms=terms, tenant=rng.choice(self.daemon.guests), all=True)
        self.daemon.admin("Keep", request)

    def _drop(self, _: random.Random) -> None:
        self.daemon.admin("Drop", admin_pb2.DropRequest(tier="host"))

    def _full(self, _: random.Random) -> None:
        assert self.daemon.process is not None
        before = resource.prlimit(self.daemon.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.daemon.process.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, before[1]))
        time.sleep(FULL_S)
        resource.prlimit(self.daemon.process.pid, resource.RLIMIT_FSIZE, before)

    # Clients

    def _client(self, rng: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s:
            tenant = rng.choice((KEEPER, *self.daemon.guests))
            chain = Conversation(tenant, rng.randrange(2), rng.randrange(1, CHAINS), BLOCKS)
            model = chain.fingerprint
            if rng.random() < 0.3:
                model = replace(model, weights="policy", weights_version=self._version + 1)
            try:
                if rng.random() < 0.2:
                    self._vanish(tenant, model)
                    continue
                with self.daemon.connect_as(tenant, model) as session:
                    for _ in range(rng.randint(1, 12)):
                        if time.monotonic() < until_s:
                            self._step(session, rng, chain)
                        chain.number = rng.randrange(1, CHAINS)
            except (KVStoreError, OSError) as error:  # the tenant went, or its name is older than its socket
                self.did("soak_refused", f"client: {getattr(error, 'kind', type(error).__name__)}")

    def _vanish(self, tenant: str, model: Fingerprint) -> None:
        """A client that is gone in the middle of its requests."""
        hello = hs.Hello(protocol_version=1, client_name="x", fingerprint=model.canonical(), staging_bytes=1 << 20)
        with Caller(self.daemon.own_socket(tenant), hello) as caller:
            request = pb.Request(request_id=1, lookup=pb.Lookup(sets=[pb.KeySet(keys=bytes(range(16)))]))
            caller.open_stream().sendall(frame(request.SerializeToString()) * 20)
        self.did("soak_actions", "vanish")

    def _step(self, session: Session, rng: random.Random, chain: Conversation) -> None:
        blocks = rng.randint(1, BLOCKS)
        tokens = chain.tokens(blocks)
        what = rng.choices(("put", "get", "touch", "prefetch", "delete", "expire"), (6, 6, 2, 1, 1, 1))[0]
        terms: dict[str, Any] = rng.choice(
            ({}, {}, {"ttl": 30.0}, {"priority": 1}, {"pin": f"p{rng.randrange(4)}", "pin_ttl": 4.0})
        )
        if what == "put":
            mode = rng.choice(("none", "batch", "always"))
            session.put(tokens, payloads=chain.payloads(blocks), durability=mode, **terms)
        elif what == "get":
            self._read(session, chain, blocks)
        elif what == "touch":
            session.touch(tokens, **(terms or {"unpin": f"p{rng.randrange(4)}"}))
        elif what == "expire":
            chain.number = next(self._own_chains)
            tokens = chain.tokens(blocks)
            session.put(tokens, payloads=chain.payloads(blocks), durability="batch", ttl=TTL_S)
            time.sleep(2 * TTL_S)
            if (found := session.lookup(tokens).blocks) and session.tenant == KEEPER:  # guests are given other terms
                self.wrong(f"{found} blocks are found {TTL_S:g} s after their time")
        else:
            getattr(session, what)(tokens)
        self.did("soak_actions", what)

    def _read(self, session: Session, chain: Conversation, blocks: int) -> int:
        with session.get(chain.tokens(blocks)) as lease:
            for block in range(len(lease)):
                if lease.payload(block).tobytes() != chain.payload(block).tobytes():
                    self.wrong(f"wrong bytes in block {block} of chain {chain.number} of {chain.owner}")
            return len(lease)
