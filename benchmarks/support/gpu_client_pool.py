"""An engine's copies by the client's own code: leases into its paged pool, pages of it into a put's slots.

Owns the daemon that the question asks, until it has been answered. What `arena-pool` asks of the driver alone is asked
here of `DeviceTransfers`: lists of copies, registrations, events and threads take part.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvstore_client import Session
from kvstore_client.device import DeviceMemory, DevicePool, DeviceTransfers, PoolPart
from kvstore_client.device.crossover import WAYS, CopyCrossover
from kvstore_client.device.gather import GatherKernel
from kvstore_client.memory import Bytes
from kvstore_client.payload import FillSlot, Finish
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.nvrtc import CompileError
from support.daemon import bench_daemon, model, payloads, tokens_of
from support.gpu_answers import Answer, Sizes, known
from support.gpu_copies import PIECE_BYTES, POOL_RATIO
from support.gpu_memory import arena, copy_s, on_device, pinned, run_of

RUN_BYTES = 4 << 10
MOST_BYTES = 64 << 20
BLOCKS_OF_ONE = 4  # blocks of 16 tokens in one of `sizes.blocks`, which have 64
REGISTERED_S = 60.0
_ARENA_BYTES = 64 << 20


def client_gather(device: int, sizes: Sizes) -> Answer:
    """Holds where the kernel moves the right bytes: what it reads, on hardware, only the host may read."""
    nbytes = min(sizes.copied_bytes, MOST_BYTES)
    driver, memory = CudaDevice(device).use_in_this_thread(), DeviceMemory(device)
    pool = on_device(driver, 2 * nbytes)
    filled, source, why = arena(driver, nbytes, for_kernels=True)
    stored, staging = pinned(driver, nbytes, for_kernels=True)
    pages = random.Random(0).sample(range(2 * nbytes // RUN_BYTES), nbytes // RUN_BYTES)
    places = [(pool + page * RUN_BYTES, number * RUN_BYTES) for number, page in enumerate(pages)]
    try:
        with memory.current():
            kernel, stream = GatherKernel(memory), memory.call("cuStreamCreate", 1)
            kernel.queue(Runs.of(CopyRun(page, source + at, RUN_BYTES) for page, at in places), stream)
            kernel.queue(Runs.of(CopyRun(staging + at, page, RUN_BYTES) for page, at in places), stream)
            memory.call("cuStreamSynchronize", stream)
    except CompileError as error:
        return Answer(None, f"there is no kernel: {error}")
    is_right = np.array_equal(np.frombuffer(stored, np.uint8), np.frombuffer(filled, np.uint8))
    limits = CopyCrossover(memory).settled()
    figures = {f"{way}, KiB at most": limits.get(way, 0) / 1024 for way in WAYS}
    said = ", ".join(f"{way} {limits.get(way, 0) >> 10} KiB" for way in WAYS)
    note = f"; the arena is registered writable, since {why}" if why else ""
    right = "moves the right bytes" if is_right else "moves WRONG bytes"
    return Answer(is_right, f"the kernel {right}; runs that it copies, at most: {said}{note}", figures)


def client_pool(device: int, sizes: Sizes) -> Answer:
    """Blocks of 16 tokens of a model of 8 billion parameters, into pages none of which are neighbours, and back."""
    driver, blocks = CudaDevice(device).use_in_this_thread(), sizes.blocks * BLOCKS_OF_ONE
    block_bytes = sizes.layers * 2 * PIECE_BYTES
    timed_s = partial(copy_s, driver, rounds=sizes.rounds, warm_s=sizes.warm_s)
    nbytes = blocks * block_bytes
    with bench_daemon(*daemon_settings(nbytes)) as daemon, daemon.connect(model(block_bytes), device=device) as session:
        at, kept = on_device(driver, 2 * nbytes), payloads(blocks, block_bytes)
        pages = random.Random(0).sample(range(0, 2 * blocks, 2), blocks)
        _, host = pinned(driver, nbytes)
        with DeviceTransfers(session.device, _pool(at, sizes.layers, 2 * blocks)) as transfers:
            transfers.resources.crossover.settled()
            session.put(tokens_of(1, blocks), payloads=kept)
            load_s = min(_loads_s(session, transfers, pages, sizes.rounds))
            known(f"load {nbytes / load_s / 1e9:.1f} GB/s", {"load GB/s": nbytes / load_s / 1e9})
            store_s = min(_stores_s(session, transfers, pages, sizes.rounds))
            is_right = _is_stored(session, 2 + sizes.rounds, kept)
        in_s, out_s = (
            timed_s([Runs.of([run_of(at, host, nbytes, to_device=way)])], to_device=way) for way in (True, False)
        )
    load, store = in_s / load_s, out_s / store_s
    says = (
        f"{blocks} blocks of {block_bytes >> 10} KiB by the client: load {load:.2f}x of one copy (promised "
        f"{POOL_RATIO}), {nbytes / load_s / 1e9:.1f} GB/s; store {store:.2f}x, {nbytes / store_s / 1e9:.1f} GB/s"
        f"{'' if is_right else '; the bytes that came back are WRONG'}"
    )
    figures = {"load": load, "store": store, "load GB/s": nbytes / load_s / 1e9, "store GB/s": nbytes / store_s / 1e9}
    return Answer(is_right and min(load, store) >= POOL_RATIO, says, figures)


def daemon_settings(nbytes: int) -> tuple[str, ...]:
    """Return the settings of a daemon that holds two conversations of `nbytes` each, the one that is loaded and the one
    that was stored last. `host.capacity` counts staging, a ledger and whole arenas, whose slots are larger than
    payloads: so there is room for a third.
    """
    staging = 2 * nbytes
    return (
        f"host.capacity={staging + 3 * nbytes + _ARENA_BYTES}", f"host.staging={staging}",
        f"limits.staging_per_client={staging}", "nvme.enabled=false",
    )  # fmt: skip


def _pool(address: int, layers: int, pages: int) -> DevicePool:
    """K and V of each layer are arrays of their own."""
    arrays = [address + at * pages * PIECE_BYTES for at in range(2 * layers)]
    parts = [PoolPart(at, PIECE_BYTES, PIECE_BYTES) for at in arrays]
    return DevicePool([parts[2 * layer : 2 * layer + 2] for layer in range(layers)], pages)


def _loads_s(session: Session, transfers: DeviceTransfers, pages: list[int], rounds: int) -> list[float]:
    """Return the seconds of each load, from the call until all bytes are in their pages; not the first, before memory
    is registered.
    """
    took_s = []
    for _ in range(1 + rounds):
        with session.get(tokens_of(1, len(pages))) as lease:
            began_s = time.perf_counter()
            if not transfers.load(lease, pages).finish() or lease.blocks != len(pages):
                raise RuntimeError("the blocks were not loaded")
            took_s.append(time.perf_counter() - began_s)
        _settle(transfers)
    return took_s[1:]


def _stores_s(session: Session, transfers: DeviceTransfers, pages: list[int], rounds: int) -> list[float]:
    """Return the seconds of each put, while its payloads were on their way into slots; what the daemon does with them
    is not in it. Not the first, before memory is registered.
    """
    took_s = []
    for conversation in range(2, 3 + rounds):
        if conversation > 2:
            session.delete(tokens_of(conversation - 1, len(pages)))
        watch = _Watch()
        receipt = session.put(
            tokens_of(conversation, len(pages)),
            payloads=[watch.over(transfers.payload_of(page)) for page in pages],
            payload_bytes=transfers.pool.block_bytes,
        )
        if receipt.stored_blocks != len(pages):
            raise RuntimeError(f"{receipt.stored_blocks} of {len(pages)} blocks were stored")
        took_s.append(watch.seconds)
        _settle(transfers)
    return took_s[1:]


def _settle(transfers: DeviceTransfers) -> None:
    if not transfers.registered.settle(REGISTERED_S):
        raise RuntimeError(f"memory was not registered within {REGISTERED_S:.0f} s")


class _Watch:
    """Seconds in which payloads had been begun and were not in their slots yet."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._under_way, self._began_s = 0, 0.0

    def over(self, fill: FillSlot) -> FillSlot:
        def begin(destination: Bytes) -> Finish:
            if not self._under_way:
                self._began_s = time.perf_counter()
            self._under_way += 1
            return self._ending(fill(destination))

        return begin

    def _ending(self, finish: Callable[[], None] | None) -> Finish:
        def end() -> None:
            if finish is not None:
                finish()
            self._under_way -= 1
            if not self._under_way:
                self.seconds += time.perf_counter() - self._began_s

        return end


def _is_stored(session: Session, conversation: int, expected: list[Bytes]) -> bool:
    with session.get(tokens_of(conversation, len(expected))) as lease:
        return lease.blocks == len(expected) and all(
            np.array_equal(lease.payload(block), payload) for block, payload in enumerate(expected)
        )
