"""One client process or sixteen at one daemon: how long does a lookup take, and does the total fall?

Each client is a process with a tenant's usual rights and conversations of its own. It goes round without pause: look up
64 keys (four rounds of five), then put a new conversation of 8 blocks of 1 MiB or get one it stored before (every other
time), copied out. The host tier is too small for all of it, so puts evict. One client and sixteen take turns at the
same daemon; each turn starts when all its clients have warmed up, and is cut at the same moment for all.

The turns without pause ask for more than the machine has. Three figures of the same moments show how much of a lookup
is waiting for a core: a ping over a plain Unix socket between two processes that do nothing else; `Session.probe`,
which reads the index in shared memory and wakes no thread; and a hand-over, from the client's thread to another of the
same client and back, with no daemon in it: how long a client under this load waits for a core once it has slept. A
lookup by a direct stream makes the client sleep once, as the hand-over does, which stands beside it as possible; one
through gRPC needs two more threads of its client. Then sixteen clients run at a pace, together half of what one client
reached alone. Baselines: the one client's total of the same run; for lookups a fixed limit.

    python benchmarks/many_clients.py [--quick] [--json] [--clients 16]
"""

from __future__ import annotations

import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import BrokenBarrierError
from typing import Any

from support.daemon import MIB, BenchDaemon, bench_daemon, model, payloads, tokens_of
from support.report import AT_LEAST, AT_MOST, Row, median, parser_of, percentile, printed, progress, time_once

import kvstore_client
from kvstore_client import Session

CLIENTS = 16
BLOCKS = 8
LOOKUP_KEYS = 64
KEPT = 4  # conversations a client goes back to
LIMIT_MS = 10.0
WARM_UP_ROUNDS = KEPT + 2
PACE_SHARE = 0.5
PING_EVERY_S = 0.005
HAND_OVER_EVERY = 5  # rounds; odd, so that it follows puts and gets alike
START_TIMEOUT_S = 120.0
PREFAULT_MIB = 1024
SETTINGS = (
    "host.capacity=1536MiB", "host.staging=384MiB", f"host.prefault_ahead={PREFAULT_MIB}MiB", "nvme.enabled=false",
)  # fmt: skip
STAGING_BYTES = 20 * MIB  # two puts of 8 blocks


@dataclass(frozen=True)
class Turn:
    """The sums of all clients over one turn."""

    lookups_s: tuple[float, ...]
    probes_s: tuple[float, ...]
    handovers_s: tuple[float, ...]
    pings_s: tuple[float, ...]
    moved_bytes: int
    operations: int
    elapsed_s: float
    daemon_cpu_s: float

    @property
    def mb_per_s(self) -> float:
        return self.moved_bytes / 1e6 / self.elapsed_s

    @property
    def rounds_per_s(self) -> float:
        return self.operations / self.elapsed_s


def measure(quick: bool, clients: int = CLIENTS) -> list[Row]:
    turns, seconds = (3, 2.0) if quick else (5, 5.0)
    alone: list[Turn] = []
    crowd: list[Turn] = []
    paced: list[Turn] = []
    with bench_daemon(*SETTINGS) as daemon:
        _turn(daemon, 1, 0.5, rate=None)  # the first writer sets the prefault going
        daemon.wait_prefaulted(PREFAULT_MIB * MIB)
        for _ in range(turns):
            alone.append(_turn(daemon, 1, seconds, rate=None))
            crowd.append(_turn(daemon, clients, seconds, rate=None))
            rate = PACE_SHARE * alone[-1].rounds_per_s / clients
            paced.append(_turn(daemon, clients, seconds, rate=rate))
            for name, turn in (("1", alone[-1]), (str(clients), crowd[-1]), (f"{clients}, paced", paced[-1])):
                progress(f"{name} clients: {_summary(turn)}")
    name = f"{clients}_clients"
    one = median([turn.mb_per_s for turn in alone])
    one_rounds = median([turn.rounds_per_s for turn in alone])
    rounds = median([turn.rounds_per_s for turn in crowd])
    rows = [
        Row(f"{name}_throughput", median([turn.mb_per_s for turn in crowd]), "MB/s", one, "one client", AT_LEAST, 1.0),
        Row(f"{name}_rounds", rounds, "/s", one_rounds, "one client"),
    ]
    for label, kind in ((name, crowd), (f"{name}_paced", paced)):
        ping = _ms(kind, "pings_s", 99)
        rows += [
            Row(f"{label}_lookup_p99", _ms(kind, "lookups_s", 99), "ms", LIMIT_MS, "limit", AT_MOST, 1.0,
                _ms(kind, "handovers_s", 99), "a hand-over within the client"),
            Row(f"{label}_lookup_p99_vs_ping", _ms(kind, "lookups_s", 99), "ms", ping, "Unix socket ping, p99"),
            Row(f"{label}_lookup_p50", _ms(kind, "lookups_s", 50), "ms", _ms(alone, "lookups_s", 50), "one client"),
            Row(f"{label}_probe_p99", _ms(kind, "probes_s", 99), "ms", LIMIT_MS, "limit of a lookup"),
        ]  # fmt: skip
    return rows


def _ms(turns: Sequence[Turn], kind: str, percent: float) -> float:
    return percentile([second for turn in turns for second in getattr(turn, kind)], percent) * 1e3


def _summary(turn: Turn) -> str:
    kinds = {"lookup": "lookups_s", "probe": "probes_s", "hand-over": "handovers_s", "ping": "pings_s"}
    waits = ", ".join(f"{name} {_ms([turn], k, 50):.2f}/{_ms([turn], k, 99):.2f}" for name, k in kinds.items())
    total = f"{turn.mb_per_s:.0f} MB/s, {turn.rounds_per_s:.0f} rounds/s"
    return f"{total}, ms p50/p99: {waits}; daemon {turn.daemon_cpu_s / turn.elapsed_s:.2f} cores"


def _turn(daemon: BenchDaemon, clients: int, seconds: float, rate: float | None) -> Turn:
    """Start the clients, let them warm up, measure for `seconds`, gather."""
    spawning = multiprocessing.get_context("spawn")
    ready, stop, results = spawning.Barrier(clients + 1), spawning.Event(), spawning.Queue()
    arguments = (daemon.socket_dir, ready, stop, results, rate)
    pinged, echoing = socket.socketpair()
    echo = spawning.Process(target=_echo, args=(echoing,), daemon=True)
    children = [spawning.Process(target=_client, args=(number, *arguments), daemon=True) for number in range(clients)]
    for child in (echo, *children):
        child.start()
    echoing.close()
    try:
        ready.wait(START_TIMEOUT_S)
        started, cpu_before = time.perf_counter(), _cpu_s(daemon.pid)
        pings = _pings(pinged, seconds)
        stop.set()
        elapsed_s, cpu_s = time.perf_counter() - started, _cpu_s(daemon.pid) - cpu_before
        done = [results.get(timeout=START_TIMEOUT_S) for _ in children]
    except (Empty, BrokenBarrierError):
        raise SystemExit("a client process ended before it reported its measurements: see above") from None
    finally:
        stop.set()
        pinged.close()
        for child in (echo, *children):
            child.join(START_TIMEOUT_S)
    lookups, probes, handovers = (tuple(second for one in done for second in one[place]) for place in (0, 1, 2))
    moved, rounds = (sum(one[place] for one in done) for place in (3, 4))
    return Turn(lookups, probes, handovers, tuple(pings), moved, rounds, elapsed_s, cpu_s)


def _pings(connection: socket.socket, seconds: float) -> list[float]:
    """Send a ping now and then for `seconds`."""
    deadline, pings = time.perf_counter() + seconds, []
    while (started := time.perf_counter()) < deadline:
        connection.send(b"x")
        connection.recv(16)
        pings.append(time.perf_counter() - started)
        time.sleep(PING_EVERY_S)
    return pings


def _echo(connection: socket.socket) -> None:
    while message := connection.recv(16):
        connection.send(message)


def _client(number: int, socket_dir: Path, ready: Barrier, stop: Event, results: Any, rate: float | None) -> None:
    options: dict[str, Any] = {"required": True, "deadline_s": 30.0, "connect_timeout_s": 30.0}
    fingerprint = model(MIB, f"client {number}")
    try:
        with kvstore_client.connect(
            socket_dir, fingerprint=fingerprint, staging_bytes=STAGING_BYTES, **options
        ) as session:
            rounds = _Rounds(session)
            for turn in range(WARM_UP_ROUNDS):
                rounds.go(turn)
            rounds.forget_figures()
            ready.wait(START_TIMEOUT_S)
            _go_on(rounds, stop, rate, phase=number / CLIENTS)
            results.put((rounds.lookups_s, rounds.probes_s, rounds.handovers_s, rounds.moved_bytes, rounds.done))
    except BaseException:
        ready.abort()  # the others need not wait for this one
        raise


def _go_on(rounds: _Rounds, stop: Event, rate: float | None, phase: float) -> None:
    """Run rounds until `stop` is set: without pause, or `rate` a second by the clock, the clients one after another."""
    started, turn = time.perf_counter(), WARM_UP_ROUNDS
    while not stop.is_set():
        rounds.go(turn)
        turn += 1
        if rate is not None:
            due = started + (turn - WARM_UP_ROUNDS + phase) / rate
            stop.wait(max(due - time.perf_counter(), 0.0))


class _Rounds:
    """One client's work and its figures."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._data, self._own = payloads(BLOCKS, MIB), payloads(BLOCKS, MIB)
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._answered: SimpleQueue[bool] = SimpleQueue()
        threading.Thread(target=self._answer, daemon=True).start()
        self.forget_figures()

    def forget_figures(self) -> None:
        self.lookups_s: list[float] = []
        self.probes_s: list[float] = []
        self.handovers_s: list[float] = []
        self.moved_bytes = 0
        self.done = 0

    def go(self, turn: int) -> None:
        """A lookup, then a put or a get; now and then a hand-over in the lookup's place, so that it finds the client in
        the same state: done with copying."""
        conversation = turn // 2
        asked = tokens_of(max(conversation - 1, 0) % 2000, LOOKUP_KEYS)
        if turn % HAND_OVER_EVERY:
            self.lookups_s.append(time_once(lambda: self._session.lookup(asked)))
        else:
            self.handovers_s.append(time_once(self._hand_over))
        self.probes_s.append(time_once(lambda: self._session.probe(asked)))
        if turn % 2 == 0:
            receipt = self._session.put(tokens_of(conversation % 2000, BLOCKS), payloads=self._data)
            self.moved_bytes += receipt.stored_blocks * MIB
        else:
            with self._session.get(tokens_of(max(conversation - turn % KEPT, 0) % 2000, BLOCKS)) as lease:
                self.moved_bytes += lease.copy_into(self._own[: len(lease)]) * MIB
        self.done += 1

    def _hand_over(self) -> None:
        self._asked.put(True)
        self._answered.get()

    def _answer(self) -> None:
        while self._asked.get():
            self._answered.put(True)


def _cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> int:
    parser = parser_of(__doc__, "fewer and shorter turns")
    parser.add_argument("--clients", type=int, default=CLIENTS, help=f"how many beside one (default: {CLIENTS})")
    options = parser.parse_args()
    return printed(measure(options.quick, options.clients), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
