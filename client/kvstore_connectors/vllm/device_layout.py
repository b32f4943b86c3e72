"""Where a block is in vLLM's KV caches on a CUDA device, for every order of axes that vLLM lays them out in.

vLLM 0.32 and 0.33 show the cache of each layer as [block, head, token, content] (`KVCacheLayout`); in memory layers,
blocks, heads and tokens may come in another order. A block's bytes are stored in the order that they have in memory,
which the fingerprint names; heads that are apart in it are several parts of a page.
Pure: reads addresses, never the memory. Invariant: no part reaches outside of what the caches say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_client.device.pool import DevicePool, PoolPart

_AXES = 4  # block, head, token, content


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """A layer's cache: `shape` and `strides`, in bytes, of its axes, and `item_bytes` for one element."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @classmethod
    def of(cls, tensor: Any) -> CacheMemory:
        """Of a torch tensor, wherever its memory is."""
        item_bytes = int(tensor.element_size())
        strides = tuple(int(stride) * item_bytes for stride in tensor.stride())
        return cls(int(tensor.data_ptr()), tuple(map(int, tensor.shape)), strides, item_bytes)


def device_pool(caches: Sequence[CacheMemory], *, blocks: int, page_bytes: int) -> DevicePool:
    """The pool of `blocks` blocks, `page_bytes` in each layer, in the order of the layers. Raises ValueError with a
    sentence that says what cannot be."""
    if len({cache.address for cache in caches}) != len(caches):
        raise ValueError("layers share KV memory, which is not supported")
    return DevicePool([_parts(cache, blocks, page_bytes) for cache in caches], blocks)


def _parts(cache: CacheMemory, blocks: int, page_bytes: int) -> list[PoolPart]:
    """Of one layer, in the order of their addresses within a page."""
    if len(cache.shape) != _AXES or not blocks or cache.shape[0] % blocks or 0 in cache.shape:
        raise ValueError(
            f"a layer's KV cache has the shape {cache.shape}, and [{blocks} blocks, head, token, content] is expected"
        )
    ratio = cache.shape[0] // blocks  # kernels may see each block as several smaller ones, one behind the other
    block_stride = cache.strides[0] * ratio
    axes = [(cache.strides[0], ratio), *zip(cache.strides[1:], cache.shape[1:], strict=True)]
    nbytes = cache.item_bytes * math.prod(size for _, size in axes)
    if nbytes != page_bytes:
        raise ValueError(f"a block of a layer has {nbytes} bytes of {page_bytes}: padded pages are not supported")
    (head_stride, heads), (token_stride, tokens) = axes[1], axes[2]
    if ratio > 1 and heads > 1 and tokens > 1 and head_stride > token_stride:
        raise ValueError(
            f"its kernels see a block as {ratio} smaller ones, each ordered by heads: divide --block-size by {ratio}, "
            "or set VLLM_KV_CACHE_LAYOUT=LBNHC"
        )
    _check_no_overlap(cache, [(block_stride, blocks), *axes])
    outer = sorted(((stride, size) for stride, size in axes if size > 1), reverse=True)
    run = cache.item_bytes
    while outer and outer[-1][0] == run:
        run *= outer.pop()[1]
    places = itertools.product(*(range(0, stride * size, stride) for stride, size in outer))
    return [PoolPart(cache.address + sum(place), block_stride, run) for place in places]


def _check_no_overlap(cache: CacheMemory, axes: Sequence[tuple[int, int]]) -> None:
    extent = cache.item_bytes
    for stride, size in sorted(axes):
        if size > 1:
            if stride < extent:
                raise ValueError(f"a layer's KV cache overlaps itself: shape {cache.shape}, strides {cache.strides}")
            extent += stride * (size - 1)
