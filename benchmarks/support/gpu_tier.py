"""The GPU tier on a device: what a get of resident blocks costs an engine.

Owns the daemon that the question asks, until it has been answered.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np

from kvstore_client import Lease, LeaseArray, Session
from kvstore_client.memory import Bytes
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice
from kvstore_tiers.base import Slot, TierState
from kvstore_tiers.gpu import GpuTier
from kvstore_tiers.testing.transfers import block, get, put
from support.daemon import LAYERS, bench_daemon, model, payloads, tokens_of
from support.gpu_answers import Answer, Sizes, known
from support.gpu_copies import PIECE_BYTES
from support.gpu_memory import copy_s, on_device, settled_bytes
from support.report import percentile, time_once

GET_MS, DEVICE_RATIO = 1.0, 0.8  # what is promised
PATIENCE_S, LOOK_S = 60.0, 0.02
PAYLOAD_BYTES = 200_000
_END_S = 30.0  # for what is looked at after the last death
_TELL_EACH = 10


@contextmanager
def resident(device: int, sizes: Sizes) -> Iterator[tuple[Session, int]]:
    """A session that reads device memory, of a daemon whose GPU tier has `sizes.blocks` blocks of a conversation; and
    the bytes of a block."""
    block_bytes = sizes.rooms_bytes // 4 // sizes.blocks & -PIECE_BYTES
    room = sizes.rooms_bytes
    settings = (
        f"host.capacity={2 * room}", f"host.staging={room}", f"limits.staging_per_client={room // 2}",
        "nvme.enabled=false", "tier.vram.kind=gpu", "tier.vram.before_host=true", f"tier.vram.device={device}",
        f"tier.vram.capacity={room}", f"tier.vram.chunk={min(room // 4, 32 << 20)}", f"tier.vram.bounce={room // 4}",
        "tier.vram.admission=always",
    )  # fmt: skip
    tokens = tokens_of(1, sizes.blocks)
    with bench_daemon(*settings) as daemon, daemon.connect(model(block_bytes), device=device) as session:
        if session.put(tokens, payloads=payloads(sizes.blocks, block_bytes)).stored_blocks != sizes.blocks:
            raise RuntimeError("the blocks were not stored")
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            with session.get(tokens) as lease:
                if len(_addresses(lease)) == sizes.blocks:
                    break
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the blocks were not copied to the device within {PATIENCE_S:.0f} s")
            time.sleep(LOOK_S)
        yield session, block_bytes


def _addresses(lease: Lease) -> list[int]:
    return [address for at in range(len(lease)) if (address := lease.device_address(at))]


def get_of_resident(device: int, sizes: Sizes) -> Answer:
    """A lease on blocks in the GPU tier, and their copy within the device into an engine's blocks of 16 tokens."""
    driver = CudaDevice(device).use_in_this_thread()
    timed_s = partial(copy_s, driver, rounds=sizes.rounds, warm_s=sizes.warm_s)
    tokens = tokens_of(1, sizes.blocks)
    with resident(device, sizes) as (session, block_bytes):
        leases_s = [time_once(lambda: session.get(tokens).release()) for _ in range(sizes.gets)]
        typical_ms, rare_ms = (percentile(leases_s, percent) * 1e3 for percent in (50, 99))
        figures = {"lease p50 ms": typical_ms, "lease p99 ms": rare_ms}
        known(f"lease p50 {typical_ms:.2f} ms, p99 {rare_ms:.2f}", figures)
        nbytes = sizes.blocks * block_bytes
        pool, other = on_device(driver, nbytes), on_device(driver, nbytes)
        with session.get(tokens) as lease:
            sources = [address + start for address in _addresses(lease) for start in range(0, block_bytes, PIECE_BYTES)]
            runs = Runs.of(CopyRun(pool + at * PIECE_BYTES, source, PIECE_BYTES) for at, source in enumerate(sources))
            took_s = timed_s([runs.merged()], to_device=True)
            pieces_s = timed_s([runs], to_device=True)
        large_s = timed_s([_halves(CopyRun(other, pool, nbytes))], to_device=True)
    ratio = large_s / took_s
    says = (
        f"get of {sizes.blocks} resident blocks of {block_bytes >> 10} KiB: lease p50 {typical_ms:.2f} ms, p99 "
        f"{rare_ms:.2f} (promised {GET_MS}), then copied at {ratio:.2f}x of one copy within the device (promised "
        f"{DEVICE_RATIO}), in pieces of {PIECE_BYTES >> 10} KiB {large_s / pieces_s:.2f}x; one copy "
        f"{nbytes / large_s / 1e9:.1f} GB/s"
    )
    figures |= {"copy": ratio, "pieces": large_s / pieces_s, "copy GB/s": nbytes / took_s / 1e9}
    return Answer(typical_ms <= GET_MS and ratio >= DEVICE_RATIO, says, figures)


def _halves(run: CopyRun) -> Runs:
    """Two of them make a batch, whose ends may both be on the device."""
    half = run.nbytes // 2
    return Runs.of([CopyRun(run.to, run.source, half), CopyRun(run.to + half, run.source + half, run.nbytes - half)])


def arrays(device: int, sizes: Sizes) -> Answer:
    """K and V of each layer of leased blocks: where the driver reads them, and as each library takes them, they are the
    bytes that were stored."""
    with resident(device, sizes) as (session, block_bytes):
        readers = {"the driver": partial(_by_driver, session), **_library_readers(device)}
        stored = np.stack(payloads(sizes.blocks, block_bytes)).reshape(sizes.blocks, LAYERS, 2, -1)
        wrong, compared = dict.fromkeys(readers, 0), 0
        with session.get(tokens_of(1, sizes.blocks)) as lease:
            for block_number, layer, pair in np.ndindex(len(lease), LAYERS, 2):
                array, compared = lease.array(block_number, layer, kind="v" if pair else "k"), compared + 1
                for name, take in readers.items():
                    taken = np.ascontiguousarray(take(array)).view(np.uint8).reshape(-1)
                    wrong[name] += not np.array_equal(taken, stored[block_number, layer, pair])
    figures: dict[str, float] = {f"wrong by {name}": float(count) for name, count in wrong.items()}
    each = ", ".join(f"{count} by {name}" for name, count in wrong.items())
    says = f"of {compared} arrays of {stored[0, 0, 0].nbytes >> 10} KiB are wrong: {each}"
    if len(readers) > 1 or any(wrong.values()):
        return Answer(not any(wrong.values()), says, figures)
    missing = "torch for CUDA and CuPy are not installed: pip install '.[cuda]' (or cuda12, torch)"
    return Answer(None, f"{says}; {missing}", figures)


def _by_driver(session: Session, array: LeaseArray) -> Bytes:
    nbytes = math.prod(array.shape) * array.strides[-1]
    (copy,) = session.device.read([(array.address, nbytes)])
    return copy


def _library_readers(device: int) -> dict[str, Callable[[LeaseArray], Any]]:
    """The ways into libraries that are here and find the device; each gives a copy in host memory."""
    readers: dict[str, Callable[[LeaseArray], Any]] = {}
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            where = f"cuda:{device}"
            readers["torch.from_dlpack"] = lambda array: torch.from_dlpack(array).cpu().numpy()
            readers["torch.as_tensor"] = lambda array: torch.as_tensor(array, device=where).cpu().numpy()
    with contextlib.suppress(ImportError):
        import cupy

        with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):  # a driver that it cannot use
            cupy.cuda.Device(device).use()
            cupy.zeros(1)
            readers["cupy.asarray"] = lambda array: cupy.asnumpy(cupy.asarray(array))
            readers["cupy.from_dlpack"] = lambda array: cupy.asnumpy(cupy.from_dlpack(array))
    return readers


def worker_kills(device: int, sizes: Sizes) -> Answer:
    """Kill the worker until the time is up, `sizes.kills` times at most. Each worker copies something: workers that
    copied nothing are started ever more rarely.
    """
    began_s, driver = time.monotonic(), CudaDevice(device).use_in_this_thread()
    before = settled_bytes(driver)
    tier = GpuTier(sizes.rooms_bytes, device=device, chunk_bytes=2 << 20, bounce_bytes=2 << 20)
    killed = copies = 0
    with closing(tier):
        slots = {number: put(tier, *block(number, PAYLOAD_BYTES)) for number in range(1, 1 + sizes.blocks // 4)}
        taken = settled_bytes(driver)
        last_s = began_s + max(sizes.tools_s - _END_S, sizes.tools_s / 2)
        while killed < sizes.kills and time.monotonic() < last_s:
            os.kill(tier.worker_process, signal.SIGKILL)
            killed += 1
            _wait_for_worker(tier, killed + 1)
            number = 1 + killed % len(slots)
            if not _is_there(tier, number, slots[number]):
                return Answer(False, f"block {number} was lost by kill -9 of the worker number {killed}")
            copies += 1
            if killed % _TELL_EACH == 0:
                known(f"{killed} kill -9 of the worker, no block lost so far", {"kills": killed})
        kept = sum(_is_there(tier, number, slot) for number, slot in slots.items())
        grown = max(0, taken - settled_bytes(driver, taken))
    lost = max(0, before - settled_bytes(driver, before))
    says = (
        f"{killed} of {sizes.kills} kill -9 of the worker: {kept} of {len(slots)} blocks kept, {grown} bytes of device "
        f"memory more while the tier is open, {lost} lost once it is closed"
    )
    figures = {"kills": killed, "lost bytes": lost, "grown bytes": grown, "kept": kept, "copies between deaths": copies}
    return Answer(kept == len(slots) and grown == lost == 0, says, figures)


def _wait_for_worker(tier: GpuTier, starts: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while tier.worker_starts < starts or not tier.worker_process or tier.statistics().state is not TierState.OK:
        if time.monotonic() > deadline_s:
            raise RuntimeError("no worker came back")
        time.sleep(LOOK_S)


def _is_there(tier: GpuTier, number: int, slot: Slot | None) -> bool:
    header, payload = block(number, PAYLOAD_BYTES)
    if slot is None:
        return False
    outcome, found = get(tier, slot, header.key, payload.nbytes)
    return outcome.ok and bool((found == payload).all())
