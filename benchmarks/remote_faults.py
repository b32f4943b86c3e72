"""What do clients notice of a remote store that hangs, dies, is slow, loses, is full, or lies?

Two daemons with small local tiers, each with its remote tier in a real redis or Valkey behind a proxy. Two clients of
two tenants work with both, by turns of a quarter of a second (`support/faults_client.py`), and compare every byte. One
daemon's store has the fault, for 60 s each (5 s with --quick), the other's is well: failed requests, wrong bytes, p99
of gets from DRAM and of puts. After it: how long until a block is read from the remote store again. Needs root, since
one client becomes another user.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' servers

import redis
from support.faults_client import BLOCKS, MODEL, REMOTE, ClientProcess, Seen, client_process
from support.report import AT_LEAST, Row, main, progress, within
from support.timing import percentile
from support.unix_proxy import UnixProxy, unix_proxy

from kvstore_client import Session
from tests.reference.conversations import payloads_of, tokens_of
from tests.reference.remote_servers import RedisServer, redis_server
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

SETTINGS = (
    "host.capacity=16MiB", "host.staging=4MiB", "limits.staging_per_client=1MiB", "host.arena=1MiB",
    "nvme.capacity=4MiB", "nvme.slab=1MiB",
    "tier.remote.kind=remote", "tier.remote.share=all", "tier.remote.timeout_ms=1000", "tier.remote.capacity=64MiB",
)  # fmt: skip
TENANTS = (os.geteuid(), 65534)
RECOVERY_S, P99_TARGET, WHOLE_TARGET, PATIENCE_S = 5.0, 1.1, 0.99, 60.0
WARM_UP_S, FILL_S = 3.0, 2.0
AGAIN_S = 1.0  # values are falsified again after so long: those that were found false are written anew
_RECOVERY = 500_000  # the first of conversations put meanwhile
Values = dict[bytes, bytes]


@dataclass
class Place:
    """A daemon and its store."""

    server: RedisServer
    proxy: UnixProxy
    daemon: RunningDaemon
    names: list[list[bytes]]  # of the values in the store, by tenant


@dataclass
class Fault:
    name: str
    begin: Callable[[], None]
    end: Callable[[], None]
    loses_all: bool = False


def measure(quick: bool) -> list[Row]:
    seconds = 5.0 if quick else 60.0
    rows: list[Row] = []
    with ExitStack() as stack:
        places = [stack.enter_context(_place()) for _ in ("with the fault", "well")]
        ill, directories = places[0], [place.daemon.directory for place in places]
        clients = [stack.enter_context(client_process(directories, uid, own)) for own, uid in enumerate(TENANTS)]
        for which, place in enumerate(places):
            for client in clients:
                _fill(place, client, which)
        session = stack.enter_context(ill.daemon.connect(MODEL))
        _work(clients, WARM_UP_S)
        for fault in _faults(ill):
            progress(f"{fault.name}, {seconds:.0f} s ...")
            fault.begin()
            corrupt = ill.daemon.status().counters["corrupt_blocks"]
            try:
                during, well = _work(clients, seconds)
            finally:
                fault.end()
            corrupt = ill.daemon.status().counters["corrupt_blocks"] - corrupt
            progress(f"{fault.name}: {corrupt} values rejected, {during.loaded_bytes >> 10} KiB loaded")
            rows += _rows(fault.name, well, during, _recovery_s(ill.daemon, session, fault))
    return rows


@contextmanager
def _place() -> Iterator[Place]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfaults-")))
        server = stack.enter_context(redis_server(folder))
        proxy = stack.enter_context(unix_proxy(server.path, folder / "proxy"))
        daemon = stack.enter_context(running_daemon(*SETTINGS, f"tier.remote.url=unix://{folder}/proxy"))
        daemon.directory.chmod(0o711)
        yield Place(server, proxy, daemon, [])


def _work(clients: list[ClientProcess], seconds: float) -> tuple[Seen, Seen]:
    """What all clients saw at the first daemon, and at the second."""
    began_s = time.monotonic() + 0.05
    for client in clients:
        client.begin(began_s, 2 * seconds)  # half of it with each
    first, second = (sum(seen, start=Seen()) for seen in zip(*(client.end() for client in clients), strict=True))
    return first, second


def _fill(place: Place, client: ClientProcess, which: int) -> None:
    """Wait after each conversation until the store has it, too."""

    def settled() -> bool:
        nonlocal wanted
        has_come = eventually(lambda: place.daemon.tiers()["remote"].blocks >= wanted, FILL_S)
        wanted += BLOCKS * has_come
        return has_come

    wanted = place.daemon.tiers()["remote"].blocks + BLOCKS
    client.fill(which, settled)
    with closing(redis.Redis.from_url(place.server.url)) as store:
        others = {name for names in place.names for name in names}
        place.names.append(sorted(name for name in store.scan_iter() if name not in others))


def _faults(place: Place) -> Iterator[Fault]:
    server = place.server

    def set_proxy(delay_s: float = 0.0, loss: float = 0.0) -> None:
        place.proxy.delay_s, place.proxy.loss = delay_s, loss

    yield Fault("hangs", server.freeze, server.thaw)
    yield Fault("latency of 50 ms", lambda: set_proxy(delay_s=0.025), set_proxy)
    yield Fault("1 % of pieces lost", lambda: set_proxy(loss=0.01), set_proxy)
    yield Fault("full", lambda: _limit(server, 1), lambda: _limit(server, 0))
    for name, falsified in (
        ("other blocks' values", _of_other_blocks),
        ("another tenant's values", _of_other_tenant),
        ("garbage", _garbage),
    ):
        lies = Lies(place, falsified)
        yield Fault(name, lies.begin, lies.end)
    yield Fault("killed", server.kill, server.start, loses_all=True)


def _limit(server: RedisServer, nbytes: int) -> None:
    with closing(redis.Redis.from_url(server.url)) as client:
        client.config_set("maxmemory", nbytes)


def _of_other_blocks(names: list[list[bytes]], values: Values) -> Values:
    return {name: values[of[at - 1]] for of in names for at, name in enumerate(of)}


def _of_other_tenant(names: list[list[bytes]], values: Values) -> Values:
    pairs = list(zip(*names, strict=False))
    return {one: values[other] for one, other in (*pairs, *((b, a) for a, b in pairs))}


def _garbage(names: list[list[bytes]], values: Values) -> Values:
    return {name: bytes([at % 251]) * len(values[name]) for of in names for at, name in enumerate(of)}


class Lies:
    """Falsifies the values of a store, and again those that were written anew, until its end: then all are true."""

    def __init__(self, place: Place, falsified: Callable[[list[list[bytes]], Values], Values]) -> None:
        with closing(redis.Redis.from_url(place.server.url)) as store:
            found = {name: store.get(name) for names in place.names for name in names}
        self._true: Values = {name: value for name, value in found.items() if isinstance(value, bytes)}
        names = [[name for name in of if name in self._true] for of in place.names]
        self._false = falsified(names, self._true)
        self._url = place.server.url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def begin(self) -> None:
        self._set(self._false)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._set(self._true)

    def _repeat(self) -> None:
        while not self._ended.wait(AGAIN_S):
            self._set(self._false)

    def _set(self, values: Values) -> None:
        with closing(redis.Redis.from_url(self._url)) as store:
            store.mset(values)  # type: ignore[arg-type]


def _recovery_s(daemon: RunningDaemon, session: Session, fault: Fault) -> float:
    """Until a get has a block from the remote store, or a block was written to one that has lost all. What a store has
    lost is put again, as an engine would; new conversations take the others' place in DRAM and NVMe."""
    began, former = time.monotonic(), daemon.tiers()["remote"]
    for new, number in enumerate(itertools.cycle(REMOTE), _RECOVERY):
        session.put(tokens_of(new, BLOCKS), payloads=payloads_of(new, BLOCKS, MODEL))
        with session.get(tokens_of(number, BLOCKS)) as lease:
            found = lease.blocks
        seconds, now = time.monotonic() - began, daemon.tiers()["remote"]
        is_read = now.promoted_blocks > former.promoted_blocks
        if is_read or (fault.loses_all and now.bytes_written > former.bytes_written) or seconds > PATIENCE_S:
            break
        if found < BLOCKS:
            session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL))
    return seconds


def _rows(name: str, well: Seen, during: Seen, recovery_s: float) -> list[Row]:
    progress(f"{name}: {during.requests} requests, {during.failed} failed, {during.wrong} wrong")
    base_name = "with a store that is well"
    row = partial(Row, baseline_name=base_name)
    p50, p99 = (
        [(percentile(one.gets, part) * 1e3, percentile(one.puts, part) * 1e3) for one in (well, during)]
        for part in (50, 99)
    )
    for what, at in (("get", 0), ("put", 1)):
        ratios = ", ".join(f"{each[1][at] / each[0][at]:.2f}x" for each in (p50, p99))
        progress(f"{name}: p50 and p99 of a {what}: {ratios}")
    whole = [seen.whole / max(1, seen.wanted) for seen in (well, during)]
    return [
        within(f"{name}: failed requests", during.failed, "", 1e-9),
        within(f"{name}: wrong bytes", during.wrong, "", 1e-9),
        row(f"{name}: in use, found whole", whole[1], "", whole[0], bound=AT_LEAST, target=WHOLE_TARGET),
        row(f"{name}: p50 of a get from DRAM", p50[1][0], "ms", p50[0][0]),
        row(f"{name}: p99 of a get from DRAM", p99[1][0], "ms", p99[0][0], target=P99_TARGET),
        row(f"{name}: p50 of a put", p50[1][1], "ms", p50[0][1]),
        row(f"{name}: p99 of a put", p99[1][1], "ms", p99[0][1], target=P99_TARGET),
        within(f"{name}: served again after", recovery_s, "s", RECOVERY_S),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
