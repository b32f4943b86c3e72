"""vLLM's paged pool on a CUDA device: the driver copies beside the engine's stream, which itself waits for a layer.

Owns the transfers of one pool, in and out. The engine's thread waits for the
daemon's answer and until copies are queued, never for a copy, but at the end of a step that loads: vLLM wants to know
then which blocks failed.
Invariants: copies into a pool block begin behind all that the engine had queued when the load was ordered; a pool block
is read only once the step that filled it has ended. The saver waits for that before it copies, since it must be able to
give the copy up meanwhile. While the engine decodes, blocks are copied out at the rate of the budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from kvstore_client.device import DeviceMemory, DeviceMoment, DevicePool, LayerLoad, LinkBudget, TwoWayTransfers
from kvstore_client.lease import Lease
from kvstore_client.memory import Bytes
from kvstore_connectors.vllm.pages import HeldBlocks


class DevicePages:
    """`device` is the session's; `stream()` is the address of the CUstream that the calling thread computes on.
    `budget` is closed with it. Implements `Pages`. Raises DeviceError."""

    is_on_device = True

    def __init__(
        self, device: DeviceMemory, pool: DevicePool, stream: Callable[[], int], budget: LinkBudget | None = None
    ) -> None:
        self._device, self._stream = device, stream
        self.block_bytes = pool.block_bytes
        self._transfers = TwoWayTransfers(device, pool, budget)
        self.loads, self.stores = self._transfers.loads, self._transfers.stores

    def now(self) -> DeviceMoment:
        return DeviceMoment(self._device, self._stream())

    def load(self, sources: Sequence[tuple[HeldBlocks, Sequence[int]]], after: DeviceMoment) -> DeviceLoad:
        leases: list[tuple[Lease, int, Sequence[int]]] = []
        for held, block_ids in sources:
            assert isinstance(held, Lease)  # it says where its blocks are
            leases.append((held, 0, block_ids))
        return DeviceLoad(self.loads.load_all(leases, after=after.event, keep=after), self._stream)

    def gather(self, block_id: int, destination: Bytes) -> None:
        finish = self.stores.payload_of(block_id)(destination)
        if finish is not None:
            finish()

    def decoding(self, is_decoding: bool) -> None:
        self._transfers.budget.decoding(is_decoding)

    def hurried(self) -> contextlib.AbstractContextManager[None]:
        return self._transfers.budget.lifted("stores")

    def close(self) -> None:
        self._transfers.close()


class DeviceLoad:
    """Implements `BlockLoad`."""

    def __init__(self, load: LayerLoad, stream: Callable[[], int]) -> None:
        self._load, self._stream = load, stream

    def wait(self, layer: int) -> None:
        self._load.wait_quietly(layer, self._stream())

    def finish(self) -> None:
        self._load.finish()
