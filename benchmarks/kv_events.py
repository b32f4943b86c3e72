"""What do KV events cost a put, and does a subscriber that rebuilds the index from them have what the daemon has?

A store in this process, without sockets: chains of 64 blocks of 16 tokens and 4 KiB are put into DRAM alone, which is
full, so that each put evicts as many. Without events and with them (token ids included), in turns; no chain comes
twice. Baseline: the throughput of puts without events, of the median turn; beside it by the processor time of the
control thread alone, which a busy machine does not change. The publisher is the real process, with subscribers in
others.

Then the index is rebuilt three times, by a subscriber that had every batch, by one that comes at the end, and by one
that lost a tenth of the batches and asks for them again: each must equal what residency lists, or the benchmark fails.

Expected: a record takes a microsecond of the control thread when a block is stored and one when it is removed; to
encode and send it is another core's work. On two cores that core is also the copy threads'.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from support.report import AT_LEAST, Row, main, progress
from support.timing import median

from kvstore_proto.arena import slot_bytes
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import KEY_BYTES, NO_PARENT, block_keys
from kvstore_tiers.segments import Segment, segment_of
from kvstored.clients.tenants import Tenant
from kvstored.clock import SystemClock
from kvstored.completions import CompletionQueue
from kvstored.config import load_config
from kvstored.config.schema import TenantSection
from kvstored.config.tiers import Start
from kvstored.events.encoding import hash_of
from kvstored.events.feed import EventFeed
from kvstored.events.publisher import Publisher
from kvstored.store.assembly import Store, make_residency
from kvstored.store.operations import Client, Operations
from kvstored.store.operations.offer import DurabilityMode, Offer
from kvstored.telemetry import DeletionLog

BLOCKS, QUICK_BLOCKS = 1_000_000, 100_000  # stored with events, and as many removed
CHAIN, TOKENS, PAYLOAD_BYTES = 64, 16, 4096
TURN_CHAINS = 125
HELD_BLOCKS = 16_000
TOPIC, ROOT = b"kv@bench", bytes(range(16))
MODEL = Fingerprint("m", "w", groups=(LayerGroup(0),), block_tokens=TOKENS, engine_block_tokens=TOKENS)
PAYLOAD = np.zeros(PAYLOAD_BYTES, np.uint8)
Index = set[int]


class Staged:
    def __init__(self, tokens: bytes) -> None:
        self._tokens = tokens

    def tokens_at(self, offset: int) -> bytes:
        return self._tokens[4 * TOKENS * offset : 4 * TOKENS * (offset + 1)]

    def payload_at(self, offset: int, nbytes: int) -> Segment:
        return segment_of(PAYLOAD)


def offer(chain: int) -> Offer:
    tokens = np.arange(CHAIN * TOKENS, dtype="<i4") + chain
    tokens[0] = -chain
    keys = list(block_keys(ROOT, tokens, block_tokens=TOKENS, engine_block_tokens=TOKENS, hash_name=MODEL.key_hash))
    return Offer(
        0, b"".join(keys), keys, [NO_PARENT, *keys[:-1]], [bytes(KEY_BYTES)] * CHAIN, [PAYLOAD_BYTES] * CHAIN,
        Staged(tokens.tobytes()), range(CHAIN),
    )  # fmt: skip


class Bench:
    def __init__(self, directory: Path, addresses: dict[str, str], stack: AsyncExitStack) -> None:
        capacity = HELD_BLOCKS * slot_bytes(PAYLOAD_BYTES) + (64 << 20)
        config = load_config(
            None,
            (f"daemon.state_dir={directory}", f"host.capacity={capacity}", "host.staging=16MiB", "nvme.enabled=false"),
        )
        self.completions, clock = CompletionQueue(asyncio.get_running_loop()), SystemClock()
        tiers = [section.open(Start()) for section in config.tiers]
        self.residency = make_residency(config, tiers)
        self.store = Store(config, clock, self.completions, self.residency, tiers)
        self.put = Operations(self.store, DeletionLog(clock)).put
        self.client = Client(
            session_id=1, client_name="bench", tenant=Tenant("t", b"t" * 16, b"", TenantSection("t")),
            tenant_id=self.residency.tenant("t"), fingerprint=MODEL, fingerprint_digest=MODEL.digest(),
            fingerprint_id=1, roots={0: ROOT},
        )  # fmt: skip
        settings = {**addresses, "encoding": "map", "buffer": 100, "places": [["CPU", ""]]}
        self.publisher = Publisher(settings, self.store.counters)
        stack.callback(self.publisher.close)
        self.feed = EventFeed(
            self.residency, tiers, lambda kind: (TOPIC, TOKENS), self.publisher.append, self.publisher.schedule
        )
        self.publishes = False
        self.residency.observe(self)
        self.chain = 0

    def changed(self, tenant: int, key: bytes, mask: int, row: int) -> None:
        if self.publishes:
            self.feed.changed(tenant, key, mask, row)

    def make_offers(self) -> list[Offer]:
        self.chain += TURN_CHAINS
        return [offer(number) for number in range(self.chain, self.chain + TURN_CHAINS)]

    async def turn(self) -> tuple[float, float]:
        """Blocks a second: of time, and of the control thread's processor time."""
        offers, begin, used = self.make_offers(), time.perf_counter(), time.thread_time()
        for each in offers:
            async for _ in self.put.store(self.client, each, DurabilityMode.NONE):
                pass
        end = time.perf_counter()
        if self.publishes:
            await self.drained()
        blocks = TURN_CHAINS * CHAIN
        return blocks / (end - begin), blocks / (time.thread_time() - used)

    def listed(self) -> Index:
        rows = self.residency.rows
        return {hash_of(self.residency.key(row)) for row in range(rows.capacity) if rows.mask[row]}

    async def drained(self) -> None:
        """Until the publisher has all records."""
        while self.publisher.waiting_bytes:
            await asyncio.sleep(0.005)


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


async def run(quick: bool, directory: Path) -> list[Row]:
    import msgspec

    addresses = {"listen": f"ipc://{directory}/e", "replay": f"ipc://{directory}/r"}
    spawn = multiprocessing.get_context("spawn")
    subscribers = []
    without: list[tuple[float, float]] = []
    with_events: list[tuple[float, float]] = []
    async with AsyncExitStack() as stack:
        bench = Bench(directory, addresses, stack)
        for loses in (False, True):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=subscribe, args=(addresses, loses, theirs), daemon=True)
            process.start()
            stack.callback(process.kill)
            await asyncio.to_thread(ours.recv)
            subscribers.append(ours)
        for _ in range(HELD_BLOCKS // (TURN_CHAINS * CHAIN) + 2):  # fill the tier
            await bench.turn()
        wanted = (QUICK_BLOCKS if quick else BLOCKS) // (TURN_CHAINS * CHAIN)
        for number in range(wanted):
            without.append(await bench.turn())
            bench.publishes = True
            bench.feed.announce_all()  # what was put without events
            await bench.drained()
            with_events.append(await bench.turn())
            bench.publishes = False
            progress(f"turn {number + 1} of {wanted}: {without[-1][0]:,.0f} and {with_events[-1][0]:,.0f} blocks/s")
        await asyncio.sleep(1.0)  # what the publisher has read is sent
        late: Index = set()
        for payload in await asyncio.to_thread(lambda: list(replayed(addresses["replay"], 0))):
            apply(late, payload, msgspec.msgpack.decode)
        listed, dropped = bench.listed(), bench.store.counters["dropped_events"]
        found = {"late": late}
        for name, pipe in zip(("live", "lossy"), subscribers, strict=True):
            pipe.send("end")
            found[name], _ = await asyncio.to_thread(pipe.recv)
        for name, index in found.items():
            if index != listed:
                raise SystemExit(f"the {name} subscriber has {len(index)} blocks, {len(index ^ listed)} of them wrong")
        bench.store.mover.close()
        await bench.completions.drained()
    progress(f"three rebuilt indexes equal the daemon's list of {len(listed)} blocks; {dropped} records dropped")
    rows = []
    for at, name in enumerate(("put throughput with events", "puts a second of the control thread's processor time")):
        base = median([turn[at] for turn in without])
        ratio = median([on[at] / off[at] for on, off in zip(with_events, without, strict=True)])
        rows.append(Row(name, ratio * base, "blocks/s", base, "without events", AT_LEAST, 0.97))
    return rows


def measure(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="kve-") as directory, contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(run(quick, Path(directory)))
    return []


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
