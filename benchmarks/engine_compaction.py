"""Swapping out a sequence whose blocks lie scattered: with and without moving them together first.

A pool of SmolLM2-135M's shape in which sequences grew by turns and half of them have left, so that what is left lies in
pieces. Each survivor is then copied to the host pool 1, 4, 16 or 64 times, once as it lies and once after the
compactor was asked to prepare it for so many transfers; its moves count. The costs that the compactor decides by were
learnt from 200 transfers before. The two ways take turns, on pools laid out alike.

Expected: a move costs as much as a transfer, and a piece of 16 tokens is large enough that its start costs little:
compaction pays only before many transfers, and is declined before few. It must never lose: the target allows the noise
of a timing, 3 %, and a figure is the median over sequences. Runs per transfer may only fall.

    python benchmarks/engine_compaction.py [--json] [--quick]
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np
from support.engine import model_path
from support.report import Row, main
from support.timing import median, time_each, time_once

from kvstore_engine.blocks import BlockSpace, Compactor, Holding, HostPool, TransferCosts
from kvstore_engine.blocks.runs import count_runs
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.pool import BlockPool

SEQUENCES, BLOCKS_EACH, NOISE = 8, 24, 1.03
TRANSFERS = (1, 4, 16, 64)
LEARNING = 200


@dataclass
class Layout:
    """A pool in which every second sequence has left; `left` are those that have not."""

    space: BlockSpace
    host: HostPool
    left: list[Holding]


def measure(quick: bool) -> list[Row]:
    with GGUFFile.open(model_path("q4_0")) as file:
        config = ModelConfig.from_gguf(file)
    costs = TransferCosts()
    _learn(_scattered(config), costs)
    rows = []
    for transfers in TRANSFERS:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        runs: dict[bool, int] = dict.fromkeys(seconds, 0)
        for turn in range(2 if quick else 10):
            for compacts in (False, True) if turn % 2 else (True, False):
                layout = _scattered(config)
                for holding in layout.left:
                    spent, pieces = _transferred(layout, holding, transfers, costs if compacts else None)
                    seconds[compacts].append(spent)
                    runs[compacts] += pieces
        took = {compacts: median(found) * 1e3 for compacts, found in seconds.items()}
        rows.append(Row(f"time_{transfers}_transfers", took[True], "ms", took[False], "ms", target=NOISE))
        rows.append(Row(f"runs_{transfers}_transfers", runs[True], "runs", runs[False], "runs", target=1.0))
    return rows


def _scattered(config: ModelConfig) -> Layout:
    # Twice the room: what has left leaves holes of single blocks, and the rest of the pool is free as one run.
    pool = BlockPool(config, 2 * SEQUENCES * BLOCKS_EACH)
    space = BlockSpace(pool, sharing=False)
    host = HostPool(pool, 2 * BLOCKS_EACH * pool.payload_bytes(1))
    block = pool.block_tokens
    tokens = np.zeros(block, np.int32)
    holdings = [space.claim("", tokens) for _ in range(SEQUENCES)]
    for count in range(2, BLOCKS_EACH + 1):
        for holding in holdings:
            space.extend(holding, count * block)
    for holding in holdings[::2]:
        space.release(holding)
    for holding in holdings[1::2]:
        host.free(host.save(holding.blocks))  # first writes to fresh memory are not what is measured
    return Layout(space, host, holdings[1::2])


def _transferred(layout: Layout, holding: Holding, times: int, costs: TransferCosts | None) -> tuple[float, int]:
    """Seconds of all transfers, the compaction's included, and the pieces of one."""
    prepared = time_once(lambda: Compactor(layout.space, costs).compact(holding, times)) if costs is not None else 0.0
    # The median of the transfers for all of them: one that was interrupted says nothing of how blocks lie.
    each = median(time_each(lambda: layout.host.free(layout.host.save(holding.blocks)), times))
    return prepared + times * each, count_runs(holding.table)


def _learn(layout: Layout, costs: TransferCosts) -> None:
    """Transfers of parts of all sizes, as an engine sees them."""
    random = np.random.Generator(np.random.PCG64(1))
    for _ in range(LEARNING):
        holding = layout.left[int(random.integers(len(layout.left)))]
        first = int(random.integers(BLOCKS_EACH - 1))
        blocks = holding.blocks[first : first + int(random.integers(1, BLOCKS_EACH - first))]
        if random.random() < 0.5:  # the same bytes in one piece
            blocks = list(range(len(blocks)))
        begin = time.perf_counter()
        places = layout.host.save(blocks)
        costs.observe(len(blocks) * layout.host.block_bytes, count_runs(blocks), time.perf_counter() - begin)
        layout.host.free(places)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
