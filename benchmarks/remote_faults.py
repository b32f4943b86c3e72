"""What do clients notice of a remote store that hangs, dies, is slow, loses, is full, or lies?

A daemon with small local tiers, its remote tier in a real redis or Valkey behind a proxy. A client gets what is in
DRAM, gets what may be remote, gets what is nowhere, and puts; it compares every byte. Each fault lasts 60 s (5 s with
--quick) and is compared with the time before it: failed requests, wrong bytes, p99 of gets from DRAM and of puts. After
it: how long until a block is read from the remote store again.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' servers

import redis
from support.report import AT_LEAST, Row, main, progress, within
from support.timing import percentile
from support.unix_proxy import UnixProxy, unix_proxy

from kvstore_client import KVStoreError, Session
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.remote_servers import RedisServer, redis_server
from tests.reference.running_daemon import RunningDaemon, running_daemon

MODEL = model()
BLOCKS = 32
LOCAL, REMOTE = range(4), range(100, 112)  # conversations: asked for all the time; evicted from DRAM and NVMe
SETTINGS = (
    "host.capacity=6MiB", "host.staging=1MiB", "host.arena=1MiB", "nvme.capacity=2MiB", "nvme.slab=1MiB",
    "tier.remote.kind=remote", "tier.remote.share=all", "tier.remote.timeout_ms=1000",
)  # fmt: skip
RECOVERY_S, P99_TARGET, WHOLE_TARGET, PATIENCE_S = 5.0, 1.1, 0.99, 60.0


@dataclass
class Seen:
    """What a client saw: seconds of whole gets from DRAM and of puts; requests, and of these how many failed and had
    wrong bytes; gets of conversations in use, and how many of them found all blocks; blocks read from slower tiers."""

    gets: list[float] = field(default_factory=list)
    puts: list[float] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    wrong: int = 0
    wanted: int = 0
    whole: int = 0
    loaded_bytes: int = 0


class Client:
    """Calls `step` until the time is up."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._new = 10_000

    def run(self, seconds: float) -> Seen:
        seen, end, turn = Seen(), time.monotonic() + seconds, 0
        while time.monotonic() < end:
            turn += 1
            if not self._get(LOCAL[turn % len(LOCAL)], seen, is_in_use=True):
                self._put(LOCAL[turn % len(LOCAL)], BLOCKS, seen)  # as an engine does that has computed them
            if turn % 4 == 0:
                self._get(REMOTE[turn // 4 % len(REMOTE)], seen)
            if turn % 6 == 0:
                self._get(1_000_000 + turn, seen)  # nowhere
            if turn % 5 == 0:
                self._new += 1
                self._put(self._new, 4, seen)
        return seen

    def _get(self, number: int, seen: Seen, *, is_in_use: bool = False) -> bool:
        """Whether all blocks were there."""
        seen.requests += 1
        began = time.perf_counter()
        try:
            with self._session.get(tokens_of(number, BLOCKS), deadline_s=0.5) as lease:
                seconds = time.perf_counter() - began
                seen.loaded_bytes += lease.promoted_bytes
                if is_in_use:
                    seen.wanted += 1
                    seen.whole += lease.blocks == BLOCKS
                    if lease.blocks == BLOCKS and not lease.promoted_bytes:
                        seen.gets.append(seconds)
                if not holds(lease, payloads_of(number, lease.blocks, MODEL)):
                    seen.wrong += 1
                return lease.blocks == BLOCKS
        except KVStoreError:
            seen.failed += 1
            return False

    def _put(self, number: int, blocks: int, seen: Seen) -> None:
        seen.requests += 1
        payloads = payloads_of(number, blocks, MODEL)
        began = time.perf_counter()
        try:
            self._session.put(tokens_of(number, blocks), payloads=payloads)
            if blocks < BLOCKS:
                seen.puts.append(time.perf_counter() - began)
        except KVStoreError:
            seen.failed += 1


@dataclass
class Fault:
    name: str
    begin: Callable[[], None]
    end: Callable[[], None]


def measure(quick: bool) -> list[Row]:
    seconds = 5.0 if quick else 60.0
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfaults-")))
        server = stack.enter_context(redis_server(folder))
        proxy = stack.enter_context(unix_proxy(server.path, folder / "proxy"))
        daemon = stack.enter_context(running_daemon(*SETTINGS, f"tier.remote.url=unix://{folder}/proxy"))
        session = stack.enter_context(daemon.connect(MODEL))
        _fill(daemon, session)
        client = Client(session)
        client.run(2.0)
        for fault in _faults(server, proxy):
            progress(f"{fault.name}, {seconds:.0f} s ...")
            before = client.run(seconds / 2)
            fault.begin()
            corrupt = daemon.status().counters["corrupt_blocks"]
            try:
                during = client.run(seconds)
            finally:
                fault.end()
            corrupt = daemon.status().counters["corrupt_blocks"] - corrupt
            progress(f"{fault.name}: {corrupt} values rejected, {during.loaded_bytes >> 10} KiB loaded")
            rows += _rows(fault.name, before, during, _recovery_s(daemon, session))
    return rows


def _fill(daemon: RunningDaemon, session: Session) -> None:
    for number in (*REMOTE, *LOCAL):
        former = daemon.tiers()["remote"].blocks
        session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL), wait="settled")
        _until(lambda former=former: daemon.tiers()["remote"].blocks >= former + BLOCKS)  # type: ignore[misc]


def _faults(server: RedisServer, proxy: UnixProxy) -> Iterator[Fault]:
    def set_proxy(delay_s: float = 0.0, loss: float = 0.0) -> None:
        proxy.delay_s, proxy.loss = delay_s, loss

    yield Fault("hangs", server.freeze, server.thaw)
    yield Fault("latency of 50 ms", lambda: set_proxy(delay_s=0.025), set_proxy)
    yield Fault("1 % of pieces lost", lambda: set_proxy(loss=0.01), set_proxy)
    yield Fault("full", lambda: _limit(server, 1), lambda: _limit(server, 0))
    with _changed(server) as (garbage, swap, restore):
        yield Fault("other blocks' values", swap, restore)
        yield Fault("garbage", garbage, restore)
    yield Fault("killed", server.kill, server.start)


def _limit(server: RedisServer, nbytes: int) -> None:
    with closing(redis.Redis.from_url(server.url)) as client:
        client.config_set("maxmemory", nbytes)


@contextmanager
def _changed(server: RedisServer) -> Iterator[tuple[Callable[[], None], Callable[[], None], Callable[[], None]]]:
    """Three actions: all values become garbage; each becomes another one's; all are as they were."""
    with closing(redis.Redis.from_url(server.url)) as client:
        kept: dict[bytes, bytes] = {key: client.get(key) for key in client.scan_iter()}  # type: ignore[misc]
        keys = list(kept)

        def garbage() -> None:
            for at, key in enumerate(keys):
                client.set(key, bytes([at % 251]) * len(kept[key]))

        def swap() -> None:
            for key, other in zip(keys, [*keys[1:], keys[0]], strict=True):
                client.set(key, kept[other])

        def restore() -> None:
            for key in keys:
                client.set(key, kept[key])

        yield garbage, swap, restore


def _recovery_s(daemon: RunningDaemon, session: Session) -> float:
    """Until a get has a block from the remote store. What a store has lost is put again, as an engine would."""
    began, former = time.monotonic(), daemon.tiers()["remote"].promoted_blocks
    for number in itertools.cycle(REMOTE):
        with session.get(tokens_of(number, BLOCKS)) as lease:
            found = lease.blocks
        seconds = time.monotonic() - began
        if daemon.tiers()["remote"].promoted_blocks > former or seconds > PATIENCE_S:
            break
        if found < BLOCKS:
            session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL))
    return seconds


def _rows(name: str, before: Seen, during: Seen, recovery_s: float) -> list[Row]:
    progress(f"{name}: {during.requests} requests, {during.failed} failed, {during.wrong} wrong")
    p99 = [(percentile(one.gets, 99) * 1e3, percentile(one.puts, 99) * 1e3) for one in (before, during)]
    return [
        within(f"{name}: failed requests", during.failed, "", 1e-9),
        within(f"{name}: wrong bytes", during.wrong, "", 1e-9),
        Row(
            f"{name}: conversations in use found whole",
            during.whole / during.wanted,
            "",
            before.whole / before.wanted,
            "before the fault",
            AT_LEAST,
            WHOLE_TARGET,
        ),
        Row(f"{name}: p99 of a get from DRAM", p99[1][0], "ms", p99[0][0], "before the fault", target=P99_TARGET),
        Row(f"{name}: p99 of a put", p99[1][1], "ms", p99[0][1], "before the fault", target=P99_TARGET),
        within(f"{name}: served again after", recovery_s, "s", RECOVERY_S),
    ]


def _until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the remote tier was not filled in time")
        threading.Event().wait(0.02)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
