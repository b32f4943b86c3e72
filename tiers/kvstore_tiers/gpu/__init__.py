"""Blocks in the memory of a GPU.

`tier` is the tier; it holds no CUDA context. `worker` is the process that does, one for each device; it may die and is
started anew.
"""

from kvstore_tiers.gpu.tier import GpuTier
from kvstore_tiers.gpu.worker_life import GpuWorkerSettings

__all__ = ["GpuTier", "GpuWorkerSettings"]
