"""Paged attention on a device: the choice of one of two kernels, its launch shape, and its rows.

The module owns the argument's layout (csrc/paged_attention.cu) and the choice between V1 (one pass over a row's keys)
and V2 (in partitions, then a merge): both compute equal sums in another order. It owns no memory of the device.
"""

from __future__ import annotations

import ctypes as ct
from dataclasses import dataclass
from typing import Any

from kvstore_engine.kernels.cuda.program import (
    ELEMENTS,
    STREAM_OF_DEFAULT,
    THREADS,
    CacheShape,
    KernelProgram,
    Launcher,
    address_of,
    aligned,
)
from kvstore_engine.kernels.layout import LayerAttention

PARTITION_KEYS = 512
TILE_KEYS = (64, 32, 16)
_SHARED_BYTES = 48 << 10  # the widest tile that fits: several thread blocks share a multiprocessor
_WARPS = THREADS // 32
_PLAIN = LayerAttention()


class _Argument(ct.Structure):
    _fields_ = (
        ("queries", ct.c_void_p),
        ("output", ct.c_void_p),
        ("keys", ct.c_void_p),
        ("values", ct.c_void_p),
        ("sequences", ct.c_void_p),
        ("contexts", ct.c_void_p),
        ("tables", ct.c_void_p),
        ("sums", ct.c_void_p),
        ("weights", ct.c_void_p),
        ("table_stride", ct.c_int64),
        ("block_tokens", ct.c_int64),
        ("kv_heads", ct.c_int64),
        ("group", ct.c_int64),
        ("window", ct.c_int64),
        ("sink_tokens", ct.c_int64),
        ("partition_keys", ct.c_int64),
        ("partitions", ct.c_int64),
        ("scale", ct.c_double),
        ("softcap", ct.c_double),
    )


@dataclass(frozen=True, slots=True)
class AttentionCrossover:
    """The load at which attention in one pass (kernel V1) becomes faster than attention in partitions of the context
    (kernel V2). The load is counted in CUDA thread blocks for each multiprocessor of the device.
    """

    blocks_per_multiprocessor: float = 2.0


@dataclass(frozen=True, slots=True)
class KernelRows:
    """The rows (new tokens) of a step for which attention is computed. All arrays are in memory of the device.

    sequences: int32 [count], the line of `tables` for each row. contexts: int32 [count], the number of cached tokens
    that each row may see, up to its own; with 0 the row's result is zeros. tables: int32 [sequences, table_stride], the
    numbers of each sequence's cache blocks. longest_context: a number of tokens that none of `contexts` exceeds, known
    on the host.
    """

    count: int
    sequences: Any
    contexts: Any
    tables: Any
    table_stride: int
    longest_context: int


class PagedAttention:
    """A launcher of the CUDA attention kernels for K/V caches of one `shape`. `tile` is the number of keys that a
    thread block loads into shared memory at a time (0: as many as fit), `partition_keys` the number of keys in a
    partition of the context. `crossover` is the load from which on one pass is used.
    """

    def __init__(
        self, launcher: Launcher, shape: CacheShape, *, crossover: AttentionCrossover | None = None, tile: int = 0,
        partition_keys: int = PARTITION_KEYS,
    ) -> None:  # fmt: skip
        if tile not in (0, *TILE_KEYS):
            raise ValueError(f"a tile of {tile} keys: choose one of {TILE_KEYS}")
        if partition_keys < 1:
            raise ValueError(f"partition_keys must be positive, not {partition_keys}")
        self.shape = shape
        self.heads = min(shape.group, 8 if shape.head_dim <= 128 else 4)  # that share a read of K and V
        self._launcher = launcher
        self._crossover = crossover or AttentionCrossover()
        self._partition_keys = partition_keys
        self._parts = -(-shape.group // self.heads)
        fitting = (keys for keys in TILE_KEYS if self._shared(keys) <= _SHARED_BYTES)
        tile = tile or next(fitting, TILE_KEYS[-1])
        self.shared_bytes = self._shared(tile)
        self.program = KernelProgram.of(
            "paged_attention.cu",
            KV_QUERY=ELEMENTS[shape.compute].type_name,
            KV_CACHE=shape.element.type_name,
            KV_HEAD_DIM=shape.head_dim,
            KV_HEADS=self.heads,
            KV_TILE=tile,
            KV_SHARED_BYTES=self.shared_bytes,
        )

    def version(self, rows: int, longest_context: int, kind: LayerAttention = _PLAIN) -> int:
        """Return which kernel `attend` chooses for `rows` rows whose longest context has `longest_context` tokens: 1
        (one pass over the context) or 2 (in partitions, which are merged).
        """
        fills = self.blocks_per_multiprocessor(rows) >= self._crossover.blocks_per_multiprocessor
        return 1 if fills or self._partitions(longest_context, kind) == 1 else 2

    def blocks_per_multiprocessor(self, rows: int) -> float:
        """Return how many CUDA thread blocks each multiprocessor of the device gets when one pass over `rows` rows is
        launched.
        """
        return rows * self.shape.kv_heads * self._parts / self._launcher.multiprocessors

    def scratch_bytes(self, rows: int, longest_context: int, kind: LayerAttention = _PLAIN) -> int:
        """Return the bytes of device memory that attention in partitions (version 2) needs for `rows` rows beside its
        result. `longest_context` is the longest context in tokens.
        """
        records = rows * self.shape.query_heads * self._partitions(longest_context, kind)
        return 4 * records * (self.shape.head_dim + 1)

    def attend(
        self, queries: Any, output: Any, planes: tuple[Any, Any], rows: KernelRows, *, kind: LayerAttention = _PLAIN,
        scratch: Any = None, version: int = 0, stream: int = STREAM_OF_DEFAULT,
    ) -> int:  # fmt: skip
        """Queue the attention of `rows` on the device and return the version of the kernel that was chosen, 1 or 2.

        queries, output: [rows, query_heads, head_dim] of the compute type. planes: the layer's K and V, [blocks,
        block_bytes] each. kind: the layer's settings. scratch: memory of `scratch_bytes` bytes, which version 2 needs.
        version: 0 chooses; with a given one the bits of a row do not depend on the other rows. stream: the CUstream's
        address. Raises ValueError, CudaError.
        """
        if version not in (0, 1, 2):
            raise ValueError(f"version {version}: 0 chooses, 1 is one pass, 2 is in partitions")
        if rows.count == 0:
            return version or 1
        version = version or self.version(rows.count, rows.longest_context, kind)
        argument = self._argument(queries, output, planes, rows, kind)
        grid = (rows.count, self.shape.kv_heads * self._parts, 1)
        if version == 1:
            self._launch("kv_paged_attention_v1", grid, argument, self.shared_bytes, stream)
            return 1
        if scratch is None:
            needed = self.scratch_bytes(rows.count, rows.longest_context, kind)
            raise ValueError(f"attention in partitions needs {needed} bytes of scratch memory, and got none")
        partitions = self._partitions(rows.longest_context, kind)
        argument.partitions = partitions
        argument.sums = aligned(scratch, "scratch memory")
        records = rows.count * self.shape.query_heads * partitions
        argument.weights = argument.sums + 4 * records * self.shape.head_dim
        self._launch("kv_paged_attention_v2", (*grid[:2], partitions), argument, self.shared_bytes, stream)
        self._launch("kv_merge_partitions", (rows.count, self.shape.query_heads, 1), argument, 0, stream)
        return 2

    def _argument(
        self, queries: Any, output: Any, planes: tuple[Any, Any], rows: KernelRows, kind: LayerAttention
    ) -> _Argument:
        if kind.window < 0 or kind.sink_tokens < 0 or kind.softcap < 0:
            raise ValueError(f"window, sink_tokens and softcap must not be negative: {kind}")
        return _Argument(
            queries=address_of(queries),
            output=address_of(output),
            keys=aligned(planes[0], "the plane of keys"),
            values=aligned(planes[1], "the plane of values"),
            sequences=address_of(rows.sequences),
            contexts=address_of(rows.contexts),
            tables=address_of(rows.tables),
            table_stride=rows.table_stride,
            block_tokens=self.shape.block_tokens,
            kv_heads=self.shape.kv_heads,
            group=self.shape.group,
            window=kind.window,
            sink_tokens=kind.sink_tokens,
            partition_keys=self._partition_keys,
            scale=kind.scale or self.shape.head_dim**-0.5,
            softcap=kind.softcap,
        )

    def _launch(
        self, kernel: str, grid: tuple[int, int, int], argument: _Argument, shared_bytes: int, stream: int
    ) -> None:
        self._launcher.launch(self.program, kernel, grid, argument, shared_bytes=shared_bytes, stream=stream)

    def _partitions(self, longest_context: int, kind: LayerAttention) -> int:
        visible = min(longest_context, kind.window + kind.sink_tokens) if kind.window else longest_context
        return max(1, -(-visible // self._partition_keys))

    def _shared(self, tile: int) -> int:
        """Return `Attend::kSharedBytes` of csrc/attend.h; the compiler compares them."""
        dim, heads, element = self.shape.head_dim, self.heads, self.shape.element
        parts, chunks = THREADS // tile, dim * element.nbytes // 16
        stride = (chunks + (8 + parts - chunks % 8) % 8) * 16
        tiles = 4 * tile * (stride + (4 if element.scaled else 0))
        state = -(-heads * 4 // 16) * 16
        return max(tiles, _WARPS * heads * dim * 4) + heads * dim * 4 + heads * tile * 4 + 3 * state
