"""Measures a put of 32 MiB that is written where it will be, out of an engine's paged tensors.

32 blocks of 1 MiB, each gathered from 32 pieces (K and V of 16 layers), into prefaulted arenas, by a client that has
mapped them. Baseline: one thread's gather of the same pieces into shared memory that is touched already: the one copy
that no put can leave out. Beside it the same put by way of staging, two copies, in turns with the first. Twice in a row
each, since what follows a rest wakes idle cores. Possible at all: the same gather into memory that takes turns, as
slots do, while a thread checksums each block once it is written, and one message that the daemon answers, about a block
that it has: the last one of a put, without anything to store, check or publish.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from queue import SimpleQueue

import numpy as np
from support.daemon import MIB, Bytes, bench_daemon, model, shared_memory, tokens_of, wait_mapped
from support.report import Row, main, median, time_each

from kvstore_client import Session
from kvstore_tiers.segments import checksum_at

BLOCKS, LAYERS = 32, 16
PIECE = MIB // (2 * LAYERS)
WARM_UP = 2
DRAM_MIB = 4608  # beside what is put: of less than 4.2 GiB fewer slots than a put has are held ahead for the next one
TURNS = 8  # targets of 32 MiB: more than a cache holds


class Pool:
    """An engine's K/V memory: an array a layer and kind, shape [pages, PIECE], uint8. Pages are not in order."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self._arrays = [rng.integers(0, 256, (BLOCKS, PIECE), np.uint8) for _ in range(2 * LAYERS)]
        self._pages = rng.permutation(BLOCKS)

    def gather(self, block: int, destination: Bytes) -> None:
        """Copy one block's pieces side by side."""
        page, rows = self._pages[block], destination.reshape(2 * LAYERS, PIECE)
        for array, row in zip(self._arrays, rows, strict=True):
            row[:] = array[page]


def measure(quick: bool) -> list[Row]:
    rounds = 4 if quick else 12
    arenas_mib = (2 * rounds + WARM_UP + 2) * (BLOCKS + 1)
    settings = (
        f"host.capacity={arenas_mib + DRAM_MIB}MiB", "host.staging=256MiB", f"host.prefault_ahead={arenas_mib}MiB",
    )  # fmt: skip
    pool = Pool()
    copied, in_place, staged, checksummed, answered = [], [], [], [], []
    target, *targets = (shared_memory(BLOCKS * MIB) for _ in range(1 + TURNS))

    def copy_alone() -> None:
        for block in range(BLOCKS):
            pool.gather(block, target[block * MIB : (block + 1) * MIB])

    def copy_and_checksum() -> None:
        """Another thread checksums each block as soon as it is written; neither holds the GIL in its bytes."""
        written: SimpleQueue[int | None] = SimpleQueue()
        targets.append(taken := targets.pop(0))
        address = taken.ctypes.data
        sums = threading.Thread(
            target=lambda: [checksum_at(address + block * MIB, MIB) for block in iter(written.get, None)]
        )
        sums.start()
        for block in range(BLOCKS):
            pool.gather(block, taken[block * MIB : (block + 1) * MIB])
            written.put(block)
        written.put(None)
        sums.join()

    with (
        bench_daemon(*settings, "nvme.enabled=false", "put.in_place=true") as daemon,
        bench_daemon(*settings, "nvme.enabled=false") as plain,
        daemon.connect(model(MIB)) as session, plain.connect(model(MIB)) as other,
    ):  # fmt: skip
        for each in (daemon, plain):
            each.wait_prefaulted(arenas_mib * MIB)
        puts, staged_puts = _Puts(session, pool), _Puts(other, pool)
        for _ in range(WARM_UP):
            puts.put()
            puts.ask()
            staged_puts.put()
        wait_mapped()
        for _ in range(rounds):
            copied += time_each(copy_alone, 2)
            checksummed += time_each(copy_and_checksum, 2)
            in_place += time_each(puts.put, 2)
            answered += time_each(puts.ask, 2)
            staged += time_each(staged_puts.put, 2)
    one_copy, ours, possible = median(copied) * 1e3, median(in_place) * 1e3, median(checksummed) + median(answered)
    return [
        Row("put_32mib_in_place", ours, "ms", one_copy, "one copy alone", target=1.35,
            possible=possible * 1e3, possible_name="a copy, a checksum beside it, and an answer"),
        Row("put_32mib_in_place", ours, "ms", median(staged) * 1e3, "by way of staging", target=1.0),
    ]  # fmt: skip


class _Puts:
    """Puts of 32 new blocks, each a conversation of its own."""

    def __init__(self, session: Session, pool: Pool) -> None:
        self._session = session
        self._payloads = [partial(pool.gather, block) for block in range(BLOCKS)]
        self._conversation = 0

    def put(self) -> None:
        self._conversation += 1
        receipt = self._session.put(tokens_of(self._conversation, BLOCKS), payloads=self._payloads)
        if receipt.stored_blocks != BLOCKS:
            raise RuntimeError(f"stored {receipt.stored_blocks} of {BLOCKS} blocks: {receipt.reason}")

    def ask(self) -> None:
        """Put the first block of the last conversation, which is stored."""
        receipt = self._session.put(tokens_of(self._conversation, 1), payloads=self._payloads[:1])
        if receipt.statuses != ["present"]:
            raise RuntimeError(f"a stored block is {receipt.statuses}: {receipt.reason}")


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
