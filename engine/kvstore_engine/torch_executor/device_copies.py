"""Copies between the daemon's memory and planes on a CUDA device, by its copy engines, beside the step's stream.

Leased blocks come from the GPU tier's chunks on the device, or from arenas in host memory; puts are filled in the slots
where they are stored. The module owns the transfers of one pool, in and out. An engine block is a page; a storage block
has several, anywhere in the pool. Invariants: copies into blocks begin behind all work that the engine's stream had
when the load was begun; a layer is read only behind its copies. Blocks that are put were written by steps that have
ended (`forward` waits for them). While the engine decodes, they are copied out at the rate of the budget.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from kvstore_client.device import (
    DeviceMemory,
    DeviceMoment,
    DevicePool,
    LayerLoad,
    LinkBudget,
    PoolPart,
    TwoWayTransfers,
)
from kvstore_client.lease import Lease
from kvstore_client.link_rate import AUTO, Rate
from kvstore_engine.pool import BlockPool
from kvstore_engine.restore.copies import PoolLoad
from kvstore_engine.restore.fingerprint import STORAGE_BLOCK_TOKENS
from kvstore_engine.restore.session import KvLease, Payload
from kvstore_engine.torch_executor.cache import Arrivals

Stream = Callable[[], int]
"""The address of the CUstream that the calling thread computes on."""
_log = logging.getLogger(__name__)


class DevicePoolCopies:
    """A maker of copies between the daemon's memory and a pool on the CUDA `device`, by the device's copy engines. Each
    load is added to `arrivals`, so that steps wait for it. `budget` limits copies out of the pool while the engine
    decodes; it is closed with this object. Raises DeviceError.
    """

    waits_by_layer = True

    def __init__(
        self,
        device: DeviceMemory,
        pool: BlockPool,
        arrivals: Arrivals,
        stream: Stream,
        budget: LinkBudget | None = None,
    ) -> None:
        self.device, self._arrivals, self._stream = device, arrivals, stream
        self._transfers = TwoWayTransfers(device, device_pool(pool), budget)
        self.budget = self._transfers.budget

    def load(self, lease: KvLease, blocks: Sequence[tuple[int, list[int]]]) -> PoolLoad:
        assert isinstance(lease, Lease)  # it says where its blocks are
        after = DeviceMoment(self.device, self._stream())
        sources = [(lease, block, [table]) for block, table in blocks]
        load = _Load(
            self._transfers.loads.load_all(sources, after=after.event, keep=after), lease, self._arrivals, self._stream
        )
        self._arrivals.add(load.wait)
        return load

    def payload(self, table: list[int]) -> Payload:
        return self._transfers.stores.payload_of(table)

    def decoding(self, is_decoding: bool) -> None:
        self.budget.decoding(is_decoding)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all host memory that the copies so far were given is registered with the device. Return False if
        that takes longer than `timeout_s` seconds.
        """
        return self._transfers.loads.registered.settle(timeout_s)

    def close(self) -> None:
        """Wait for the copies under way, and unregister all host memory."""
        self._transfers.close()


class _Load:
    """A `PoolLoad` that a stream can wait for."""

    def __init__(self, load: LayerLoad, lease: Lease, arrivals: Arrivals, stream: Stream) -> None:
        self._load, self._lease, self._arrivals, self._stream = load, lease, arrivals, stream
        self._is_whole: bool | None = None

    @property
    def seconds(self) -> float | None:
        return self._load.seconds

    def wait(self, layer: int) -> None:
        self._load.wait_quietly(layer, self._stream())

    def finish(self) -> bool:
        if self._is_whole is None:
            self._arrivals.remove(self.wait)
            try:
                self._is_whole = self._load.finish() and self._lease.valid
            except Exception as error:  # the blocks are computed
                _log.warning("blocks could not be copied to the device: %s: %s", type(error).__name__, error)
                self._is_whole = False
        return self._is_whole


def device_pool(pool: BlockPool) -> DevicePool:
    """Return a description of `pool` for device copies: the memory of K, then of V, of each layer."""
    layers = [
        [PoolPart(address, pool.block_bytes, pool.block_bytes) for address in pool.plane_addresses(layer)]
        for layer in range(pool.layers)
    ]
    per_block = STORAGE_BLOCK_TOKENS // pool.block_tokens
    return DevicePool(layers, pool.blocks, block_pages=per_block, memory=pool.planes)


@contextlib.contextmanager
def open_device_copies(
    index: int, pool: BlockPool, arrivals: Arrivals, stream: Stream, store_rate: Rate = AUTO
) -> Iterator[DevicePoolCopies | None]:
    """Open a maker of copies between the daemon and `pool` on the CUDA device number `index` for the time of a `with`
    block. The block gets it, or None, with the reason in the log, if the device cannot copy. `store_rate` limits copies
    out of the pool while the engine decodes. Loads are added to `arrivals`; `stream` is the stream of the engine's
    steps.
    """
    copies = None
    try:
        copies = DevicePoolCopies(DeviceMemory(index), pool, arrivals, stream, LinkBudget(store_rate))
    except Exception as error:  # no library, no driver, memory that cannot be registered: the host copies
        _log.warning(
            "blocks are copied through host memory: CUDA device %d makes no copies of its own: %s", index, error
        )
    try:
        yield copies
    finally:
        if copies is not None:
            copies.close()
