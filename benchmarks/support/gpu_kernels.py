"""What only a GPU can answer of the engine's CUDA kernels: their speed against copies, their crossover, their errors.

Speeds are bytes of K and V read, against the bytes that a large copy within the device reads and writes in the same
time, in the same run; microseconds and bytes a second are beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.cuda import CacheShape, Crossover, KernelRows, NewTokens, PagedAttention, RopeCache
from kvstore_engine.kernels.cuda.crossover import least_rows, pass_ratios
from kvstore_engine.kernels.cuda.rope import turns
from kvstore_engine.kernels.reference import paged_attention
from support.gpu_answers import Answer, known
from support.gpu_card import Array, Card

BF16, INT8 = CacheShape(32, 8, 128, 16), CacheShape(32, 8, 128, 16, cache="int8")
BATCH_RATIO, LONG_RATIO, INT8_RATIO = 0.8, 0.6, 1.3  # the least that is promised
# Of results, for K, V and queries that are normally distributed: the greatest error, and for int8 the root mean square.
BF16_ERROR, INT8_ERROR, INT8_TYPICAL_ERROR = 1e-2, 1e-1, 1e-2


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
        rows = KernelRows(
            batch,
            card.place(np.arange(batch, dtype=np.int32)),
            card.place(np.full(batch, context, np.int32)),
            card.place(tables),
            width,
            context,
        )
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
    """How long a call takes that moves `nbytes`, and how fast that is; both are noted in `figures`, too."""
    figures |= {f"{name} us": took_s * 1e6, f"{name} GB/s": nbytes / took_s / 1e9}
    return f"{took_s * 1e6:.1f} us, {nbytes / took_s / 1e9:.1f} GB/s"


def crossover(card: Card, batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64), context: int = 4096) -> Answer:
    """From how many thread blocks a multiprocessor on one pass is as fast as partitions, and the engine's default."""
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
    default = Crossover().blocks_per_multiprocessor
    says = (
        f"V1 against V2 by batch ({', '.join(curve)}): V1 from {measured:.1f} blocks a multiprocessor on "
        f"(default {default}); us of both: {', '.join(times)}"
    )
    names = [f"{batch}, V{version} us" for batch in ratios for version in (1, 2)]
    figures = {name: each_s * 1e6 for name, each_s in zip(names, took_s, strict=True)}
    return Answer(0.5 <= measured / default <= 2, says, figures | {"blocks a multiprocessor": measured})


def errors(card: Card, contexts: tuple[int, ...] = (1, 17, 64, 333, 700)) -> Answer:
    """Of attention over a cache that the kernel itself wrote, against double precision over what it was given."""
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
    """Of each result, V1's and V2's one after the other."""
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
