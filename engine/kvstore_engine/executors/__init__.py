"""Executors, which compute steps: the contract and the devices' names. `kvstore_engine.opening` opens an executor.

ggml's is `kvstore_engine.executor`, torch's `kvstore_engine.torch_executor`.
"""

from kvstore_engine.devices import DeviceName
from kvstore_engine.executors.base import StepExecutor
from kvstore_engine.executors.sizes import PoolSetup, StepSizes

__all__ = ["DeviceName", "PoolSetup", "StepExecutor", "StepSizes"]
