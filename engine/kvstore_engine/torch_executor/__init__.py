"""The executor that computes with torch: on GPUs with the engine's CUDA kernels, on processors for comparisons.

Importing this package does not import torch; opening an executor does.
"""

from kvstore_engine.torch_executor.library import numerics
from kvstore_engine.torch_executor.opening import open_torch_copies, open_torch_executor, refusals, room_for_pool

__all__ = ["numerics", "open_torch_copies", "open_torch_executor", "refusals", "room_for_pool"]
