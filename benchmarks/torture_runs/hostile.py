"""Hostile clients of a running daemon: a tenant that tries for another's blocks, and for the daemon's life.

Owns rounds of attacks by a tenant and by a reader of a shared pool, in the process of this harness, on the handshake
socket, direct streams, gRPC and shared memory. The victim is another tenant, whose keys the attackers know; its
payloads carry a mark. The judge is the mark, the victim's own reads, and the kernel's account of the daemon.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import numpy as np

import kvstore_client
from kvstore_client import Fingerprint, LayerGroup, Session
from kvstore_proto.framing import Frames, frame
from kvstore_proto.v1 import handshake_pb2 as hs
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1 import unary_pb2
from torture_runs.figures import Assignment, Clock, Figures
from torture_runs.hostile_inputs import Caller, Inputs, connect
from torture_runs.mortal_daemon import MortalDaemon

MODEL = Fingerprint(
    "torture", "hostile", block_tokens=16, engine_block_tokens=16, groups=(LayerGroup(0, "full", 0, (0,), 256),)
)
MARK = hashlib.sha256(b"the victim's").digest()
TOKENS = np.arange(8 * MODEL.block_tokens, dtype=np.int32)
PAYLOADS = [np.frombuffer(MARK * 128, np.uint8)] * 8
OTHERS = [np.zeros(len(MARK) * 128, np.uint8)] * 8  # the attacker's
SETTINGS = (
    "host.capacity=48MiB", "host.staging=16MiB", "host.arena=2MiB", "host.prefault=false", "host.warm_restart=off",
    "nvme.capacity=64MiB", "nvme.slab=4MiB", "nvme.io_threads=2", "limits.max_block=1MiB", "host.policy=lru",
    "limits.staging_per_client=2MiB", "unary.message=1MiB", "host.min_free=0", "host.prefault_ahead=2MiB",
)  # fmt: skip
VARIANTS = (("host.sealed=true",), ("put.in_place=true",), ())
TENANTS = """
[[tenant]]
name = "victim"
socket = true
host_min = "8MiB"
[[tenant]]
name = "attacker"
socket = true
host_max = "8MiB"
nvme_max = "8MiB"
[[tenant]]
name = "reader"
socket = true
[[tenant]]
name = "prompts"
publisher = "victim"
readers = ["reader"]
"""
LIFE_ROUNDS = 400
JUDGED_EVERY = 20
MEMORY_BYTES = 96 << 20  # that a life's attacks may add to what the daemon has of its own
DESCRIPTORS = 64  # likewise, once the attackers' connections have ended
UNARY = "/kvstore.v1.KVStoreUnary/"
UNARY_REQUESTS = {
    "Lookup": unary_pb2.UnaryLookupRequest, "Put": unary_pb2.UnaryPutRequest, "Get": unary_pb2.UnaryGetRequest,
    "Prefetch": unary_pb2.UnaryPrefetchRequest, "Touch": unary_pb2.UnaryTouchRequest,
    "Delete": unary_pb2.UnaryDeleteRequest,
}  # fmt: skip


class ListingDaemon(MortalDaemon):
    """A daemon with the tenants of this harness, and a token of the attacker."""

    def arguments(self) -> list[str]:
        config, tokens = self.directory / "kvstored.toml", self.directory / "tokens"
        config.write_text(TENANTS)
        tokens.touch(0o600)
        tokens.write_text(f"attacker {hashlib.sha256(b'attacker').hexdigest()}\n")
        return [*super().arguments(), "--config", str(config), "--set", f"unary.tokens_file={tokens}"]


def torture(assignment: Assignment, figures: Figures) -> None:
    """Figures: `hostile_inputs`, `hostile_by_kind`, `hostile_successes`, `hostile_crashes`, and what the daemon's
    memory grew by beyond its bound."""
    clock, rng, life = Clock(assignment), random.Random(assignment.seed), assignment.seed
    while clock.goes_on(figures.counts["hostile_inputs"]):
        directory = assignment.directory / f"hostile-{life}"
        with ListingDaemon(directory, *SETTINGS, *VARIANTS[life % len(VARIANTS)]) as daemon:
            daemon.start()
            with _stored(daemon) as sessions:
                scene = Scene(daemon, sessions, rng, figures)
                for number in range(LIFE_ROUNDS):
                    if not clock.goes_on(figures.counts["hostile_inputs"]) or not daemon.is_running:
                        break
                    scene.attack()
                    if number % JUDGED_EVERY == 0:
                        scene.judge()
                    figures.heartbeat()
                scene.judge()
            if daemon.is_running and (status := daemon.stop()):
                figures.fail("hostile_crashes", f"an orderly stop ended with status {status}: {daemon.log}")
            if (found := daemon.whole_log.find("Traceback")) >= 0:
                figures.fail("daemon_tracebacks", daemon.whole_log[max(found - 500, 0) : found + 3000])
        life += 1


@contextmanager
def _stored(daemon: ListingDaemon) -> Iterator[list[Session]]:
    """Sessions of the victim, about its own blocks and its pool's, and of the attacker. All have stored the same
    tokens."""
    with ExitStack() as stack:
        sessions = []
        for tenant, pool, payloads in (
            ("victim", "", PAYLOADS), ("victim", "prompts", PAYLOADS), ("attacker", "", OTHERS)
        ):  # fmt: skip
            session = kvstore_client.connect(
                daemon.own_socket(tenant), fingerprint=MODEL, required=True, deadline_s=30.0, connect_timeout_s=30.0,
                staging_bytes=1 << 20, pool=pool,
            )  # fmt: skip
            sessions.append(stack.enter_context(session))
            receipt = session.put(TOKENS, payloads=payloads, durability="always", deadline_s=30.0)
            if receipt.visible_blocks != len(PAYLOADS):
                raise RuntimeError(f"{tenant} could not store: {receipt}")
        yield sessions


class Scene:
    """A daemon under attack. `sessions` are the victim's two, and the attacker's."""

    def __init__(self, daemon: ListingDaemon, sessions: list[Session], rng: random.Random, figures: Figures) -> None:
        self.daemon, self.sessions, self.rng, self.figures = daemon, sessions[:2], rng, figures
        *of_victim, own = (chain.packed for session in sessions if (chain := session.keys(TOKENS)) is not None)
        self.victims_keys = b"".join(of_victim)
        known = [packed[at : at + 16] for packed in (self.victims_keys, own, own) for at in range(0, len(packed), 16)]
        self.inputs = Inputs(rng, [*known, self.victims_keys, own, own, own, MODEL.canonical(), b"victim"])
        self._attacks: list[Callable[[], None]] = [
            self.handshake, self.stream, self.stream, self.unary, self.below_grpc, self.others_names, self.memory,
            self.descriptors, self.pool,
        ]  # fmt: skip
        self._memory_bytes = daemon.anonymous_bytes() + MEMORY_BYTES
        self._most_descriptors = daemon.descriptors() + DESCRIPTORS

    def attack(self) -> None:
        attack = self.rng.choice(self._attacks)
        self.figures.add_kind("hostile_by_kind", attack.__name__)
        with suppress(OSError):  # the daemon hung up, as it may
            attack()

    def judge(self) -> None:
        """Look whether the daemon lives, answers, and still has what the victim stored."""
        if not self.daemon.is_running:
            self.figures.fail("hostile_crashes", f"the daemon ended: {self.daemon.log}")
            return
        for session, whose in zip(self.sessions, ("its own", "its pool's"), strict=True):
            if session.ping(30.0) is None:
                self.figures.fail("hostile_crashes", "the daemon does not answer another client within 30 s")
                return
            with session.get(TOKENS, deadline_s=30.0) as lease:
                if len(lease) != len(PAYLOADS):
                    self.success(f"the victim finds {len(lease)} of {whose} {len(PAYLOADS)} blocks: {lease.reason}")
                elif not all(np.array_equal(lease.payload(at), each) for at, each in enumerate(PAYLOADS)):
                    self.success(f"the victim reads other bytes of {whose}")
        self.figures.at_least("over_hostile_memory_bytes", max(0, self.daemon.anonymous_bytes() - self._memory_bytes))
        self.figures.at_least("over_hostile_descriptors", max(0, self.daemon.descriptors() - self._most_descriptors))

    def success(self, what: str) -> None:
        self.figures.fail("hostile_successes", what)

    def caller(self, tenant: str = "attacker", **fields: Any) -> Caller:
        hello: dict[str, Any] = {"protocol_version": 1, "client_name": "x", "fingerprint": MODEL.canonical()}
        return Caller(self.daemon.own_socket(tenant), hs.Hello(**(hello | {"staging_bytes": 1 << 20} | fields)))

    # Attacks

    def handshake(self) -> None:
        """Packets of any content, before and after a hello."""
        path = self.daemon.own_socket("attacker") / "handshake.sock"
        with connect(path, socket.SOCK_SEQPACKET) as connection, suppress(OSError):
            for _ in range(self.rng.randrange(1, 6)):
                packet = self.inputs.message(hs.ClientPacket).SerializeToString()
                connection.send(self.inputs.spoilt(packet) if self.rng.random() < 0.5 else packet)
                self.figures.add("hostile_inputs")
                _, arrived, _, _ = socket.recv_fds(connection, 1 << 17, 4)
                for descriptor in arrived:
                    self._look_for_the_mark(descriptor)
                    os.close(descriptor)

    def stream(self) -> None:
        """Frames of any content on a direct stream; then a ping on the session, which must be answered."""
        with self.caller() as caller:
            self.inputs.known[-1] = caller.welcome.session_token
            stream = caller.open_stream()
            messages = []
            for number in range(self.rng.choice((1, 5, 40))):
                request = self.inputs.message(pb.Request)
                request.request_id = number + 1  # type: ignore[attr-defined]
                data = request.SerializeToString()
                messages.append(self.inputs.spoilt(data) if self.rng.random() < 0.2 else data)
            self.figures.add("hostile_inputs", len(messages))
            with suppress(OSError):
                stream.sendall(self.inputs.frames(messages))
            if self.rng.random() < 0.3:
                return  # gone in the middle of it
            stream = caller.open_stream()
            stream.sendall(frame(pb.Request(request_id=1, ping=pb.Ping()).SerializeToString()))
            if not stream.recv(1):
                self.figures.fail("hostile_crashes", "a new stream of a session is not answered")

    def unary(self) -> None:
        """Unary calls of any content, with a token or without."""
        target = f"unix:{self.daemon.socket_dir}/unary.sock"
        metadata = (("authorization", "Bearer attacker"),)
        with grpc.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            for _ in range(self.rng.randrange(1, 8)):
                method, kind = self.rng.choice(list(UNARY_REQUESTS.items()))
                request = self.inputs.message(kind)
                data = request.SerializeToString()
                data = self.inputs.spoilt(data) if self.rng.random() < 0.3 else data
                self.figures.add("hostile_inputs")
                with suppress(grpc.RpcError):
                    reply = channel.unary_unary(UNARY + method)(data, timeout=30, metadata=metadata)
                    if MARK in reply:
                        self.success(f"{method} gave the attacker the victim's bytes")

    def below_grpc(self) -> None:
        """Bytes that are no HTTP/2, and some that begin as if they were."""
        for name in self.rng.sample(("data.sock", "unary.sock", "admin.sock"), 2):
            with connect(self.daemon.socket_dir / name, socket.SOCK_STREAM) as connection, suppress(OSError):
                self.figures.add("hostile_inputs")
                begin = self.rng.choice((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"))
                connection.sendall(begin + self.rng.randbytes(self.rng.choice((0, 9, 100, 70000))))

    def others_names(self) -> None:
        """Sessions, leases and keys that are the victim's."""
        with self.caller() as caller:
            self.figures.add("hostile_inputs", 6)
            stream, answers = caller.open_stream(), Frames(4 << 20)
            theirs = pb.KeySet(keys=self.victims_keys)
            leases = range(1, 3000)
            requests = [
                pb.Request(lookup=pb.Lookup(sets=[theirs])), pb.Request(acquire=pb.Acquire(set=theirs)),
                pb.Request(touch=pb.Touch(set=theirs, lease_ids=leases)), pb.Request(delete=pb.Delete(set=theirs)),
                pb.Request(release=pb.Release(lease_ids=leases)),
            ]  # fmt: skip
            with self.sessions[0].get(TOKENS, deadline_s=30.0) as held:
                for number, request in enumerate(requests, 1):
                    request.request_id = number
                    stream.sendall(frame(request.SerializeToString()))
                    reply = _answer(stream, answers)
                    found = (
                        sum(each.usable_blocks for each in reply.lookup.sets), reply.acquire.blocks,
                        reply.touch.touched + reply.touch.renewed, reply.delete.deleted, reply.release.released,
                    )  # fmt: skip
                    if any(found):
                        self.success(f"the victim's keys or leases did something for another: {reply}")
                if not held.valid:
                    self.success("the victim's lease ended")
        token = self.rng.choice((self.rng.randbytes(16), b"", bytes(16), caller.welcome.session_token))
        with grpc.insecure_channel(f"unix:{self.daemon.socket_dir}/data.sock") as channel:
            call = channel.stream_stream("/kvstore.v1.KVStore/Session")(
                iter([pb.Request(request_id=1, ping=pb.Ping()).SerializeToString()]),
                metadata=(("kvstored-session-bin", token),), timeout=30,
            )  # fmt: skip
            with suppress(grpc.RpcError):
                next(call)
                self.success("a forged or ended session token opened a stream")

    def memory(self) -> None:
        """Arenas of others, and one's own against their rights."""
        with self.caller() as caller:
            for number in {*range(24), *caller.welcome.arena_ids, self.rng.getrandbits(32)}:
                self.figures.add("hostile_inputs")
                with suppress(OSError):
                    granted = caller.arena(number, writable=self.rng.random() < 0.3)
                    if granted is not None:
                        self._look_for_the_mark(granted[0])
                        self._change(*granted)

    def descriptors(self) -> None:
        """Descriptors of all kinds, sent where none belongs."""
        with self.caller() as caller, tempfile.TemporaryFile() as huge, ExitStack() as stack:
            huge.truncate(1 << 40)
            sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
            fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
            ours = [sealed, *os.pipe(), os.open("/", os.O_RDONLY), os.open("/dev/zero", os.O_RDWR)]
            for descriptor in ours:
                stack.callback(os.close, descriptor)
            for _ in range(self.rng.randrange(1, 5)):
                sent = self.rng.choices(
                    [*ours, huge.fileno(), caller.connection.fileno()], k=self.rng.choice((1, 4, 200))
                )
                self.figures.add("hostile_inputs")
                caller.ask(self.inputs.message(hs.ClientPacket).SerializeToString(), sent)

    def pool(self) -> None:
        """A pool's reader that would change it, and a stranger who would be a reader."""
        with self.caller(pool="prompts") as stranger:
            self.figures.add("hostile_inputs")
            if stranger.first.HasField("welcome"):
                self.success("a tenant that is not listed opened a session about a pool")
        with self.caller("reader", pool="prompts") as reader:
            stream, answers = reader.open_stream(), Frames(4 << 20)
            pool = pb.KeySet(keys=self.victims_keys[len(self.victims_keys) // 2 :])
            for number, request in enumerate(
                (
                    pb.Request(delete=pb.Delete(set=pool)),
                    pb.Request(touch=pb.Touch(set=pool, terms=pb.Terms(ttl_s=1))),
                    pb.Request(touch=pb.Touch(set=pool, terms=pb.Terms(pin="x"))),
                    pb.Request(reserve_slots=pb.ReserveSlots(payload_bytes=4096, blocks=1)),
                    pb.Request(store=pb.Store(keys=pool.keys, parents=pool.keys, pages=[1] * 8, payload_bytes=4096)),
                ),
                1,
            ):
                self.figures.add("hostile_inputs")
                request.request_id = number
                stream.sendall(frame(request.SerializeToString()))
                reply = _answer(stream, answers)
                if reply.error.kind != pb.ERROR_KIND_FORBIDDEN:
                    self.success(f"a reader's change was not refused: {reply}")
            for number in reader.welcome.arena_ids:
                granted = reader.arena(number)
                if granted is not None:
                    self._change(*granted)

    # What they look for

    def _look_for_the_mark(self, descriptor: int) -> None:
        with suppress(OSError, ValueError), mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
            if memory.find(MARK) >= 0:
                self.success("the victim's bytes are in memory that the attacker was given")

    def _change(self, descriptor: int, nbytes: int) -> None:
        """Try to write to an arena, or to resize it, by the descriptor that was granted."""
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            return  # of puts in place
        with suppress(OSError, ValueError):
            mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE).close()
            self.success("an arena was mapped writable by its read-only descriptor")
        for change in (
            lambda: os.pwrite(descriptor, b"x", 0),
            lambda: os.ftruncate(descriptor, 0),
            lambda: os.truncate(f"/proc/self/fd/{descriptor}", 0),
            lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with suppress(OSError, ValueError):
                change()
                self.success("an arena was changed by its read-only descriptor")


def _answer(stream: socket.socket, answers: Frames) -> pb.Response:
    """Return the next answer on a direct stream. Raises OSError when it has ended."""
    while (message := answers.take()) is None:
        data = stream.recv(1 << 16)
        if not data:
            raise ConnectionError("the stream has ended")
        answers.feed(data)
    return pb.Response.FromString(message)
