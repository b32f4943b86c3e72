"""An engine's GPU beside the daemon: chunks of the daemon's GPU tier, and copies to and from the engine's paged pool.

It is imported only if a session is opened with `device`; the library is `cuda-bindings`: pip install '.[gpu]'.
"""

from kvstore_client.device.budget import LinkBudget
from kvstore_client.device.copy_resources import CopyResources
from kvstore_client.device.memory import DeviceChunk, DeviceError, DeviceMemory
from kvstore_client.device.pool import DevicePool, PoolPart
from kvstore_client.device.registered import RegisteredMemory
from kvstore_client.device.streams import DeviceMoment
from kvstore_client.device.transfers import DeviceTransfers, LayerLoad, TwoWayTransfers

__all__ = [
    "CopyResources", "DeviceChunk", "DeviceError", "DeviceMemory", "DeviceMoment", "DevicePool", "DeviceTransfers",
    "LayerLoad", "LinkBudget", "PoolPart", "RegisteredMemory", "TwoWayTransfers",
]  # fmt: skip
