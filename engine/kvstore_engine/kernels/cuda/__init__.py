"""The engine's CUDA kernels: paged attention, rotation with the write into the cache, and moves of blocks.

`Device` compiles and launches them. A step calls `PagedAttention` and `RopeCache`; `BlockMover` copies, gathers and
scatters blocks of the pool between steps and beside them (`torch_executor/planes.py`). They have not yet run on
hardware: docs/engine.md has the state.
"""

from kvstore_engine.kernels.cuda.attention import Crossover, KernelRows, PagedAttention
from kvstore_engine.kernels.cuda.blocks import BlockMover
from kvstore_engine.kernels.cuda.device import CacheWindow, Device
from kvstore_engine.kernels.cuda.program import CacheShape, CudaError, Launcher, Program
from kvstore_engine.kernels.cuda.rope import NewTokens, RopeCache

__all__ = [
    "BlockMover",
    "CacheShape",
    "CacheWindow",
    "Crossover",
    "CudaError",
    "Device",
    "Launcher",
    "NewTokens",
    "PagedAttention",
    "Program",
    "RopeCache",
    "KernelRows",
]
