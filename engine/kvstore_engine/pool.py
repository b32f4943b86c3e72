"""The paged K/V cache in this process: memory, free blocks, and copies in and out of it.

Owns the planes (K and V of each layer) and the list of free engine blocks. It never knows which sequence
holds a block, what a block's key is, or what should be evicted: callers own block tables.
Invariants: a block is free or allocated, never both; freeing a free block is a broken invariant and raises.

Memory is one anonymous map, touched at creation: a first write to an untouched page costs five times the
copy.
A storage block's payload is layer-major: for each layer K [tokens, kv_heads * head_dim], then V, rows in
token order, which is this pool's own layout, so that copies are memcpy.
"""

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_engine.gguf.tensor_types import F16, F32
from kvstore_engine.kernels import Kernels, select_kernels
from kvstore_engine.model.config import ModelConfig

ENGINE_BLOCK_TOKENS = 16
PAYLOAD_LAYOUT = "layer-major/k-then-v/token-major"
_ELEMENTS = {"f16": (F16, 2), "f32": (F32, 4)}
Bytes = npt.NDArray[np.uint8]
BlockIds = Sequence[int] | npt.NDArray[np.int32]


class PoolExhausted(RuntimeError):
    """More blocks were asked for than are free. Ask `free_blocks` first where that is an ordinary event."""


class BlockPool:
    """`blocks` engine blocks of `block_tokens` tokens for every layer of one model."""

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        *,
        block_tokens: int = ENGINE_BLOCK_TOKENS,
        kv_dtype: str = "f16",
        kernels: Kernels | None = None,
    ) -> None:
        """Map and touch the memory. ValueError for an unknown dtype or a block size outside 8..256 tokens."""
        if kv_dtype not in _ELEMENTS:
            raise ValueError(f"K/V type {kv_dtype!r} is not supported; supported: {', '.join(_ELEMENTS)}")
        if blocks < 1 or not 8 <= block_tokens <= 256:
            raise ValueError(f"{blocks} blocks of {block_tokens} tokens: need at least 1 of 8..256 tokens")
        self.kernels = kernels or select_kernels()
        self.layers = config.layers
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.kv_dtype = kv_dtype
        self.ggml_type, self.element_bytes = _ELEMENTS[kv_dtype]
        self.row_elements = config.kv_width
        self.row_bytes = config.kv_width * self.element_bytes
        self.block_bytes = block_tokens * self.row_bytes
        self.planes = _planes(2 * config.layers, blocks, self.block_bytes)
        self._free = np.ones(blocks, np.bool_)

    @property
    def free_blocks(self) -> int:
        """Engine blocks that `allocate` could still give out."""
        return int(np.count_nonzero(self._free))

    def payload_bytes(self, engine_blocks: int) -> int:
        """Size of the payload of a storage block that spans `engine_blocks` engine blocks."""
        return 2 * self.layers * engine_blocks * self.block_bytes

    def plane_addresses(self, layer: int) -> tuple[int, int]:
        """Addresses of the K and the V plane of `layer`."""
        base, stride = self.planes.ctypes.data, self.planes.strides[0]
        return base + 2 * layer * stride, base + (2 * layer + 1) * stride

    def allocate(self, count: int) -> list[int]:
        """`count` block ids, neighbours where possible. Raises PoolExhausted, and then allocates nothing.

        The smallest run of free blocks that holds them all, else the largest runs first: adjacent blocks
        copy in one memcpy, and small requests leave the large runs whole.
        """
        if count <= 0:
            return []
        starts, lengths = _runs(self._free)
        if int(lengths.sum()) < count:
            raise PoolExhausted(f"{count} blocks wanted, {int(lengths.sum())} of {self.blocks} are free")
        fitting = np.flatnonzero(lengths >= count)
        if fitting.size:
            best = fitting[np.argmin(lengths[fitting])]
            ids = np.arange(starts[best], starts[best] + count)
        else:
            order = np.argsort(-lengths, kind="stable")
            runs = [np.arange(starts[i], starts[i] + lengths[i]) for i in order]
            ids = np.concatenate(runs)[:count]
        self._free[ids] = False
        return [int(block) for block in ids]

    def free(self, ids: BlockIds) -> None:
        """Give blocks back. RuntimeError if one is out of range, free already, or named twice."""
        if not len(ids):
            return
        blocks = np.asarray(ids, np.int64)
        if blocks.min() < 0 or blocks.max() >= self.blocks:
            raise RuntimeError(f"free: block ids {ids} are outside 0..{self.blocks - 1}")
        if self._free[blocks].any() or len(np.unique(blocks)) != len(blocks):
            raise RuntimeError(f"free: a block of {ids} is free already or named twice")
        self._free[blocks] = True

    def gather_block(self, block_ids: BlockIds, dest: Bytes) -> None:
        """Write the payload of the storage block held by `block_ids` (in token order) to `dest`, uint8."""
        self._copy([dest], [block_ids], into_pool=False, threads=1)

    def scatter_block(self, source: Bytes, block_ids: BlockIds) -> None:
        """Read one storage block's payload, uint8, into the engine blocks `block_ids` (in token order)."""
        self._copy([source], [block_ids], into_pool=True, threads=1)

    def scatter_blocks(self, sources: Sequence[Bytes], tables: Sequence[BlockIds], *, threads: int = 2) -> None:
        """`scatter_block` for many storage blocks at once, at memcpy speed: the way to restore a prefix."""
        self._copy(sources, tables, into_pool=True, threads=threads)

    def _copy(self, payloads: Sequence[Bytes], tables: Sequence[BlockIds], *, into_pool: bool, threads: int) -> None:
        """Check everything the kernels take on trust, then copy."""
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
        self.kernels.copy_blocks(self.planes, flat, table, into_pool=into_pool, threads=threads)


def _planes(count: int, blocks: int, block_bytes: int) -> Bytes:
    """Zeroed, touched memory, uint8 [count, blocks, block_bytes]; each plane starts on a 64-byte boundary."""
    stride = -(-blocks * block_bytes // 64) * 64
    memory = mmap.mmap(-1, count * stride)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(memory, np.uint8)
    flat.fill(0)
    return flat.reshape(count, stride)[:, : blocks * block_bytes].reshape(count, blocks, block_bytes)


def _runs(free: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Start and length of each run of set elements."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.view(np.int8), [0]))))
    return edges[::2], edges[1::2] - edges[::2]
