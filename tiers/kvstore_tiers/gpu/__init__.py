"""Blocks in the memory of a GPU.

`tier` is the tier; it holds no CUDA context. `worker` is the process that does, one for each device; it may die and is
started anew. `driver` is all that knows the CUDA driver.
"""

from kvstore_tiers.gpu.settings import WorkerSettings
from kvstore_tiers.gpu.tier import GpuTier

__all__ = ["GpuTier", "WorkerSettings"]
