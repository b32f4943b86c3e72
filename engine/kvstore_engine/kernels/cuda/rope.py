"""Rotation of new tokens' queries and keys, fused with the write of their K and V into the paged cache.

The module owns the argument's layout (csrc/rope_cache.cu). It owns no memory of the device.
"""

from __future__ import annotations

import ctypes as ct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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

_WARPS = THREADS // 32


class _Argument(ct.Structure):
    _fields_ = (
        ("queries", ct.c_void_p),
        ("keys", ct.c_void_p),
        ("values", ct.c_void_p),
        ("rotated", ct.c_void_p),
        ("key_plane", ct.c_void_p),
        ("value_plane", ct.c_void_p),
        ("positions", ct.c_void_p),
        ("slots", ct.c_void_p),
        ("turns", ct.c_void_p),
        ("rows", ct.c_int64),
        ("query_heads", ct.c_int64),
        ("kv_heads", ct.c_int64),
        ("block_tokens", ct.c_int64),
        ("query_stride", ct.c_int64),
        ("key_stride", ct.c_int64),
        ("value_stride", ct.c_int64),
        ("rotary", ct.c_int64),
        ("interleaved", ct.c_int64),
    )


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The queries, keys and values of a step's `count` new tokens. All arrays are in memory of the device.

    queries, keys, values: [count, stride] of the compute type, each row with its heads first. They are separate arrays
    or views of one fused array; a stride is in elements, and 0 means no gap between rows. positions: int32 [count], of
    the tokens in their sequences. slots: int32 [count], the place in the cache: block number * block_tokens + offset in
    the block. A negative slot marks a padding row, whose K and V are not stored.
    """

    count: int
    queries: Any
    keys: Any
    values: Any
    positions: Any
    slots: Any
    query_stride: int = 0
    key_stride: int = 0
    value_stride: int = 0


def turns(positions: int, inverse_frequencies: npt.NDArray[np.float64], scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Return a table of the cosine and sine of every angle of a rotary embedding, float32 [positions,
    len(inverse_frequencies), 2], for the positions from 0 to `positions` - 1. All are multiplied by `scale` (YaRN's
    magnitude). Angles are computed in double precision.
    """
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse_frequencies
    return (scale * np.stack((np.cos(angles), np.sin(angles)), axis=-1)).astype(np.float32)


class RopeCache:
    """A launcher of the CUDA kernel that applies the rotary embedding to new queries and keys, and writes K and V into
    the cache. The first `rotary` channels of each head are rotated. With `interleaved` neighbouring channels form a
    pair, otherwise channel i and channel i + rotary / 2.
    """

    def __init__(self, launcher: Launcher, shape: CacheShape, *, rotary: int = 0, interleaved: bool = False) -> None:
        """Prepare the kernel for one `shape` of cache. `rotary` 0 means all channels of a head. Raises ValueError if
        `rotary` is odd or more than a head has.
        """
        rotary = rotary or shape.head_dim
        if rotary % 2 or not 0 < rotary <= shape.head_dim:
            raise ValueError(f"{rotary} rotated dimensions: an even number up to {shape.head_dim} is needed")
        self.shape, self.rotary, self.interleaved = shape, rotary, interleaved
        self._launcher = launcher
        self.program = KernelProgram.of(
            "rope_cache.cu",
            KV_QUERY=ELEMENTS[shape.compute].type_name,
            KV_CACHE=shape.element.type_name,
            KV_HEAD_DIM=shape.head_dim,
        )

    def write(
        self, tokens: NewTokens, rotated: Any, planes: tuple[Any, Any], table: Any, *, stream: int = STREAM_OF_DEFAULT
    ) -> None:
        """Queue a kernel that writes the rotated queries of `tokens` to `rotated`, [count, query_heads, head_dim], and
        their rotated keys and their values to `planes`, the layer's K and V in the cache. `table` is the result of
        `turns`, in device memory. The caller guarantees that positions are in the table and slots in the pool. Raises
        ValueError or CudaError.
        """
        if tokens.count == 0:
            return
        shape = self.shape
        argument = _Argument(
            queries=address_of(tokens.queries),
            keys=address_of(tokens.keys),
            values=address_of(tokens.values),
            rotated=address_of(rotated),
            key_plane=aligned(planes[0], "the plane of keys"),
            value_plane=aligned(planes[1], "the plane of values"),
            positions=address_of(tokens.positions),
            slots=address_of(tokens.slots),
            turns=address_of(table),
            rows=tokens.count,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            block_tokens=shape.block_tokens,
            query_stride=tokens.query_stride or shape.query_heads * shape.head_dim,
            key_stride=tokens.key_stride or shape.kv_heads * shape.head_dim,
            value_stride=tokens.value_stride or shape.kv_heads * shape.head_dim,
            rotary=self.rotary,
            interleaved=int(self.interleaved),
        )
        heads = shape.query_heads + 2 * shape.kv_heads
        grid = (tokens.count, -(-heads // _WARPS), 1)
        self._launcher.launch(self.program, "kv_rope_cache", grid, argument, stream=stream)
