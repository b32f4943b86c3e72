"""What computes steps: the contract, the devices' names, and how an executor is opened.

ggml's is `kvstore_engine.executor`, torch's `kvstore_engine.torch_executor`.
"""

from kvstore_engine.executors.base import StepExecutor
from kvstore_engine.executors.devices import DeviceName
from kvstore_engine.executors.opening import open_executor
from kvstore_engine.executors.sizes import PoolSetup, StepSizes

__all__ = ["DeviceName", "PoolSetup", "StepExecutor", "StepSizes", "open_executor"]
