"""Tenants beside each other at one daemon: what one learns of another, what a flood takes, and what is served too late.

- `timing_auc_distance`: one tenant times lookups and puts of blocks, of which another tenant, or a shared pool that is
  not for it, has half; and hellos that name that pool, or none. The area under the ROC curve of these times says how
  well they tell the halves apart; its distance from 0.5 is 0 for not at all.
- `prime_probe_auc`: one tenant fills DRAM and counts which of its blocks are gone after another tenant did, or did not,
  store some. Room that tenants share shows that; the second figure is with maxima that leave each its own room.
- `flood_hits_lost`, `flood_lookup_p99`: a quiet tenant reads what it keeps within its guaranteed minimum, while another
  stores at 50 times its rate. Turns with and without the flood alternate.
- `stale_versions`: lookups by sessions of changing weights; blocks with a time to live and pinned blocks among them.
  Hits of another version, of what has expired, and pinned blocks that are gone are counted.

A tenant here is a group: this process changes its effective group while it connects, so it must be root.

    python benchmarks/tenants.py [--quick] [--json] [--only ROW ...]
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import encryption
import numpy as np
import numpy.typing as npt
from support.daemon import BLOCK_TOKENS, MIB, BenchDaemon, bench_daemon, model, payloads
from support.report import AT_MOST, Measure, Row, parser_of, percentile, printed, progress, within

from kvstore_client import Session
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.v1 import handshake_pb2 as hs

GROUPS = {"quiet": 61001, "other": 61002}
TENANTS = "".join(f'[[tenant]]\nname = "{name}"\ngids = [{gid}]\n%({name})s' for name, gid in GROUPS.items())
BLOCK_BYTES = 4096
MODEL = model(BLOCK_BYTES)
SLOT_BYTES = 2 * BLOCK_BYTES
FLOOD = 50  # puts for each round of the quiet tenant
OPTIONS: dict[str, Any] = {"staging_bytes": 4 * MIB}


@contextmanager
def acting_as(tenant: str) -> Iterator[None]:
    """Let connections that this process makes meanwhile belong to `tenant`."""
    before = os.getegid()
    os.setegid(GROUPS[tenant])
    try:
        yield
    finally:
        os.setegid(before)


def connect(daemon: BenchDaemon, tenant: str, fingerprint: Fingerprint = MODEL, pool: str = "") -> Session:
    with acting_as(tenant):
        return daemon.connect(fingerprint, **OPTIONS, pool=pool)


def tenants(**settings: str) -> str:
    """Return a configuration with both tenants, each with its `settings`."""
    return TENANTS % (dict.fromkeys(GROUPS, "") | settings)


def tokens_of(number: int, blocks: int) -> npt.NDArray[np.int32]:
    """Return a prompt of `blocks` blocks that no other number has."""
    tokens = np.arange(blocks * BLOCK_TOKENS, dtype=np.int32)
    tokens[0] = number
    return tokens


def auc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """Return how likely a random one of `positive` is above a random one of `negative`; ties count half."""
    values = np.concatenate([positive, negative])
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    n = len(positive)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * len(negative)))


# What a tenant learns of another by time


def _lookup(session: Session, number: int) -> None:
    session.lookup(tokens_of(number, 1))


def _put(session: Session, number: int) -> None:
    session.put(tokens_of(number, 1), payloads=[_PAYLOAD], durability="none")


def _hello(session: Session, number: int) -> None:
    """Say hello about the pool "prompts", which is there and not for the caller, or about one that is not."""
    name = "prompts" if number % 2 == 0 else "promptz"
    hello = hs.Hello(protocol_version=1, client_name="spy", fingerprint=MODEL.canonical(), pool=name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as spy:
        spy.connect(os.path.join(_SOCKETS[0], "handshake.sock"))
        spy.send(hs.ClientPacket(hello=hello).SerializeToString())
        spy.recv(1 << 16)


_PAYLOAD, _LARGE = payloads(1, BLOCK_BYTES)[0], payloads(1, 16 * BLOCK_BYTES)[0]
PROBES: dict[str, tuple[str, Callable[[Session, int], None]]] = {
    "lookup": ("", _lookup), "put": ("", _put), "lookup of a pool's": ("prompts", _lookup),
    "hello": ("prompts", _hello),
}  # fmt: skip
"""By name: the pool that has half of the blocks, "" for the other tenant itself, and the probe."""
POOL = """[[tenant]]
name = "third"
gids = [61003]
[[tenant]]
name = "prompts"
publisher = "quiet"
readers = ["third"]
"""
_SOCKETS: list[str] = []


def timing(quick: bool) -> list[Row]:
    """Time probes of blocks that another tenant has, and of blocks that nobody has, in random order."""
    count, worst = 3000 if quick else 10_000, 0.0
    with bench_daemon("host.capacity=768MiB", "nvme.enabled=false", config=tenants() + POOL) as daemon:
        _SOCKETS[:] = [str(daemon.socket_dir)]
        for first, (name, (pool, probe)) in enumerate(PROBES.items(), 1):
            with connect(daemon, "quiet", pool=pool) as quiet, connect(daemon, "other") as other:
                numbers = list(range(first * 100_000, first * 100_000 + 2 * count))
                stored = set(numbers[::2])
                for number in stored if probe is not _hello else ():
                    quiet.put(tokens_of(number, 1), payloads=[_PAYLOAD], durability="none")
                random.Random(-first).shuffle(numbers)
                times: dict[bool, list[float]] = {True: [], False: []}
                with acting_as("other"):
                    for warming in range(200):
                        probe(other, 90_000_000 + first * 1000 + warming)
                    for number in numbers:
                        began = time.perf_counter()
                        probe(other, number)
                        times[number in stored].append(time.perf_counter() - began)
            distance = abs(auc(times[True], times[False]) - 0.5)
            progress(f"{name}: distance {distance:.4f} of {len(times[True])} probes of each kind")
            worst = max(worst, distance)
    return [within("timing_auc_distance", worst, "from 0.5", 0.03)]


def prime_and_probe(quick: bool) -> list[Row]:
    """Fill DRAM, let the other tenant store or not, and count own blocks that are gone."""
    rounds, large, rows = 8 if quick else 50, model(16 * BLOCK_BYTES), list[Row]()
    room = ("host.capacity=24MiB", "host.staging=8MiB", "host.arena=1MiB", "nvme.enabled=false")
    shares = {"shared room": "", "a maximum each": 'host_max = "7MiB"\n'}
    for number, (name, share) in enumerate(shares.items()):
        gone: dict[bool, list[float]] = {False: [], True: []}
        with bench_daemon(*room, config=tenants(quiet=share, other=share)) as daemon:  # noqa: SIM117
            with connect(daemon, "other", large) as spy, connect(daemon, "quiet", large) as quiet:
                for turn in range(2 * rounds):
                    primed = [tokens_of(100 * turn + each, 32) for each in range(8)]  # 17 MiB
                    for tokens in primed:
                        spy.put(tokens, payloads=[_LARGE] * 32, durability="none")
                    before = sum(spy.lookup(tokens).blocks for tokens in primed)
                    is_active = bool(turn % 2)
                    if is_active:
                        quiet.put(tokens_of(turn, 32), payloads=[_LARGE] * 32, durability="none")
                    gone[is_active].append(before - sum(spy.lookup(tokens).blocks for tokens in primed))
        found = auc(gone[True], gone[False])
        progress(f"prime and probe, {name}: AUC {found:.3f}")
        rows.append(Row("prime_probe_auc" + "_with_maxima" * number, found, "AUC", 0.5, "nothing learned"))
    return rows


# What a flood takes


def _flood(daemon: BenchDaemon, stop: Any, sent: Any) -> None:
    """Store new blocks without pause, and count the puts in `sent`, until `stop` is set."""
    with connect(daemon, "other") as session:
        while not stop.is_set():
            sent.value += 1
            session.put(tokens_of(1_000_000 + sent.value, 8), payloads=[_PAYLOAD] * 8, durability="none")


class _Turns:
    """The quiet tenant's times and hits, over all turns of one kind."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.hits = self.asked = 0

    def add(self, session: Session, conversations: int, rounds: int, may_go_on: Callable[[int], bool]) -> None:
        """Look up and get `rounds` conversations; `may_go_on(number)` says when the next one has its turn."""
        chance = random.Random(1)
        for number in range(rounds):
            while not may_go_on(number):
                time.sleep(0.002)
            tokens = tokens_of(chance.randrange(conversations), 8)
            began = time.perf_counter()
            session.lookup(tokens)
            self.times.append(time.perf_counter() - began)
            with session.get(tokens) as lease:
                self.hits, self.asked = self.hits + lease.blocks, self.asked + 8
            if lease.blocks < 8:
                session.put(tokens, payloads=[_PAYLOAD] * 8, durability="none")

    @property
    def hit_percent(self) -> float:
        return 100 * self.hits / self.asked


def flood(quick: bool) -> list[Row]:
    """Alternate turns of a quiet tenant alone and beside a flood of `FLOOD` puts for each of its rounds."""
    turns, rounds = (2, 30) if quick else (5, 100)
    conversations = 30 * MIB // (8 * SLOT_BYTES)  # of 32 MiB that are guaranteed
    settings = tenants(quiet='host_min = "32MiB"\nhost_weight = 1\n', other="host_weight = 1\n")
    alone, beside, room = _Turns(), _Turns(), ("host.capacity=128MiB", "host.staging=16MiB", "nvme.enabled=false")
    with bench_daemon(*room, config=settings) as daemon, connect(daemon, "quiet") as quiet:
        for number in range(conversations):
            quiet.put(tokens_of(number, 8), payloads=[_PAYLOAD] * 8, durability="none")
        for _ in range(turns):
            sent, stop = multiprocessing.Value("q", 0), multiprocessing.Event()
            other = multiprocessing.Process(target=_flood, args=(daemon, stop, sent))
            other.start()
            began = time.monotonic()
            beside.add(quiet, conversations, rounds, lambda number: sent.value >= FLOOD * (number + 1))  # noqa: B023
            each_s = (time.monotonic() - began) / rounds
            progress(f"flood: {sent.value / rounds:.0f} puts of 8 blocks for each lookup and get, every {each_s:.2f} s")
            stop.set()
            other.join()
            began = time.monotonic()
            pause_s = min(each_s, 0.2)
            alone.add(quiet, conversations, rounds, lambda number: time.monotonic() > began + number * pause_s)  # noqa: B023
    lost, p99 = alone.hit_percent - beside.hit_percent, [percentile(kind.times, 99) * 1e3 for kind in (beside, alone)]
    return [
        within("flood_hits_lost", max(lost, 0.0), "points", 2.0),
        Row("flood_lookup_p99", p99[0], "ms", p99[1], "without the flood", AT_MOST, 3.0),
    ]


# What is served too late


def stale(quick: bool) -> list[Row]:
    """Count hits of weights of another version, of expired blocks, and pinned blocks that are gone."""
    lookups, versions, prompts = (20_000, 10, 40) if quick else (1_000_000, 50, 200)
    wrong = {"of another version": 0, "expired": 0, "pinned and gone": 0}
    done, chance = 0, random.Random(2)
    limits = ("host.capacity=64MiB", "host.staging=16MiB", "nvme.enabled=false", "limits.pinned_per_tenant=16MiB")
    with bench_daemon(*limits, config=tenants()) as daemon, connect(daemon, "other") as noise:
        for version in range(1, versions + 1):
            named = replace(MODEL, weights="policy", weights_version=version)
            with connect(daemon, "quiet", named) as session:
                mine = np.full(BLOCK_BYTES, version % 251, np.uint8)
                wrong["of another version"] += sum(session.lookup(tokens_of(each, 2)).blocks for each in range(prompts))
                for each in range(prompts):
                    pin = {"pin": "kept"} if each % 10 == 0 else {"ttl": 1} if each % 10 == 1 else {}
                    session.put(tokens_of(each, 2), payloads=[mine] * 2, durability="none", **pin)
                over = time.monotonic() + 1.0
                until = done + lookups // versions
                while done < until:
                    each = chance.randrange(prompts)
                    began = time.monotonic()
                    found = session.lookup(tokens_of(each, 2)).blocks
                    done += 1
                    if each % 10 == 1 and began > over:
                        wrong["expired"] += found > 0
                    elif each % 10 == 0:
                        wrong["pinned and gone"] += found < 2
                    if done % 500 == 0:
                        noise.put(tokens_of(10**6 + done, 64), payloads=[_PAYLOAD] * 64, durability="none")
                        with session.get(tokens_of(each, 2)) as lease:
                            bytes_ = {int(lease.payload(block)[0]) for block in range(lease.blocks)}
                            wrong["of another version"] += bool(bytes_ - {version % 251})
                while time.monotonic() <= over:
                    time.sleep(0.05)
                for each in range(1, prompts, 10):
                    wrong["expired"] += session.lookup(tokens_of(each, 2)).blocks > 0
    progress("; ".join(f"{name}: {count}" for name, count in wrong.items()))
    return [Row("stale_versions", float(sum(wrong.values())), "served wrongly", float(done), "lookups", AT_MOST, 0.0)]


MEASURES: Mapping[str, Measure] = {
    "timing_auc_distance": timing, "prime_probe_auc": prime_and_probe, "flood_hits_lost": flood,
    "stale_versions": stale, "encrypted_nvme": encryption.measure,
}  # fmt: skip
"""What measures a row, and perhaps rows beside it."""


def main() -> int:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="the rows of these alone")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("a tenant here is a group that this process takes while it connects: run it as root")
    rows = [row for name in options.only for row in MEASURES[name](options.quick)]
    return printed(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
