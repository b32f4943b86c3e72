"""Copies between host and device: pieces against one large copy, and an arena's blocks into an engine's paged pool; and
checksums of device memory by the GPU tier's own kernel.

Speeds are ratios against one large copy of pinned memory in the same run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np
import xxhash

from kvstore_console.units import human_bytes
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError
from kvstore_tiers.gpu.streams import Checksums, Events
from support.gpu_answers import Answer, Sizes, known, listed
from support.gpu_memory import arena, copy_s, on_device, pinned, run_of

POOL_RATIO = 0.9  # the least that is promised, for blocks that are consecutive in the pool
ENGINE_TOKENS, STORED_TOKENS = 16, 64
ROW_BYTES = 8 * 128 * 2  # of a token, K or V, in a layer: 8 heads of 128 channels in bf16
PIECE_BYTES = ENGINE_TOKENS * ROW_BYTES
_PER_PLANE = STORED_TOKENS // ENGINE_TOKENS
BLOCK_BYTES = 1 << 20


def pieces(device: int, sizes: Sizes) -> Answer:
    """Copies in pieces, none of which touches another, against one large copy."""
    driver, nbytes = CudaDevice(device).use_in_this_thread(), sizes.copied_bytes
    timed_s = partial(copy_s, driver, rounds=sizes.rounds, warm_s=sizes.warm_s)
    at = on_device(driver, nbytes)
    _, host = pinned(driver, nbytes)
    said, figures = [], {}
    for to_device in (True, False):
        way = "to the device" if to_device else "to the host"
        large_s = timed_s([Runs.of([run_of(at, host, nbytes, to_device=to_device)])], to_device=to_device)
        figures[f"{way}, GB/s"] = nbytes / large_s / 1e9
        ratios = {}
        for piece in sizes.pieces_bytes:
            offsets = range(0, nbytes, 2 * piece)
            runs = Runs.of(run_of(at + offset, host + offset, piece, to_device=to_device) for offset in offsets)
            ratios[piece] = large_s / 2 / timed_s([runs], to_device=to_device)
            figures[f"{way}, {piece >> 10} KiB"] = ratios[piece]
            of_way = f"{way}: one copy {nbytes / large_s / 1e9:.1f} GB/s, batches of {listed(ratios)}"
            known("; ".join([*said, of_way]), figures)
        said.append(of_way)
    return Answer(True, "; ".join(said), figures)


def arena_and_pool(device: int, sizes: Sizes) -> Answer:
    """Storage blocks of a model of 8 billion parameters from an arena into a paged pool, layer by layer, and from the
    pool into staging: where the pool's blocks are consecutive, and where none are neighbours."""
    driver = CudaDevice(device).use_in_this_thread()
    timed_s = partial(copy_s, driver, rounds=sizes.rounds, warm_s=sizes.warm_s)
    planes, blocks = 2 * sizes.layers, sizes.blocks
    plane_bytes = blocks * STORED_TOKENS * ROW_BYTES
    nbytes = planes * plane_bytes
    pool = on_device(driver, 2 * nbytes)  # twice as many blocks: none need be neighbours
    filled, source, why = arena(driver, nbytes)
    stored, staging = pinned(driver, nbytes)
    said, figures, holds = [], {}, True
    scattered = random.Random(0).sample(range(0, 2 * blocks * _PER_PLANE, 2), blocks * _PER_PLANE)
    for to_device, host in ((True, source), (False, staging)):
        way = "arena to pool" if to_device else "pool to staging"
        whole = [Runs.of([run_of(pool, host, nbytes, to_device=to_device)])]
        large_s = timed_s(whole, to_device=to_device)
        ratios = {}
        for kind, places in (("consecutive", range(blocks * _PER_PLANE)), ("scattered", scattered)):
            batches = [
                _plane_runs(pool + plane * 2 * plane_bytes, host, plane, planes, places, to_device=to_device).merged()
                for plane in range(planes)
            ]
            ratios[kind] = large_s / timed_s(batches, to_device=to_device)
            figures[f"{way}, {kind}"] = ratios[kind]
        figures[f"{way}, one copy GB/s"] = nbytes / large_s / 1e9
        holds = holds and ratios["consecutive"] >= POOL_RATIO
        said.append(
            f"{way} {ratios['consecutive']:.2f}x of one copy (promised {POOL_RATIO}), scattered "
            f"{PIECE_BYTES >> 10} KiB {ratios['scattered']:.2f}x, one copy {nbytes / large_s / 1e9:.1f} GB/s"
        )
        known("; ".join(said), figures)
    if not np.array_equal(np.frombuffer(stored, np.uint8), np.frombuffer(filled, np.uint8)):
        holds = False
        said.append("the bytes that came back are WRONG")
    note = f"; the arena is registered writable, since {why}" if why else ""
    block_kib = planes * STORED_TOKENS * ROW_BYTES >> 10
    return Answer(holds, f"{blocks} blocks of {block_kib} KiB: {'; '.join(said)}{note}", figures)


def _plane_runs(pool: int, host: int, plane: int, planes: int, places: range | list[int], *, to_device: bool) -> Runs:
    """The pieces of one plane: a storage block is layer-major, so each has `_PER_PLANE` neighbours in the arena."""
    block_bytes, runs = planes * STORED_TOKENS * ROW_BYTES, []
    for number, place in enumerate(places):
        block, part = divmod(number, _PER_PLANE)
        offset = block * block_bytes + (plane * _PER_PLANE + part) * PIECE_BYTES
        runs.append(run_of(pool + place * PIECE_BYTES, host + offset, PIECE_BYTES, to_device=to_device))
    return Runs.of(runs)


def checksums(device: int, sizes: Sizes) -> Answer:
    """Measure checksums of one block, and of many in one launch. The speed only informs."""
    driver, nbytes = CudaDevice(device).use_in_this_thread(), sizes.copied_bytes
    at = on_device(driver, nbytes)
    mapping, host = pinned(driver, nbytes)
    np.frombuffer(mapping, np.uint64)[:] = np.random.default_rng(1).integers(0, 2**63, nbytes // 8)
    copy_s(driver, [Runs.of([CopyRun(at, host, nbytes)])], to_device=True)
    found: SimpleQueue[tuple[Sequence[int], DriverError | None]] = SimpleQueue()
    kernel = Checksums(driver, Events(driver), lambda _, sums, failure: found.put((sums, failure)))
    said, figures, holds = [], {}, True
    for count in (1, nbytes // BLOCK_BYTES):
        ranges = [(at + block * BLOCK_BYTES, BLOCK_BYTES) for block in range(count)]
        took_s = []
        for _ in range(sizes.rounds):
            began_s = time.perf_counter()
            kernel.start([(0, ranges)])
            sums, failure = found.get()
            took_s.append(time.perf_counter() - began_s)
            if failure is not None:
                raise failure
        wanted = [xxhash.xxh3_64_intdigest(mapping[start - at : start - at + size]) for start, size in ranges]
        holds = holds and list(sums) == wanted
        figures[f"{count} blocks, GB/s"] = count * BLOCK_BYTES / min(took_s) / 1e9
        said.append(
            f"{count} x {human_bytes(BLOCK_BYTES)} {figures[f'{count} blocks, GB/s']:.1f} GB/s, "
            f"{min(took_s) * 1e6:.0f} us"
        )
        known(", ".join(said), figures, holds=None if holds else False)
    verdict = "are xxhash's" if holds else "are NOT xxhash's"
    return Answer(holds, f"checksums by the device {verdict}: {', '.join(said)}", figures)
