"""The paged K/V cache in this process: memory, free blocks, and copies in and out.

The module owns the planes (K and V of each layer) and the list of free engine blocks. It does not know sequences, keys
or eviction: callers own block tables. Invariants: a block is free or allocated, never both; freeing a free block is a
broken invariant and raises.

`planes.PoolPlanes` decides where the planes are: in host memory, unless the caller places them elsewhere. A storage
block's payload is layer-major: for each layer K [tokens, kv_heads * head_dim], then V, rows in token order. This is
also the pool's layout, so that copies are memcpy.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvstore_engine.devices import SCALED_KV_TYPES
from kvstore_engine.errors import UsageError
from kvstore_engine.free_list import FreeList, PoolExhausted
from kvstore_engine.kernels import Kernels, select_kernels
from kvstore_engine.kernels.elements import KV_TYPES
from kvstore_engine.kernels.page_bounds import Memory, PageBounds
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.page_selection import PageSelection
from kvstore_engine.planes import HostPlanes, PoolPlanes, touched_memory
from kvstore_proto.ggml_types import TENSOR_TYPES
from kvstore_proto.kv_layout import ENGINE_ORDER

__all__ = ["ENGINE_BLOCK_TOKENS", "PAYLOAD_LAYOUT", "BlockPool", "PoolExhausted"]

ENGINE_BLOCK_TOKENS = 16
_SCALE_BYTES = 4
PAYLOAD_LAYOUT = ENGINE_ORDER
Bytes = npt.NDArray[np.uint8]
BlockIds = Sequence[int] | npt.NDArray[np.int32]


class BlockPool:
    """The memory for the K/V of one model: `blocks` blocks, each with `block_tokens` tokens of every layer. `planes` is
    uint8 [2 * layers, blocks, block_bytes], K and then V of each layer. With `window_blocks`, layers with a sliding
    window have a pool of their own, `window`.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        *,
        block_tokens: int = ENGINE_BLOCK_TOKENS,
        kv_dtype: str = "f16",
        kernels: Kernels | None = None,
        memory: Callable[[int], Memory] | None = None,
        place: Callable[[int, int, int], PoolPlanes] | None = None,
        window_blocks: int = 0,
    ) -> None:
        """Allocate the memory, on the host or by `place(planes, blocks, block_bytes)`. Raises ValueError for a
        `kv_dtype` that does not fit the model, or a block size outside 8 to 256 tokens.
        """
        row_bytes = kv_row_bytes(config, kv_dtype)
        if blocks < 1 or not 8 <= block_tokens <= 256:
            raise ValueError(f"{blocks} blocks of {block_tokens} tokens: need at least 1 of 8..256 tokens")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.kv_dtype = kv_dtype
        self.ggml_type = KV_TYPES.get(kv_dtype)  # None: ggml cannot write it
        self.row_elements = config.kv_width
        self.row_bytes = row_bytes
        self.block_bytes = block_tokens * self.row_bytes
        self.window_tokens = config.window_tokens
        self.model_layers = tuple(range(config.layers))
        self.layers = config.layers
        self.window: BlockPool | None = None
        self.bounds: PageBounds | None = None  # these two: see `selecting_pool`
        self.selection: PageSelection | None = None
        self._free = FreeList(blocks)
        if place is not None:
            self._store = place(2 * self.layers, blocks, self.block_bytes)
        elif not window_blocks or not config.windowed_layers:
            shape = 2 * self.layers, blocks, self.block_bytes
            self._store = HostPlanes(*shape, kernels or select_kernels(), memory)
        else:
            self._divide(config.windowed_layers, window_blocks, kernels or select_kernels(), memory or touched_memory)

    def _divide(
        self, windowed: tuple[int, ...], blocks: int, kernels: Kernels, memory: Callable[[int], Memory]
    ) -> None:
        """Make two pools in one piece of memory: this one without the layers `windowed`, and `window` for them."""
        window = self.window = copy.copy(self)
        window.model_layers, window.blocks, window._free = windowed, blocks, FreeList(blocks)
        self.model_layers = tuple(layer for layer in self.model_layers if layer not in windowed)
        sizes = []
        for pool in (self, window):
            pool.layers = len(pool.model_layers)
            sizes.append(HostPlanes.size_bytes(2 * pool.layers, pool.blocks, pool.block_bytes))
        whole = memoryview(memory(sum(sizes)))
        for pool, part in ((self, whole[: sizes[0]]), (window, whole[sizes[0] :])):
            pool._store = _planes_in(part, 2 * pool.layers, pool, kernels)

    def of_layers(self, layers: range) -> Self:
        """Return a pool with only the planes of these consecutive `layers`. It shares the memory and the list of free
        blocks. Raises ValueError for other layers, and for a pool on a device.
        """
        if self.window is not None:
            raise ValueError("a pool with windowed layers of their own is not divided further")
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= self.layers:
            raise ValueError(f"layers {layers} are not a range of the pool's {self.layers}")
        part = copy.copy(self)
        part.layers, part.model_layers = len(layers), self.model_layers[layers.start : layers.stop]
        part._store = self._host_planes().part(2 * layers.start, 2 * layers.stop)
        return part

    @property
    def planes(self) -> Any:
        """The memory of the pool, uint8 [planes, blocks, block_bytes], K and then V of each layer: an ndarray, or a
        tensor on a device.
        """
        return self._store.array

    @property
    def kernels(self) -> Kernels:
        """The processor kernels that copy blocks in host memory. Raises ValueError for a pool on a device."""
        return self._host_planes().kernels

    def _host_planes(self) -> HostPlanes:
        if not isinstance(self._store, HostPlanes):
            raise ValueError("the block pool is not in host memory: make it without `place`")
        return self._store

    @property
    def free_blocks(self) -> int:
        """The number of pool blocks that can still be allocated."""
        return self._free.count

    @property
    def free_flags(self) -> npt.NDArray[np.bool_]:
        """A boolean array, True for each free block. It must not be changed."""
        return self._free.flags

    def payload_bytes(self, engine_blocks: int) -> int:
        """Return the bytes of a storage block's payload (K and V of all layers) that consists of `engine_blocks` pool
        blocks.
        """
        return 2 * self.layers * engine_blocks * self.block_bytes

    def plane_addresses(self, layer: int) -> tuple[int, int]:
        """Return the addresses of the plane of K and of the plane of V of layer number `layer`."""
        return self._store.address(2 * layer), self._store.address(2 * layer + 1)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free blocks, if possible right behind the block number `after`, and return their numbers. Raises
        PoolExhausted.
        """
        return self._free.allocate(count, after)

    def take(self, ids: Sequence[int]) -> list[int]:
        """Take exactly the free blocks with the numbers `ids`, and return these numbers. Raises RuntimeError if one is
        not free.
        """
        return self._free.take(ids)

    def free(self, ids: BlockIds) -> None:
        """Free the blocks with the numbers `ids`. Raises RuntimeError if one is out of range, free already or named
        twice.
        """
        self._free.free(ids)

    def gather_block(self, block_ids: BlockIds, dest: Bytes) -> None:
        """Copy the pool blocks `block_ids`, in token order, to `dest`, uint8, as the payload of one storage block."""
        self._copy([dest], [block_ids], into_pool=False, threads=1)

    def scatter_block(self, source: Bytes, block_ids: BlockIds) -> None:
        """Copy the payload `source` of one storage block, uint8, to the pool blocks `block_ids`, in token order."""
        self._copy([source], [block_ids], into_pool=True, threads=1)

    def scatter_blocks(self, sources: Sequence[Bytes], tables: Sequence[BlockIds], *, threads: int = 2) -> None:
        """Copy the payloads of several storage blocks into the pool: sources[i] goes to the pool blocks tables[i].
        `threads` threads do it.
        """
        self._copy(sources, tables, into_pool=True, threads=threads)

    def scatter_part(self, source: Bytes, skip: int, block_ids: BlockIds) -> None:
        """Copy a part of the payload `source` of one storage block to the pool blocks `block_ids`: as many pool blocks
        as these, from number `skip` of the payload on.
        """
        count = source.size // self.payload_bytes(1)
        if source.size != self.payload_bytes(count) or not 0 <= skip <= count - len(block_ids):
            raise ValueError(f"{len(block_ids)} blocks from {skip} on are not in a payload of {source.size} bytes")
        if skip == 0 and len(block_ids) == count:
            self.scatter_block(source, block_ids)
            return
        parts = source.reshape(2 * self.layers, count, self.block_bytes)
        self._store.write_part(parts[:, skip : skip + len(block_ids)], np.asarray(block_ids, np.int32))
        self._written(block_ids)

    def copy_blocks(self, sources: BlockIds, targets: BlockIds) -> None:
        """Copy pool block sources[i] over pool block targets[i]. Raises ValueError if a block is in both lists or out
        of range.
        """
        ids = np.array([sources, targets], np.int64)  # ValueError if they differ in length
        if ids.size and (ids.min() < 0 or ids.max() >= self.blocks or np.intersect1d(ids[0], ids[1]).size):
            raise ValueError(f"blocks to copy must be in 0..{self.blocks - 1}, and no source a target")
        self._store.move_blocks(*ids.astype(np.int32))
        self._written(targets)

    def _copy(self, payloads: Sequence[Bytes], tables: Sequence[BlockIds], *, into_pool: bool, threads: int) -> None:
        """Check what the kernels do not check, then copy."""
        if len(payloads) != len(tables):
            raise ValueError(f"{len(payloads)} payloads for {len(tables)} block tables")
        if not payloads:
            return
        table = np.array(tables, np.int32)  # ValueError if the tables differ in length
        if table.ndim != 2 or table.min() < 0 or table.max() >= self.blocks:
            raise ValueError(f"block ids must be a table of values in 0..{self.blocks - 1}")
        wanted = self.payload_bytes(table.shape[1])
        for payload in payloads:
            if payload.dtype != np.uint8 or payload.size != wanted or not payload.flags.c_contiguous:
                raise ValueError(f"a payload must be {wanted} contiguous uint8, is {payload.size} {payload.dtype}")
            if not into_pool and not payload.flags.writeable:
                raise ValueError("the destination of a gather is read-only")
        flat = [payload.reshape(-1) for payload in payloads]
        self._store.copy_blocks(flat, table, into_pool=into_pool, threads=threads)
        if into_pool:
            self._written(table)

    def _written(self, blocks: BlockIds) -> None:
        if self.bounds is not None:
            self.bounds.forget(blocks)


def selecting_pool(
    config: ModelConfig,
    blocks: int,
    selection: PageSelection | None,
    *,
    block_tokens: int = ENGINE_BLOCK_TOKENS,
    kv_dtype: str = "f16",
    memory: Callable[[int], Memory] | None = None,
    window_blocks: int = 0,
) -> BlockPool:
    """Return a pool in host memory. With `selection` it has bounds of pages beside it, so
    that new tokens of answers read the pages that `selection` allows; `memory` allocates both. Raises UsageError where
    no layer of the model sees all of a context, or the kernels choose no pages.
    """
    bounds, kernels = None, select_kernels()
    if selection is not None:
        if not kernels.page_choice_address:
            raise UsageError(f"--select-pages needs compiled kernels, these are {kernels.name!r}: install a compiler")
        bounds = PageBounds(selecting_layers(config), blocks, config.kv_heads, config.head_dim)
        memory = bounds.beside(memory or touched_memory)
    pool = BlockPool(
        config,
        blocks,
        block_tokens=block_tokens,
        kv_dtype=kv_dtype,
        kernels=kernels,
        memory=memory,
        window_blocks=window_blocks,
    )
    pool.bounds, pool.selection = bounds, selection
    return pool


def selecting_layers(config: ModelConfig) -> int:
    """Return the number of the model's layers that see all of a context. Raises UsageError if there are none."""
    layers = sum(1 for layer in range(config.layers) if not config.window(layer))
    if not layers:
        raise UsageError("--select-pages: every layer of this model has a window, so there is nothing to select")
    return layers


def _planes_in(memory: memoryview, planes: int, pool: BlockPool, kernels: Kernels) -> HostPlanes:
    return HostPlanes(planes, pool.blocks, pool.block_bytes, kernels, lambda size_bytes: memory)


def window_pool_blocks(config: ModelConfig, blocks: int, *, block_tokens: int, sequences: int, step_tokens: int) -> int:
    """Return how many blocks the pool of layers with a sliding window needs when the pool of the other layers has
    `blocks` blocks: enough for `sequences` sequences and a step of `step_tokens` tokens, plus a quarter of `blocks`.
    Return 0 if the model has no such layers.
    """
    if not config.windowed_layers:
        return 0
    # A window begins and ends anywhere in a block; one block more is borrowed for a prompt's last rows.
    each = -(-(config.window_tokens - 1) // block_tokens) + 3
    return min(blocks + sequences, sequences * each + -(-step_tokens // block_tokens) + blocks // 4)


def kv_row_bytes(config: ModelConfig, kv_dtype: str) -> int:
    """Return the bytes of the K (or the V) of one token in one layer, stored as `kv_dtype`. Raises ValueError if that
    type is unknown or does not fit the model.
    """
    if kv_dtype in SCALED_KV_TYPES:
        return config.kv_heads * (config.head_dim + _SCALE_BYTES)
    if kv_dtype not in KV_TYPES:
        raise ValueError(
            f"K/V type {kv_dtype!r} is not supported; supported: {', '.join((*KV_TYPES, *SCALED_KV_TYPES))}"
        )
    kind = TENSOR_TYPES[KV_TYPES[kv_dtype]]
    if config.kv_width % kind.block_elements:
        raise ValueError(
            f"K/V type {kv_dtype} keeps {kind.block_elements} values in a block, and this model's K has "
            f"{config.kv_width} a token, which is no multiple: choose f16, bf16 or f32"
        )
    return kind.row_bytes(config.kv_width)
