"""Swapping out sequences whose blocks are scattered: what reduces the scattering, and what that costs.

Pools of SmolLM2-135M's shape: K/V in f16 and blocks of 16 tokens, as it is by default, whose pieces are of 6 KB; and in
q4_0 and blocks of 8 tokens (*small*), of 0.9 KB. Three questions:

*grown*: eight sequences grow by turns, a block each. The engine's placing (what cannot go on behind itself goes on in
the midst of the largest free run) against the smallest free run that holds it, which is what a free list does that
keeps large runs whole. Counted is one copy of each sequence to the host pool.

*transfers*: sequences without two adjacent blocks are copied 1, 4, 16 or 64 times, without preparation and after the
compactor has prepared them for that many copies; its search and its moves count. The costs that it decides by were
learnt from 200 transfers before.

*swaps*: the same are swapped out and in again eight times, as in an engine that is short of blocks, and the compactor
is asked before each swap to prepare the one copy that follows: a sequence that is swapped in gets other blocks,
adjacent ones where there is room.

The ways take turns copy by copy, on two pools laid out alike. Times are of the thread's processor, which others
lengthen little; a figure is the median over sequences. Host memory has been written to before.

Expected: a move costs as much as a transfer, and a piece of 16 tokens is large enough that its start costs little:
compaction pays only before many copies, and is declined before few. It must never lose: the target allows the noise of
a timing, 3 %. Runs per transfer may only fall. Placing costs nothing, so it should be where the runs are saved. Seen:
24 pieces of 6 KB instead of one cost a transfer 4 to 17 %, and no move pays within 64 transfers. 48 small ones cost a
fifth; a move took as long as four transfers, half of it for the books, which its estimate once left out: it lost 6 %
before 16 transfers. Before 64 it takes an eighth off.

    python benchmarks/engine_compaction.py [--json] [--quick]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from support.engine import model_path
from support.report import Row, main
from support.timing import median

from kvstore_engine.blocks import BlockSpace, BlockTable, Compactor, HostPool, TransferCosts, swap_in, swap_out
from kvstore_engine.blocks.transfers import count_runs
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.pool import BlockPool

SEQUENCES, NOISE = 8, 1.03
TRANSFERS = (1, 4, 16, 64)
SWAPS = 8
LEARNING, LEAST_COPIES = 200, 9
clock = time.thread_time


@dataclass(frozen=True)
class Shape:
    """Of a pool, and of the sequences in it."""

    config: ModelConfig
    prefix: str
    block_tokens: int
    kv_dtype: str
    blocks_each: int

    def pool(self) -> BlockPool:
        """Four times what the sequences fill."""
        blocks = 4 * SEQUENCES * self.blocks_each
        return BlockPool(self.config, blocks, block_tokens=self.block_tokens, kv_dtype=self.kv_dtype)


@dataclass
class Layout:
    """A pool with sequences in it, and as much room again."""

    space: BlockSpace
    host: HostPool
    block_tables: list[BlockTable]


@dataclass(frozen=True)
class Spent:
    """`seconds` in all, and the pieces of the copies."""

    seconds: float
    runs: int


Both = tuple[list[Spent], list[Spent]]
"""For each sequence, without and with what is asked about."""
Turn = Callable[[], Both]


def measure(quick: bool) -> list[Row]:
    with GGUFFile.open(model_path("q4_0")) as file:
        config = ModelConfig.from_gguf(file)
    return [
        *_of(Shape(config, "", 16, "f16", 24), quick),
        *_of(Shape(config, "small_", 8, "q4_0", 48), quick),
    ]


def _of(shape: Shape, quick: bool) -> list[Row]:
    costs = TransferCosts()
    _learn(_scattered(shape), costs)
    turns, prefix = 2 if quick else 10, shape.prefix
    rows = _rows(f"{prefix}grown", "where it fits", turns, lambda: _grown(shape), 1.0, 0.5)
    for transfers in TRANSFERS:
        turn = _transfers(shape, costs, transfers)
        rows += _rows(f"{prefix}{transfers}_transfers", "not compacted", turns, turn, NOISE, 1.0)
    return rows + _rows(f"{prefix}{SWAPS}_swaps", "not compacted", turns, _swaps(shape, costs), NOISE, 1.0)


def _rows(name: str, other: str, turns: int, turn: Turn, most_time: float, most_runs: float) -> list[Row]:
    without: list[Spent] = []
    with_: list[Spent] = []
    for _ in range(turns):
        both = turn()
        without += both[0]
        with_ += both[1]
    ms = [median([spent.seconds for spent in found]) * 1e3 for found in (without, with_)]
    runs = [sum(spent.runs for spent in found) / len(found) for found in (without, with_)]
    return [
        Row(f"{name}_time", ms[1], "ms", ms[0], f"ms, {other}", target=most_time),
        Row(f"{name}_runs", runs[1], "runs", runs[0], f"runs, {other}", target=most_runs),
    ]


def _grown(shape: Shape) -> Both:
    layouts = _empty(shape), _empty(shape)
    size = shape.block_tokens
    for layout in layouts:
        layout.block_tables = [layout.space.claim("", np.zeros(size, np.int32)) for _ in range(SEQUENCES)]
    for count in range(2, shape.blocks_each + 1):
        for fitting, placed in zip(*(layout.block_tables for layout in layouts), strict=True):
            fitting.append(layouts[0].space.allocate(1))
            layouts[1].space.extend(placed, count * size)
    pairs = zip(*(layout.block_tables for layout in layouts), strict=True)
    plain, better = zip(*(_copied(layouts, pair, 1) for pair in pairs), strict=True)
    return list(plain), list(better)


def _transfers(shape: Shape, costs: TransferCosts, times: int) -> Turn:
    def turn() -> Both:
        layouts = _scattered(shape), _scattered(shape)
        both: Both = ([], [])
        compactor = Compactor(layouts[1].space, costs, clock)
        for unprepared, compacted in zip(*(layout.block_tables for layout in layouts), strict=True):
            begin = clock()
            compactor.compact(compacted, times)
            prepared_s = clock() - begin
            plain, better = _copied(layouts, (unprepared, compacted), times)
            both[0].append(plain)
            both[1].append(Spent(prepared_s + better.seconds, better.runs))
        return both

    return turn


def _swaps(shape: Shape, costs: TransferCosts) -> Turn:
    tokens = np.zeros(shape.blocks_each * shape.block_tokens, np.int32)

    def turn() -> Both:
        layouts = _scattered(shape), _scattered(shape)
        both: Both = ([], [])
        compactor = Compactor(layouts[1].space, costs, clock)
        for pair in zip(*(layout.block_tables for layout in layouts), strict=True):
            held, seconds, runs = list(pair), [0.0, 0.0], [0, 0]
            for swap in range(2 * SWAPS):
                way = swap % 2
                space, host = layouts[way].space, layouts[way].host
                begin = clock()
                if way:
                    compactor.compact(held[way], 1)
                runs[way] += count_runs(held[way].table)
                held[way], _ = swap_in(space, host, swap_out(space, host, held[way], len(tokens)), tokens)
                seconds[way] += clock() - begin
            for way, found in enumerate(both):
                found.append(Spent(seconds[way], runs[way]))
        return both

    return turn


def _empty(shape: Shape) -> Layout:
    pool = shape.pool()
    space = BlockSpace(pool, sharing=False)
    host = HostPool(pool, 2 * shape.blocks_each * pool.payload_bytes(1))
    host.free(host.save(list(range(shape.blocks_each))))  # first writes to fresh memory are not what is measured
    return Layout(space, host, [])


def _scattered(shape: Shape) -> Layout:
    """Every block alone: what was between them has left, and half of the pool is free as one run."""
    layout = _empty(shape)
    space, size = layout.space, layout.space.block_tokens
    gaps, block_tables = [], [space.claim("", np.zeros(size, np.int32)) for _ in range(SEQUENCES)]
    for _ in range(2, shape.blocks_each + 1):
        for block_table in block_tables:
            gaps += space.allocate(1)
            block_table.append(space.allocate(1))
    space.references.release(gaps)
    layout.block_tables = block_tables
    return layout


def _copied(
    layouts: tuple[Layout, Layout], block_tables: tuple[BlockTable, BlockTable], times: int
) -> tuple[Spent, Spent]:
    """One sequence in the two layouts, copied in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(max(times, LEAST_COPIES)):
        for layout, block_table, found in zip(layouts, block_tables, seconds, strict=True):
            begin = clock()
            places = layout.host.save(block_table.blocks)
            found.append(clock() - begin)
            layout.host.free(places)
    # Each copy counts with the median time: the time of an interrupted copy does not depend on the layout alone.
    first, second = (
        Spent(times * median(found), count_runs(block_table.ids))
        for block_table, found in zip(block_tables, seconds, strict=True)
    )
    return first, second


def _learn(layout: Layout, costs: TransferCosts) -> None:
    """Transfers of parts of all sizes, as an engine sees them."""
    random = np.random.Generator(np.random.PCG64(1))
    for _ in range(LEARNING):
        block_table = layout.block_tables[int(random.integers(len(layout.block_tables)))]
        first = int(random.integers(block_table.count - 1))
        blocks = block_table.blocks[first : first + int(random.integers(1, block_table.count - first))]
        if random.random() < 0.5:
            # As many bytes in one piece, from a random place: a place that is read repeatedly stays in a cache.
            start = int(random.integers(layout.space.pool.blocks - len(blocks)))
            blocks = list(range(start, start + len(blocks)))
        begin = clock()
        places = layout.host.save(blocks)
        costs.observe(len(blocks) * layout.host.block_bytes, count_runs(blocks), clock() - begin)
        layout.host.free(places)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
