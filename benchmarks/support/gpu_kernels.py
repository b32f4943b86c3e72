"""Measures the engine's CUDA kernels on a GPU: their speed against copies, their crossover, their errors.

A `Card` is the device as these questions want it; a test has a stand-in.

Speeds are bytes of K and V read, against the bytes that a large copy within the device reads and writes in the same
time, in the same run; microseconds and bytes a second are beside them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.cuda.attention import AttentionCrossover, KernelRows, PagedAttention
from kvstore_engine.kernels.cuda.blocks import BlockMover, BlockRuns
from kvstore_engine.kernels.cuda.crossover import least_rows, pass_ratios
from kvstore_engine.kernels.cuda.device import CacheWindow, Device
from kvstore_engine.kernels.cuda.program import CacheShape, Launcher
from kvstore_engine.kernels.cuda.rope import NewTokens, RopeCache, turns
from kvstore_engine.kernels.reference import paged_attention
from support.gpu_answers import Answer, known

BF16, INT8 = CacheShape(32, 8, 128, 16), CacheShape(32, 8, 128, 16, cache="int8")
BATCH_RATIO, LONG_RATIO, INT8_RATIO = 0.8, 0.6, 1.3  # the least that is promised
# Of results, for K, V and queries that are normally distributed: the greatest error, and for int8 the root mean square.
BF16_ERROR, INT8_ERROR, INT8_TYPICAL_ERROR = 1e-2, 1e-1, 1e-2
Array = npt.NDArray[np.generic]
Transferred = Callable[[], float]
PIECES_BYTES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10)
MOVED_BYTES = 64 << 20
FEW_BLOCKS = 16  # thread blocks: what a load may take from a step that runs beside it
LAYERS = 4  # that take turns, so that no launch finds in the cache what the one before it left


@dataclass(frozen=True, slots=True)
class Decode:
    """One token each of `batch` sequences with `context` tokens, whose blocks are scattered over the pool."""

    card: Card
    attention: PagedAttention
    batch: int
    context: int
    rows: KernelRows
    planes: tuple[int, int]
    queries: int
    output: int
    scratch: int

    @classmethod
    def of(cls, card: Card, shape: CacheShape, batch: int, context: int) -> Decode:
        random = np.random.default_rng(0)
        width = math.ceil(context / shape.block_tokens)
        tables = random.permutation(batch * width).astype(np.int32).reshape(batch, width)
        # Any bits that are numbers will do: finite floats, and scales of the same blocks.
        chunk = np.full((64, shape.block_bytes), 0x3C, np.uint8)
        planes = [card.repeated(chunk, batch * width * shape.block_bytes) for _ in range(2)]
        attention = PagedAttention(card.launcher, shape)
        sequences, contexts = np.arange(batch, dtype=np.int32), np.full(batch, context, np.int32)
        rows = KernelRows(batch, card.place(sequences), card.place(contexts), card.place(tables), width, context)
        results = np.zeros((batch, shape.query_heads, shape.head_dim), np.uint16)
        scratch = card.place(np.zeros(attention.scratch_bytes(batch, context), np.uint8))
        ends = card.place(results), card.place(results)
        return cls(card, attention, batch, context, rows, (planes[0], planes[1]), *ends, scratch)

    def seconds(self, version: int = 0) -> float:
        return self.card.seconds(lambda: self.queue(version))

    def queue(self, version: int = 0) -> None:
        self.attention.attend(
            self.queries, self.output, self.planes, self.rows, scratch=self.scratch, version=version,
            stream=self.card.stream,
        )  # fmt: skip

    @property
    def read_bytes(self) -> int:
        shape = self.attention.shape
        return 2 * self.batch * math.ceil(self.context / shape.block_tokens) * shape.block_bytes


def decode_of_a_batch(card: Card, batch: int = 32, context: int = 4096) -> Answer:
    """bf16 against copies, and int8 against bf16."""
    wide, narrow = (Decode.of(card, shape, batch, context) for shape in (BF16, INT8))
    wide_s, copied_s = wide.seconds(), card.copied_bytes_s()
    ratio, figures = wide.read_bytes / wide_s / copied_s, {}
    says = (
        f"decode of {batch} x {context}, bf16, V{wide.attention.version(batch, context)}: {ratio:.2f}x of a copy "
        f"(promised {BATCH_RATIO})"
    )
    figures |= {"bf16 of a copy": ratio, "copy GB/s": copied_s / 1e9}
    speeds = f"bf16 {speed(figures, 'bf16', wide.read_bytes, wide_s)}; the copy {copied_s / 1e9:.1f} GB/s"
    known(f"{says}; {speeds}", figures, holds=None if ratio >= BATCH_RATIO else False)
    narrow_s = narrow.seconds()
    faster = figures["int8 of bf16"] = wide_s / narrow_s
    speeds += f"; int8 {speed(figures, 'int8', narrow.read_bytes, narrow_s)}"
    says += f"; int8 {faster:.2f}x of bf16 (promised {INT8_RATIO}); {speeds}"
    return Answer(ratio >= BATCH_RATIO and faster >= INT8_RATIO, says, figures)


def decode_of_one(card: Card, context: int = 32768) -> Answer:
    """A single long sequence, in partitions."""
    case = Decode.of(card, BF16, 1, context)
    took_s, copied_s = case.seconds(version=2), card.copied_bytes_s()
    ratio, figures = case.read_bytes / took_s / copied_s, {}
    says = (
        f"decode of 1 x {context}, bf16, V2: {ratio:.2f}x of a copy (promised {LONG_RATIO}); bf16 "
        f"{speed(figures, 'bf16', case.read_bytes, took_s)}; the copy {copied_s / 1e9:.1f} GB/s"
    )
    return Answer(ratio >= LONG_RATIO, says, figures | {"bf16 of a copy": ratio, "copy GB/s": copied_s / 1e9})


def speed(figures: dict[str, float], name: str, nbytes: int, took_s: float) -> str:
    """Return how long a call takes that moves `nbytes`, and how fast that is; both are noted in `figures`, too."""
    figures |= {f"{name} us": took_s * 1e6, f"{name} GB/s": nbytes / took_s / 1e9}
    return f"{took_s * 1e6:.1f} us, {nbytes / took_s / 1e9:.1f} GB/s"


def crossover(card: Card, batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64), context: int = 4096) -> Answer:
    """Return the number of thread blocks a multiprocessor from which on one pass is as fast as partitions, and the
    engine's default.
    """
    case = Decode.of(card, BF16, batches[-1], context)
    took_s: list[float] = []  # V1 and V2 by turns
    curve: list[str] = []
    times: list[str] = []

    def seconds(queue: Callable[[int], object]) -> float:
        took_s.append(card.seconds(lambda: queue(card.stream)))
        if len(took_s) % 2 == 0:
            one_s, two_s = took_s[-2:]
            batch = sorted(batches)[len(took_s) // 2 - 1]
            curve.append(f"{batch}: {one_s / two_s:.2f}x")
            times.append(f"{batch}: {one_s * 1e6:.1f} and {two_s * 1e6:.1f}")
            known(f"V1 against V2 by batch ({', '.join(curve)}); us of both: {', '.join(times)}")
        return took_s[-1]

    ratios = pass_ratios(
        case.attention, case.planes, card.place, seconds,
        blocks=case.read_bytes // 2 // BF16.block_bytes, rows=batches, context=context,
    )  # fmt: skip
    first = least_rows(ratios)
    measured = case.attention.blocks_per_multiprocessor(first) if first else math.inf
    default = AttentionCrossover().blocks_per_multiprocessor
    says = (
        f"V1 against V2 by batch ({', '.join(curve)}): V1 from {measured:.1f} blocks a multiprocessor on "
        f"(default {default}); us of both: {', '.join(times)}"
    )
    names = [f"{batch}, V{version} us" for batch in ratios for version in (1, 2)]
    figures = {name: each_s * 1e6 for name, each_s in zip(names, took_s, strict=True)}
    return Answer(0.5 <= measured / default <= 2, says, figures | {"blocks a multiprocessor": measured})


def errors(card: Card, contexts: tuple[int, ...] = (1, 17, 64, 333, 700)) -> Answer:
    """Return the errors of attention over a cache that the kernel itself wrote, against double precision over its
    input.
    """
    wide, narrow = (np.abs(error_of(card, shape, contexts)) for shape in (BF16, INT8))
    typical = float(np.sqrt(np.mean(narrow**2)))
    says = (
        f"error against float64: bf16 {wide.max():.1e} (promised {BF16_ERROR:.0e}); int8 {narrow.max():.1e}, "
        f"root mean square {typical:.1e} (promised {INT8_ERROR:.0e}, {INT8_TYPICAL_ERROR:.0e})"
    )
    holds = wide.max() <= BF16_ERROR and narrow.max() <= INT8_ERROR and typical <= INT8_TYPICAL_ERROR
    figures = {"bf16": float(wide.max()), "int8": float(narrow.max()), "int8 typical": typical}
    return Answer(bool(holds), says, figures)


def error_of(card: Card, shape: CacheShape, contexts: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return the error of each result, V1's and V2's one after the other."""
    random = np.random.default_rng(1)
    count, tokens = len(contexts), sum(contexts)
    width = math.ceil(max(contexts) / shape.block_tokens)
    tables = random.permutation(count * width).astype(np.int32).reshape(count, width)
    blocks = np.zeros((count * width, shape.block_bytes), np.uint8)
    planes = card.place(blocks), card.place(blocks)
    drawn = [
        _bf16(random, tokens, heads, shape.head_dim) for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    ]
    slots = np.concatenate([
        table[at // shape.block_tokens] * shape.block_tokens + at % shape.block_tokens
        for table, at in zip(tables, map(np.arange, contexts), strict=True)
    ])  # fmt: skip
    at = [card.place(bits) for bits, _ in drawn]
    positions, places = card.place(np.zeros(tokens, np.int32)), card.place(slots.astype(np.int32))
    RopeCache(card.launcher, shape).write(
        NewTokens(tokens, *at, positions, places), at[0], planes, card.place(turns(1, np.ones(shape.head_dim // 2))),
        stream=card.stream,
    )  # fmt: skip
    bits, queries = _bf16(random, count, shape.query_heads, shape.head_dim)
    rows = KernelRows(
        count,
        card.place(np.arange(count, dtype=np.int32)),
        card.place(np.array(contexts, np.int32)),
        card.place(tables),
        width,
        max(contexts),
    )
    attention = PagedAttention(card.launcher, shape)
    scratch = card.place(np.zeros(attention.scratch_bytes(count, max(contexts)), np.uint8))
    output, found = card.place(bits), []
    starts = np.cumsum((0, *contexts))
    expected = [
        paged_attention(query[None], drawn[1][1][start:end], drawn[2][1][start:end], np.array([end - start], np.int32))
        for query, start, end in zip(queries, starts, starts[1:], strict=False)
    ]
    for version in (1, 2):
        attention.attend(card.place(bits), output, planes, rows, scratch=scratch, version=version, stream=card.stream)
        found.append(_widened(card.read(output, bits)) - np.concatenate(expected))
    return np.concatenate(found)


def _bf16(random: np.random.Generator, *extents: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float32]]:
    bits = (random.standard_normal(extents, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, _widened(bits)


def _widened(bits: Array) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Card(ABC):
    """A device to ask. Memory that it hands out lives as long as it does."""

    launcher: Launcher
    stream = 0

    @abstractmethod
    def place(self, array: Array) -> int:
        """Return the array's address on the device, after a copy."""

    @abstractmethod
    def place_on_host(self, array: Array) -> int:
        """The address of a copy in host memory that the device reads and writes at the same address."""

    @abstractmethod
    def repeated(self, array: Array, nbytes: int) -> int:
        """The address of `nbytes` that hold `array` again and again."""

    @abstractmethod
    def read(self, address: int, like: Array) -> Array:
        """Return the array on the device, in the shape and type of `like`, once everything queued has run."""

    @abstractmethod
    def seconds(self, queue: Callable[[], object], *, in_graph: bool = True) -> float:
        """Return the seconds that what `queue` queues takes, when it is repeated without a gap: captured once, or,
        where that is not wanted, queued faster than it runs.
        """

    @abstractmethod
    def steps(self, queue: Callable[[], object], launches: int, count: int) -> list[float]:
        """Return the seconds of each of `count` steps, from its start on the host until its end is seen there: a step
        is what `queue` queues, `launches` times.
        """

    @abstractmethod
    def batch_s(self, runs: Sequence[tuple[int, int, int]], *, to_device: bool) -> float:
        """Return the seconds of a batch of copies (to, from, bytes), from before it is queued."""

    @abstractmethod
    def copied_bytes_s(self) -> float:
        """Bytes that a large copy within the device reads and writes in a second."""

    @abstractmethod
    def saturated(self, *, by_process: bool) -> AbstractContextManager[Transferred]:
        """While it lasts, copies from the host keep the bus busy, from a thread of this process or from a process of
        its own. What it gives says how many bytes a second they reached so far."""

    @abstractmethod
    def stored(self) -> AbstractContextManager[Transferred]:
        """Return the seconds of copies to the host, from a thread that keeps to a client's budget (`LinkBudget`) beside
        an engine that decodes.
        """


def gather_against_batch(
    card: Card, pieces_bytes: tuple[int, ...] = PIECES_BYTES, moved_bytes: int = MOVED_BYTES
) -> Answer:
    """Speed of the kernel in units of the batch's, by piece size, both ways. It only informs: it sets the default."""
    ways: list[str] = []
    figures: dict[str, float] = {}
    for to_pool in (True, False):
        way, said, below = "host to pool" if to_pool else "pool to host", [], []
        for piece in pieces_bytes:
            count = max(2, moved_bytes // piece)
            batch_s, kernel_s = _seconds(card, piece, count, to_pool=to_pool)
            name = f"{piece >> 10} KiB"
            figures[f"{way}, {name}"] = batch_s / kernel_s
            fast = speed(figures, f"{way}, {name}, kernel", count * piece, kernel_s)
            slow = speed(figures, f"{way}, {name}, batch", count * piece, batch_s)
            said.append(f"{name} {batch_s / kernel_s:.2f}x ({fast}; batch {slow})")
            below += [piece] * (batch_s > kernel_s)
            known("; ".join([*ways, f"{way} {', '.join(said)}"]), figures)
        crossover = f"faster up to {max(below) >> 10} KiB" if below else "never faster"
        ways.append(f"{way} {', '.join(said)} ({crossover})")
        figures[f"{way}, crossover bytes"] = float(max(below, default=0))
    return Answer(True, f"gather kernel on {FEW_BLOCKS} thread blocks against one batch: {'; '.join(ways)}", figures)


def _seconds(card: Card, piece: int, count: int, *, to_pool: bool) -> tuple[float, float]:
    """Return the seconds of one batch, and of the kernel, for `count` pieces. Raises RuntimeError where the kernel's
    bytes are wrong.
    """
    table = np.random.default_rng(0).permutation(2 * count)[:count].astype(np.int32).reshape(count, 1)
    runs = BlockRuns.of_payloads(table, piece)
    content = np.random.default_rng(1).integers(0, 256, (count, piece), np.uint8)
    empty = np.zeros((2 * count, piece), np.uint8)
    host, pool = card.place_on_host(content), card.place(empty)
    planes = card.place(np.array([pool], np.uint64))
    payloads = card.place(host + piece * np.arange(count, dtype=np.uint64))
    on_device = card.place(runs.runs), card.place(runs.first_pieces)
    mover = BlockMover(card.launcher, blocks=FEW_BLOCKS)
    move = mover.scatter if to_pool else mover.gather
    if not to_pool:
        mover.scatter(planes, payloads, runs, on_device, plane_count=1, stream=card.stream)
    kernel_s = card.seconds(lambda: move(planes, payloads, runs, on_device, plane_count=1, stream=card.stream))
    expected = empty.copy()
    expected[table.ravel()] = content
    if not np.array_equal(card.read(pool, empty), expected):
        raise RuntimeError(f"the kernel moved pieces of {piece} bytes wrong")
    ends = [(pool + int(place) * piece, host + number * piece) for number, place in enumerate(table.ravel())]
    copies = [(*(pair if to_pool else pair[::-1]), piece) for pair in ends]
    return card.batch_s(copies, to_device=to_pool), kernel_s


def shared_prefix(card: Card, launcher: Device, batch: int = 32, context: int = 4096) -> Answer:
    """Half of each context is shared, in blocks that follow each other. A window is one range: it holds the prefix's
    keys. It only informs: a window that gains nothing is not used."""
    width = context // BF16.block_tokens
    shared = width // 2
    own = np.random.default_rng(0).permutation(batch * (width - shared)).astype(np.int32) + shared
    prefix = np.arange(shared, dtype=np.int32)
    tables = np.concatenate((np.tile(prefix, (batch, 1)), own.reshape(batch, -1)), axis=1)
    chunk = np.full((64, BF16.block_bytes), 0x3C, np.uint8)
    nbytes = (shared + len(own)) * BF16.block_bytes
    layers = [(card.repeated(chunk, nbytes), card.repeated(chunk, nbytes)) for _ in range(LAYERS)]
    attention = PagedAttention(launcher, BF16)
    rows = KernelRows(
        batch, card.place(np.arange(batch, dtype=np.int32)), card.place(np.full(batch, context, np.int32)),
        card.place(np.ascontiguousarray(tables)), width, context,
    )  # fmt: skip
    results = np.zeros((batch, BF16.query_heads, BF16.head_dim), np.uint16)
    queries, output = card.place(results), card.place(results)
    scratch = card.place(np.zeros(attention.scratch_bytes(batch, context), np.uint8))

    def step(is_kept: bool) -> None:
        for planes in layers:
            if is_kept:
                window = CacheWindow.of_blocks(planes[0], BF16.block_bytes, prefix, launcher.window_bytes)
                launcher.keep_in_cache(window, stream=card.stream)
            attention.attend(queries, output, planes, rows, scratch=scratch, stream=card.stream)

    without_s = card.seconds(lambda: step(False), in_graph=False)
    kept = launcher.set_aside_cache(LAYERS * shared * BF16.block_bytes)
    if not kept:
        return Answer(None, "this device sets no part of its L2 cache aside")
    with_s = card.seconds(lambda: step(True), in_graph=False)
    launcher.keep_in_cache(None, stream=card.stream)
    launcher.set_aside_cache(0)
    read_bytes = 2 * LAYERS * batch * width * BF16.block_bytes
    figures = {"by a window": without_s / with_s, "set aside MiB": kept / (1 << 20)}
    says = (
        f"{LAYERS} layers of decode of {batch} x {context}, {context // 2} shared: {without_s / with_s:.2f}x as fast "
        f"with its keys in a window ({speed(figures, 'with', read_bytes, with_s)}; without "
        f"{speed(figures, 'without', read_bytes, without_s)}; {kept >> 20} MiB of the L2 cache set aside)"
    )
    return Answer(True, says, figures)
