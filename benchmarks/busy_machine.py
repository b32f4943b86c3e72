"""What is left of a daemon and its clients beside processes that use every core?

Four clients, each a process, go round without pause: connect, then 40 operations (put a conversation of four blocks,
get one, compare its bytes), then connect again. So for some seconds by themselves, and for some beside four processes
that only compute, in turns at one daemon. Figures: operations beside the loops against those without them, and the
99th percentile of connecting (the session, its stream and its first answer) beside them.

Nine processes share the cores: four clients, the loops and the daemon. If every one that can run had an equal share,
five of nine would be left at most, 0.56; each hand-over to a thread that sleeps also waits for a core.

Seen at first: 0.03, and stalls of one to three seconds. They were waits for a thread of SCHED_IDLE in the client, which
holds the interpreter's lock or the kernel's on the address space when it is put aside. With that thread at the usual
priority, resting 7 times as long as it works: 0.29 to 0.36. With small puts copied on the control thread: 0.35 to 0.40.
With the daemon at nice -5: 0.40 to 0.53; at -10: 0.52 to 0.61. Arenas are mapped with longer rests than staging: with
the same ones, sixteen clients of many_clients.py moved half as many bytes.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

from support.blocks import model, payloads, tokens_of
from support.daemon import bench_daemon
from support.report import AT_LEAST, Row, main, progress
from support.timing import percentile

import kvstore_client

CLIENTS, LOOPS, OPERATIONS, BLOCKS, BLOCK_BYTES = 4, 4, 40, 4, 64 << 10
SETTINGS = ("host.capacity=256MiB", "host.staging=64MiB", "nvme.enabled=false")
CONNECT_MOST_S = 1.0


def measure(quick: bool) -> list[Row]:
    turns, seconds = (2, 4.0) if quick else (4, 8.0)
    alone = beside = 0
    connects: list[float] = []
    with bench_daemon(*SETTINGS) as daemon:
        _turn(daemon.socket_dir, 2.0, 0)
        for turn in range(turns):
            progress(f"turn {turn + 1} of {turns}")
            operations, _ = _turn(daemon.socket_dir, seconds, 0)
            alone += operations
            operations, waited = _turn(daemon.socket_dir, seconds, LOOPS)
            beside += operations
            connects += waited
    a_second = turns * seconds
    return [
        Row("operations_beside_loops", beside / a_second, "1/s", alone / a_second, "without them", AT_LEAST, 0.4),
        Row(
            "connect_p99_beside_loops", percentile(connects, 99), "s", CONNECT_MOST_S, "a fixed limit",
            target=1.0,
        ),
    ]  # fmt: skip


def _turn(socket_dir: Path, seconds: float, loops: int) -> tuple[int, list[float]]:
    """Operations of all clients in so many seconds, and how long each took to connect."""
    spawning = multiprocessing.get_context("spawn")
    go, stop = spawning.Event(), spawning.Event()
    results: Queue[tuple[int, list[float]]] = spawning.Queue()
    clients = [
        spawning.Process(target=_client, args=(socket_dir, number, go, stop, results), daemon=True)
        for number in range(CLIENTS)
    ]
    burning = [spawning.Process(target=_burn, args=(go, stop), daemon=True) for _ in range(loops)]
    for process in (*clients, *burning):
        process.start()
    time.sleep(2.0)  # all have imported what they need
    go.set()
    time.sleep(seconds)
    stop.set()
    found = [results.get(timeout=60.0) for _ in clients]
    for process in (*clients, *burning):
        process.join(60.0)
    return sum(operations for operations, _ in found), [each for _, waited in found for each in waited]


def _client(socket_dir: Path, number: int, go: Event, stop: Event, results: Queue[tuple[int, list[float]]]) -> None:
    data, fingerprint = payloads(BLOCKS, BLOCK_BYTES), model(BLOCK_BYTES)
    operations, waited = 0, []
    go.wait()
    while not stop.is_set():
        began = time.monotonic()
        session = kvstore_client.connect(
            socket_dir, fingerprint=fingerprint, required=True, deadline_s=30.0, connect_timeout_s=30.0
        )
        with session:
            session.lookup(tokens_of(number, 1))
            waited.append(time.monotonic() - began)
            for at in range(OPERATIONS // 2):
                if stop.is_set():
                    break
                tokens = tokens_of(number * 100 + at, BLOCKS)
                session.put(tokens, payloads=data)
                with session.get(tokens) as lease:
                    if lease.blocks != BLOCKS or any(bytes(lease.payload(n)) != bytes(data[n]) for n in range(BLOCKS)):
                        raise RuntimeError(f"wrong or missing blocks: {lease.blocks}, {lease.reason}")
                operations += 2
    results.put((operations, waited))


def _burn(go: Event, stop: Event) -> None:
    go.wait()
    number = 1
    while not stop.is_set():
        for _ in range(200_000):
            number = number * 1103515245 % 2147483647
    raise SystemExit(0)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
