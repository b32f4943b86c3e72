"""Measures gets from a throttled NVMe tier under `codec = "auto"` against `codec = "none"`, and what the tier holds.

A store in this process reads 48 blocks of the shape of SmolLM2-135M (1.4 MiB) through a link that lets a number of
bytes a second pass, whichever thread reads; both settings take turns, and the fastest turn of each counts. The tier's
directory is in memory. A row's value is the time under "none" over the time under "auto". Beside it stands what is
possible: the link alone, or reading, checking and decoding by as many threads and nothing else, whichever takes longer,
in the form with the shortest time. Where that is below the target, processors are the limit and not the link.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from support.report import AT_LEAST, AT_MOST, Row, main, progress

from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_tiers.base import Slot
from kvstore_tiers.codecs import codec_named
from kvstore_tiers.codecs.images import view
from kvstore_tiers.codecs.native import wait_for_library
from kvstore_tiers.codecs.shapes import PayloadShape
from kvstore_tiers.nvme.slot_io import SlotIO
from kvstore_tiers.outcomes import RunCompletion
from kvstore_tiers.segments import AlignedBuffer, Segment, checksum_at
from kvstore_tiers.testing.faulty import FaultyTier
from kvstore_tiers.testing.kv_blocks import kv_block, kv_shape
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import GetRequest, Offer
from kvstored.store.residency import make_residency

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.reference import small_store as module
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.small_store import SmallStore, small_store

BLOCKS, LAYERS, IO_THREADS = 48, 30, 4
SETTINGS = (
    "host.capacity=512MiB", "host.staging=64MiB", "host.arena=16MiB", "host.policy=lru", "nvme.capacity=512MiB",
    "nvme.slab=16MiB", f"nvme.io_threads={IO_THREADS}", "nvme.policy=lru", "movement.acquire_wait_ms=60000",
)  # fmt: skip
AUTO = ("nvme.codec=auto", "nvme.codec_staging=64MiB")
GB, MIB = 1e9, 1 << 20
MEASURING_S = 1.0  # of the codecs, when a store opens: by then it is over


@dataclass(frozen=True)
class Case:
    """One row: the link's rate in GB/s, the type of the numbers, whether lossy copies are accepted, and the target."""

    name: str
    rate: float
    dtype: str
    accepts_lossy: bool
    target: float


CASES = (
    Case("get_1gb_f16", 1, "f16", False, 1.12),
    Case("get_1gb_bf16", 1, "bf16", False, 1.35),
    Case("get_1gb_int8", 1, "f16", True, 1.8),
    Case("get_3gb_int8", 3, "f16", True, 1.7),
    Case("get_3gb_f16", 3, "f16", False, 0.98),
    Case("get_3gb_bf16", 3, "bf16", False, 0.98),
)


class Link:
    """A medium of `bytes_per_s` for all threads together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._lock, self._free_at = bytes_per_s, threading.Lock(), 0.0

    def carry(self, nbytes: int) -> None:
        """Wait until `nbytes` have passed."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._bytes_per_s
            free_at = self._free_at
        time.sleep(max(0.0, free_at - time.monotonic()))


@contextmanager
def throttled(bytes_per_s: float) -> Iterator[None]:
    """Let every read of a slot in this process pass a link of that rate."""
    link, read = Link(bytes_per_s), SlotIO.read_image

    def slowly(self: SlotIO, fd: int, offset: int, segments: Any, nbytes: int) -> Any:
        image = read(self, fd, offset, segments, nbytes)
        link.carry(nbytes)
        return image

    SlotIO.read_image = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        SlotIO.read_image = read  # type: ignore[method-assign]


class Sound(FaultyTier):
    """A tier that has no faults, and takes runs of blocks whole, as in a daemon."""

    def move_out_run(
        self, slots: Sequence[Slot], destinations: Sequence[Segment], keys: Sequence[bytes], done: RunCompletion
    ) -> None:
        self.inner.move_out_run(slots, destinations, keys, done)


class Payloads:
    """Blocks of K and V, without token ids."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays

    def tokens_of(self, offsets: Sequence[int]) -> list[bytes]:
        return [b""] * len(offsets)

    def payloads_at(self, offsets: Sequence[int]) -> tuple[list[int], object]:
        return [self._arrays[offset].ctypes.data for offset in offsets], self._arrays


class Reader:
    """Puts the blocks into a store, and gets them from its NVMe tier."""

    def __init__(self, small: SmallStore, case: Case, shape: PayloadShape, payloads: list[np.ndarray]) -> None:
        self._small, self._driven, self.nbytes = small, DrivenStore(small), shape.nbytes
        self._client = replace(self._driven.new_client(1), exact=not case.accepts_lossy, fingerprint=fingerprint(shape))
        small.residency.exactness.tenants.add(self._client.tenant_id)
        self._payloads = payloads

    async def put(self, keys: Sequence[bytes]) -> None:
        """Store the chain `keys`, and wait until it is on NVMe."""
        blocks = len(keys)
        arrays = [self._payloads[number % len(self._payloads)] for number in range(blocks)]
        offer = Offer(
            0, b"".join(keys), keys, [bytes(16), *keys[:-1]], [bytes(16)] * blocks, [self.nbytes] * blocks,
            Payloads(arrays), range(blocks),
        )  # fmt: skip
        answers = [each async for each in self._driven.operations.put.store(self._client, offer, DurabilityMode.ALWAYS)]
        assert set(answers[-1].durability) == {2}, answers[-1]

    async def get_s(self, chain: int, blocks: int) -> float:
        """Return the seconds of a get of blocks that only NVMe has."""
        keys, residency = keys_of(chain, blocks), self._small.residency
        for key in keys:
            row = residency.find(self._client.tenant_id, key)
            if residency.has(row, residency.mapped):
                self._small.leave_host(row)
        began = time.perf_counter()
        found = await self.get(keys)
        taken_s = time.perf_counter() - began
        assert found == blocks, found
        return taken_s

    async def get(self, keys: Sequence[bytes]) -> int:
        """Lease the leading blocks of the chain `keys` that are stored, release them and return their number."""
        held = await self._driven.operations.get.acquire(self._client, GetRequest(b"".join(keys)))
        if held.run is not None:
            self._driven.operations.get.release(self._client, [held.run.lease_id])
        return held.blocks

    def pass_time(self) -> None:
        """Let a second pass, with the maintenance that comes in it."""
        self._small.clock.advance(s=1)
        self._small.store.tick()

    def blocks(self) -> int:
        """Return the number of blocks on NVMe."""
        return self._small.residency.tier_blocks(self._small.residency.durable)

    def holds(self) -> tuple[int, int]:
        """Return the bytes of slots on NVMe, and what they would be without a codec."""
        residency = self._small.residency
        copies = residency.copies[residency.durable]
        rows = [row for row in range(len(copies.nbytes)) if copies.state[row]]
        return sum(copies.nbytes[row] for row in rows), sum(map(residency.slot_bytes, rows))


def fingerprint(shape: PayloadShape) -> Fingerprint:
    return Fingerprint("m", "w", groups=(LayerGroup(0, layers=tuple(range(shape.layers))),))


@asynccontextmanager
async def reader(case: Case, shape: PayloadShape, *settings: str) -> AsyncIterator[Reader]:
    """Yield a reader of a fresh store."""

    def with_shape(*arguments: Any) -> Any:
        residency = make_residency(*arguments)
        residency.shape_of = lambda digest, group, nbytes: shape if nbytes == shape.nbytes else None
        return residency

    payloads = [kv_block(number, shape)[1] for number in range(8)]  # a store measures codecs as it opens
    with (
        mock.patch.object(module, "make_residency", with_shape),
        mock.patch.object(module, "FaultyTier", Sound),
        tempfile.TemporaryDirectory(dir=_in_memory()) as directory,
    ):
        chosen = (*SETTINGS, *settings)
        async with small_store(Path(directory), *chosen, clock=ManualClock(NS_PER_S)) as small:
            await asyncio.sleep(MEASURING_S)
            yield Reader(small, case, shape, payloads)


def possible_s(case: Case, turns: int) -> float:
    """Return the seconds of a get that does nothing but pass its blocks through the link, and read, check and decode
    them, in the form that takes the shortest time: `case` says whether lossy forms count."""
    shape = kv_shape(LAYERS, 64, 3, 64, case.dtype)
    forms = ["none", "context", "int8"] if case.accepts_lossy else ["none", "context"]
    return min(max(link_s, work_s) for link_s, work_s in (_floors(form, case, shape, turns) for form in forms))


def _floors(form: str, case: Case, shape: PayloadShape, turns: int) -> tuple[float, float]:
    """Return the seconds of the link, and of the threads, for `BLOCKS` blocks in `form`, the fastest of `turns`."""
    codec, (header, payload, _) = codec_named(form), kv_block(1, shape)
    room, stored_bytes = AlignedBuffer(2 * shape.nbytes), shape.nbytes
    if codec is not None:
        stored_bytes = codec.encode(header, shape, payload.data, view(room.address, codec.bound(shape.nbytes))).nbytes
    stored = [AlignedBuffer(stored_bytes) for _ in range(IO_THREADS)]
    targets = [AlignedBuffer(shape.nbytes) for _ in range(BLOCKS)]
    idle = list(stored)

    def work(number: int) -> None:
        buffer, target = idle.pop() if codec is not None else targets[number], targets[number]
        os.preadv(file.fileno(), [view(buffer.address, stored_bytes)], number * stored_bytes)
        checksum_at(buffer.address, stored_bytes)
        if codec is not None:
            codec.decode(view(buffer.address, stored_bytes), view(target.address, shape.nbytes))
            checksum_at(target.address, shape.nbytes)
            idle.append(buffer)

    with tempfile.TemporaryFile(dir=_in_memory()) as file, ThreadPoolExecutor(IO_THREADS) as pool:
        for _ in range(BLOCKS):
            file.write(view(room.address, stored_bytes))
        file.flush()
        taken_s = []
        for _ in range(turns):
            began = time.perf_counter()
            list(pool.map(work, range(BLOCKS)))
            taken_s.append(time.perf_counter() - began)
    return BLOCKS * stored_bytes / (case.rate * GB), min(taken_s)


def _in_memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


async def compare(case: Case, turns: int) -> tuple[list[float], list[float]]:
    """Return the seconds of gets under "none" and under "auto", by turn."""
    shape = kv_shape(LAYERS, 64, 3, 64, case.dtype)
    async with AsyncExitStack() as stack:
        with throttled(case.rate * GB):
            plain = await stack.enter_async_context(reader(case, shape))
            auto = await stack.enter_async_context(reader(case, shape, *AUTO))
            for each in (plain, auto):
                for chain in (1, 3):  # what is chosen follows what was measured, of both forms
                    await each.put(keys_of(chain, 16))
                    for _ in range(5):
                        await each.get_s(chain, 16)
                        await asyncio.sleep(0.2)
                await each.put(keys_of(2, BLOCKS))
            taken: tuple[list[float], list[float]] = ([], [])
            for turn in range(turns):
                for each in (plain, auto) if turn % 2 else (auto, plain):
                    taken[each is auto].append(await each.get_s(2, BLOCKS))
            return taken


def measure(quick: bool) -> list[Row]:
    wait_for_library()
    rows = []
    for case in CASES:
        progress(f"{case.name} ...")
        turns = 5 if quick else 15
        plain, auto = map(min, asyncio.run(compare(case, turns)))
        size, floor = BLOCKS * kv_shape(LAYERS, 64, 3, 64, case.dtype).nbytes / GB, possible_s(case, turns)
        rows.append(
            Row(
                case.name, size / auto, "GB/s", size / plain, "codec none", AT_LEAST, case.target,
                possible=size / floor, possible_name=f"the link, or reads and decoding on {os.cpu_count()} cores",
            )
        )  # fmt: skip
    return [*rows, asyncio.run(capacity("int8", True, 1.9)), *quality_rows("int8", quick)]


def quality_rows(codec: str, quick: bool) -> list[Row]:
    """Return what `kvengine quality` says of a codec: the figures of the model that bears it worse."""
    said = []
    for model in ("smollm2-135m-instruct:f16", "gemma-3-270m:f16"):
        progress(f"quality of {codec}, {model} ...")
        words = [sys.executable, "-m", "kvstore_engine.cli", "quality", "--model", model, "--codec", codec, "--json"]
        more = ["--windows", "1", "--next-tokens", "64"] if quick else []
        run = subprocess.run([*words, "--greedy-tokens", "0", *more], stdout=subprocess.PIPE, check=True, text=True)
        said.append(json.loads(run.stdout)["all"])
    kl, top1 = max(each["kl"] for each in said), min(each["top1_percent"] for each in said)
    return [
        Row(f"{codec}_kl", kl, "nats", 1.0, "", AT_MOST, 0.0003),
        Row(f"{codec}_top1", top1, "%", 100.0, "every position", AT_LEAST, 0.993),
    ]


async def capacity(codec: str, accepts_lossy: bool, target: float) -> Row:
    """Return how many times more blocks a tier holds under `codec`: by the bytes of their slots."""
    case = Case(f"capacity_{codec}", 1, "f16", accepts_lossy, target)
    shape = kv_shape(LAYERS, 64, 3, 64, case.dtype)
    async with reader(case, shape, f"nvme.codec={codec}", "nvme.codec_staging=64MiB") as full:
        await full.put(keys_of(1, BLOCKS))
        stored, whole = full.holds()
    return Row(case.name, whole / MIB, "MiB", stored / MIB, "bytes of slots", AT_LEAST, target)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
