"""What do KV events cost a put, and does a subscriber that rebuilds the index from them have what the daemon has?

A store in this process, without sockets: chains are put into DRAM alone, which is full, so that each put evicts as many
blocks. Without events and with them (token ids included), in turns; no chain comes twice. Two sizes of a block of 16
tokens: 2 MiB, an 8B model's, and 4 KiB, far smaller than any real one. Baseline: the throughput of puts without events;
beside it by the processor time of the control thread alone, which other work on the machine changes less. The ratio is
the median of those of neighbouring turns. The publisher is the real process, with two subscribers in others, which have
the processors when nothing else wants them: a router is on another machine.

Then a million blocks are stored with events, and as many removed, in all; and the index is rebuilt three times, by a
subscriber that had every batch, by one that comes at the end, and by one that lost a tenth of the batches and asks for
them again: each must equal what residency lists, or the benchmark fails.

Expected: noting a change takes a tenth of a microsecond of the control thread; sending what the rows have become, some
half a microsecond for a block that is stored, less for one that is removed, and 0.3 ms ten times a second. Where other
work has the processors, more of these fall on a block, since they come by the clock. To encode and send it on is
another process's work, of a lower priority. On two cores its core is also the copy threads'.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.report import AT_LEAST, Row, main, progress
from support.timing import median

from kvstore_proto.arena import slot_bytes
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import KEY_BYTES, NO_PARENT, block_keys
from kvstore_tiers.segments import Segment, segment_of
from kvstored.clients.lookup_index import LookupIndexes
from kvstored.clients.tenants import Tenant
from kvstored.clock import SystemClock
from kvstored.completions import CompletionQueue
from kvstored.config import load_config
from kvstored.config.schema import TenantSection
from kvstored.config.tiers import Start
from kvstored.events.encoding import hash_of
from kvstored.events.feed import EventFeed
from kvstored.events.history import PublishedBefore
from kvstored.events.publisher import Publisher
from kvstored.store.assembly import Store
from kvstored.store.operations import Client, Operations
from kvstored.store.operations.offer import DurabilityMode, Offer
from kvstored.store.residency import make_residency
from kvstored.telemetry import DeletionLog

BLOCKS, QUICK_BLOCKS = 1_000_000, 100_000  # stored with events, and as many removed
CHAIN, TOKENS = 64, 16
TOPIC, ROOT = b"kv@bench", bytes(range(16))
MODEL = Fingerprint("m", "w", groups=(LayerGroup(0),), block_tokens=TOKENS, engine_block_tokens=TOKENS)
Index = set[int]


@dataclass(frozen=True)
class Size:
    """Blocks of so many bytes, a turn of so many chains, a tier with room for so many blocks, and how many pairs."""

    name: str
    payload_bytes: int
    turn_chains: int
    held_blocks: int
    pairs: int
    quick_pairs: int


SMALL = Size("4 KiB", 4096, 60, 16_000, 21, 5)
LARGE = Size("2 MiB", 2 << 20, 8, 512, 21, 5)


class Staged:
    def __init__(self, tokens: bytes, payload: Segment) -> None:
        self._tokens = tokens
        self._payload = payload

    def tokens_at(self, offset: int) -> bytes:
        return self._tokens[4 * TOKENS * offset : 4 * TOKENS * (offset + 1)]

    def payload_at(self, offset: int, nbytes: int) -> Segment:
        return self._payload


def offer(chain: int, payload: Segment) -> Offer:
    tokens = np.arange(CHAIN * TOKENS, dtype="<i4") + chain
    tokens[0] = -chain
    keys = list(block_keys(ROOT, tokens, block_tokens=TOKENS, engine_block_tokens=TOKENS, hash_name=MODEL.key_hash))
    return Offer(
        0, b"".join(keys), keys, [NO_PARENT, *keys[:-1]], [bytes(KEY_BYTES)] * CHAIN, [payload.nbytes] * CHAIN,
        Staged(tokens.tobytes(), payload), range(CHAIN),
    )  # fmt: skip


class Bench:
    def __init__(self, size: Size, directory: Path, addresses: dict[str, str], stack: AsyncExitStack) -> None:
        self.size = size
        self.payload = segment_of(np.zeros(size.payload_bytes, np.uint8))
        capacity = size.held_blocks * slot_bytes(size.payload_bytes) + (64 << 20)
        config = load_config(
            None,
            (f"daemon.state_dir={directory}", f"host.capacity={capacity}", "host.staging=16MiB", "nvme.enabled=false"),
        )
        self.completions, clock = CompletionQueue(asyncio.get_running_loop()), SystemClock()
        tiers = [section.open(Start()) for section in config.tiers]
        self.residency = make_residency(config, tiers)
        self.store = Store(config, clock, self.completions, self.residency, tiers)
        # As in the daemon: it follows each change, with events and without; no client has asked for a table.
        schedule = asyncio.get_running_loop().call_soon
        self.residency.observe(LookupIndexes(config.index.slots, 16 << 20, self.residency, schedule))
        self.put = Operations(self.store, DeletionLog(clock)).put
        self.client = Client(
            session_id=1, client_name="bench", tenant=Tenant("t", b"t" * 16, b"", TenantSection("t")),
            tenant_id=self.residency.tenant("t"), fingerprint=MODEL, fingerprint_digest=MODEL.digest(),
            fingerprint_id=1, roots={0: ROOT},
        )  # fmt: skip
        settings = {**addresses, "encoding": "map", "buffer": 100, "places": [["CPU", ""]], "connections": 16}
        self.publisher = Publisher(settings, PublishedBefore(None), self.store.counters)
        stack.callback(self.publisher.close)
        self.feed = EventFeed(
            self.residency, tiers, lambda kind: (TOPIC, TOKENS), self.publisher,
            asyncio.get_running_loop().call_later,
        )  # fmt: skip
        self.publisher.start(lambda: None)
        self.publishes = False
        self.chain = 0

    async def publish(self) -> None:
        """From now on; what is stored already is announced before this returns."""
        self.publishes = True
        self.feed.announce_all()
        await self.drained()

    def stop(self) -> None:
        self.publishes = False
        self.feed.stop()

    async def turn(self) -> tuple[float, float]:
        """Blocks a second: of time, and of the control thread's processor time."""
        chains = range(self.chain, self.chain + self.size.turn_chains)
        self.chain = chains.stop
        offers = [offer(number, self.payload) for number in chains]
        begin, used = time.perf_counter(), time.thread_time()
        for each in offers:
            async for _ in self.put.store(self.client, each, DurabilityMode.NONE):
                pass
        end = time.perf_counter()
        if self.publishes:
            await self.drained()
        blocks = self.size.turn_chains * CHAIN
        return blocks / (end - begin), blocks / (time.thread_time() - used)

    def listed(self) -> Index:
        rows = self.residency.rows
        return {hash_of(self.residency.key(row)) for row in range(rows.capacity) if rows.mask[row]}

    async def drained(self) -> None:
        """Until the publisher has all records."""
        while self.feed.waiting_rows or not self.publisher.ready:
            await asyncio.sleep(0.05)  # looking more often would count as the feed's work


def apply(index: Index, payload: bytes, decode: Callable[[bytes], Any]) -> None:
    for event in decode(payload)[1]:
        if event["type"] == "AllBlocksCleared":
            index.clear()
        elif event["type"] == "BlockStored":
            index.update(event["block_hashes"])
        else:
            index.difference_update(event["block_hashes"])


def subscribe(addresses: dict[str, str], loses: bool, pipe: Any) -> None:
    """A process: apply what comes until asked, then send the index. One that loses drops each tenth batch."""
    import msgspec
    import zmq

    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    context = zmq.Context()
    live = context.socket(zmq.SUB)
    live.set_hwm(0)
    live.connect(addresses["listen"])
    live.subscribe(b"")
    index: Index = set()
    last, received = -1, 0
    pipe.send("ready")
    while not pipe.poll(0):
        while live.poll(20):
            _, number, payload = live.recv_multipart()
            received += 1
            if loses and received % 10 == 0:
                continue
            now = int.from_bytes(number, "big")
            if now > last + 1:
                for each in replayed(addresses["replay"], last + 1):
                    apply(index, each, msgspec.msgpack.decode)
            apply(index, payload, msgspec.msgpack.decode)
            last = max(now, last)
    for each in replayed(addresses["replay"], last + 1):
        apply(index, each, msgspec.msgpack.decode)
    pipe.recv()
    pipe.send((index, received))


def replayed(address: str, first: int) -> Iterator[bytes]:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.set_hwm(0)
        asking.connect(address)
        asking.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            payload = asking.recv_multipart()[-1]
            if not payload:
                return
            yield payload


def subscribers_of(addresses: dict[str, str], stack: ExitStack) -> dict[str, Any]:
    """Those that are there from the beginning: the pipe of each."""
    spawn = multiprocessing.get_context("spawn")
    found = {}
    for name in ("live", "lossy"):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=subscribe, args=(addresses, name == "lossy", theirs), daemon=True)
        process.start()
        stack.callback(process.kill)
        ours.recv()
        found[name] = ours
    return found


async def in_turns(bench: Bench, pairs: int) -> list[Row]:
    """Without events, and with them."""
    without, with_events = [], []
    for number in range(pairs):
        without.append(await bench.turn())
        await bench.publish()
        with_events.append(await bench.turn())
        bench.stop()
        progress(
            f"{bench.size.name}, pair {number + 1} of {pairs}: {without[-1][0]:,.0f} and {with_events[-1][0]:,.0f} "
            f"blocks/s; of processor time {without[-1][1]:,.0f} and {with_events[-1][1]:,.0f}"
        )
    rows = []
    for at, what in enumerate(("put throughput", "puts a second of the control thread's processor time")):
        base = median([turn[at] for turn in without])
        ratio = median([on[at] / off[at] for on, off in zip(with_events, without, strict=True)])
        name = f"{what} with events, blocks of {bench.size.name}"
        rows.append(Row(name, ratio * base, "blocks/s", base, "without events", AT_LEAST, 0.97))
    return rows


async def check_indexes(bench: Bench, addresses: dict[str, str], pipes: dict[str, Any]) -> None:
    """Raises SystemExit where a subscriber has something else than the daemon lists."""
    import msgspec

    await bench.drained()
    await asyncio.sleep(1.0)  # what the publisher has read is sent
    late: Index = set()
    for payload in await asyncio.to_thread(lambda: list(replayed(addresses["replay"], 0))):
        apply(late, payload, msgspec.msgpack.decode)
    listed, found = bench.listed(), {"late": late}
    for name, pipe in pipes.items():
        pipe.send("end")
        found[name], received = await asyncio.to_thread(pipe.recv)
        progress(f"{name}: {received:,} batches came")
    for name, index in found.items():
        if index != listed:
            raise SystemExit(f"the {name} subscriber has {len(index)} blocks, {len(index ^ listed)} of them wrong")
    progress(f"three rebuilt indexes equal the daemon's list of {len(listed):,} blocks")


async def run(size: Size, quick: bool, directory: Path) -> list[Row]:
    addresses = {"listen": f"ipc://{directory}/e", "replay": f"ipc://{directory}/r"}
    async with AsyncExitStack() as stack:
        bench = Bench(size, directory, addresses, stack)
        pipes = await asyncio.to_thread(subscribers_of, addresses, stack.enter_context(ExitStack()))
        turn_blocks = size.turn_chains * CHAIN
        for _ in range(size.held_blocks // turn_blocks + 2):  # fill the tier
            await bench.turn()
        rows = await in_turns(bench, size.quick_pairs if quick else size.pairs)
        await bench.publish()
        wanted = 0 if size is not SMALL else QUICK_BLOCKS if quick else BLOCKS
        begin, stored = time.perf_counter(), 0
        while stored < wanted:
            speed, _ = await bench.turn()
            stored += turn_blocks
            if stored // turn_blocks % 10 == 0:
                progress(f"{stored:,} of {wanted:,} blocks stored and as many removed; {speed:,.0f} blocks/s")
        if wanted:
            progress(f"{stored:,} blocks in {time.perf_counter() - begin:.0f} s, published as they were put")
        await check_indexes(bench, addresses, pipes)
        bench.feed.stop()
        bench.store.mover.close()
        await bench.completions.drained()
    return rows


def measure(quick: bool) -> list[Row]:
    rows = []
    for size in (LARGE, SMALL):
        with tempfile.TemporaryDirectory(prefix="kve-") as directory:
            rows += asyncio.run(run(size, quick, Path(directory)))
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
