"""Measures what KV events cost puts, with the publisher and two subscribers on the same cores.

Each subscriber is a process that decodes every batch, as a router does. Two daemons run, one with events, and take
turns. Blocks of 2 MiB and of 4 KiB, with 64 token ids each, are put at full rate into memory that is full, so that a
block leaves for each that comes. The baseline is the daemon without events. What is possible is the rate of that daemon
beside a process that only packs messages of as many blocks and sends them to two subscribers, which decode them. The
rows that end in `processor` compare the processor time of the daemon and its children for a block.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.daemon import MIB, BenchDaemon, Bytes, bench_daemon, model, payloads, tokens_of, wait_mapped
from support.report import AT_LEAST, Row, main, median

from kvstore_client import Session

SIZES = (("2mib", 2 * MIB, 16), ("4kib", 4096, 64))
SETTINGS = ("host.capacity=256MiB", "nvme.enabled=false", "host.prefault_ahead=256MiB")
SUBSCRIBERS = 2
LEAST = 0.97
SUBSCRIBER = """
import msgspec, sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.subscribe(b"")
print("ready", flush=True)
decode = msgspec.msgpack.Decoder().decode
while True:
    decode(socket.recv_multipart()[2])
"""
PUBLISHER = """
import msgspec, sys, time, zmq
socket = zmq.Context().socket(zmq.PUB)
socket.bind(sys.argv[1])
blocks, puts = map(int, sys.argv[2:])
hashes = [2**62 + number for number in range(blocks)]
stored = {
    "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": [], "block_size": 64,
    "lora_id": None, "medium": "CPU", "lora_name": None,
}
removed = {"type": "BlockRemoved", "block_hashes": hashes * puts, "medium": "CPU"}
encode = msgspec.msgpack.Encoder().encode
print("ready", flush=True)
while True:
    time.sleep(0.1)
    socket.send_multipart([b"topic", bytes(8), encode([time.time(), [stored] * puts + [removed], 0])])
"""  # a message each 0.1 s, as docs/events.md promises


def measure(quick: bool) -> list[Row]:
    rows = []
    for name, nbytes, blocks in SIZES:
        rows += _of_size(name, payloads(blocks, nbytes), nbytes, turns=4 if quick else 12)
    return rows


def _of_size(name: str, data: list[Bytes], nbytes: int, turns: int) -> list[Row]:
    address = f"ipc://{os.environ.get('TMPDIR', '/tmp')}/kvbench-events-{os.getpid()}-{name}"
    rates: list[list[float]] = [[], [], []]
    used_us: list[list[float]] = [[], [], []]
    with (
        bench_daemon(*SETTINGS) as silent,
        bench_daemon(*SETTINGS, f"events.listen={address}") as heard,
        silent.connect(model(nbytes)) as first,
        heard.connect(model(nbytes)) as second,
        _subscribers(address),
    ):
        sides = ((silent, first), (heard, second), (silent, first))
        counts = itertools.count()
        for turn in range(turns + 1):
            for side in (0, 1, 2) if turn % 2 else (2, 1, 0):
                daemon, session = sides[side]
                with contextlib.ExitStack() as stack:
                    if side == 2:
                        each_s = median(rates[0]) if rates[0] else 10_000.0
                        puts = max(1, round(each_s / len(data) / 10))
                        stack.enter_context(_least_publisher(f"{address}-least", len(data), puts))
                    before_s = _processor_s(daemon)
                    done, seconds = _puts(session, data, counts, 2.0)
                    used_s = _processor_s(daemon) - before_s
                if turn:
                    rates[side].append(done * len(data) / seconds)
                    used_us[side].append(used_s * 1e6 / done / len(data))
                elif side != 2:
                    wait_mapped()
    for suffix in ("", "-least"):
        Path(address.removeprefix("ipc://") + suffix).unlink(missing_ok=True)
    without, with_events, possible = (median(each) for each in rates)
    plain_us, events_us, _ = (median(each) for each in used_us)
    same = "the same without events"
    return [
        Row(
            f"put_{name}_with_events",
            with_events,
            "blocks/s",
            without,
            same,
            AT_LEAST,
            LEAST,
            possible=possible,
            possible_name="packing, sending and decoding alone",
        ),
        Row(f"put_{name}_events_processor", events_us, "us", plain_us, same),
    ]


def _puts(session: Session, data: Sequence[Bytes], numbers: Iterator[int], longest_s: float) -> tuple[int, float]:
    started, done = time.perf_counter(), 0
    while (now := time.perf_counter()) - started < longest_s:
        session.put(tokens_of(next(numbers), len(data)), payloads=list(data))
        done += 1
    return done, now - started


def _processor_s(daemon: BenchDaemon) -> float:
    """Return the processor time of the daemon and of the processes that it has started."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    total = 0
    for process in (daemon.pid, *children):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _least_publisher(address: str, blocks: int, puts: int) -> Iterator[None]:
    """Run a process that sends subscribers messages of `puts` puts of `blocks` blocks, and does nothing else."""
    with _started(PUBLISHER, address, str(blocks), str(puts)), _subscribers(address):
        yield


@contextlib.contextmanager
def _subscribers(address: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(SUBSCRIBERS):
            stack.enter_context(_started(SUBSCRIBER, address))
        yield


@contextlib.contextmanager
def _started(source: str, *arguments: str) -> Iterator[None]:
    """Run a process of Python's, which says when it is ready."""
    with subprocess.Popen([sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            yield
        finally:
            child.kill()


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
