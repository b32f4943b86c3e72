"""The interface of vLLM's paged pool for the worker side: copies of whole blocks, layer by layer, and moments at which
the engine's work on the pool is done.

`tensors` implements it for a pool in host memory and for one on a CUDA device; saver and worker use only this
interface. On a device vLLM queues work and goes on: a moment has then not come yet when `now` returns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvstore_client.lease import Lease
from kvstore_client.memory import Bytes
from kvstore_connectors.moments import Moment
from kvstore_connectors.vllm.orders import Place


class PageLoad(Protocol):
    """A load of blocks into vLLM's pool that is under way. The loaded blocks may be used only if their leases are still
    valid after `finish`.
    """

    def wait(self, layer: int) -> None:
        """Make the calling thread's further engine work run after layer number `layer` is loaded, or after the load has
        failed. It raises nothing.
        """
        ...

    def finish(self) -> None:
        """Wait until all copies of the load have ended. Raises the load's error. Another thread may be in `wait`
        meanwhile.
        """
        ...


class Pages(Protocol):
    """The part of vLLM's KV pool that belongs to one layer group, with copies of whole blocks into and out of it.
    `block_bytes` is the size of one block in all layers. If `is_on_device` is True, a step that vLLM reports as run has
    only been queued on the device.
    """

    block_bytes: int
    is_on_device: bool

    def of(self, group: int) -> Pages:
        """Return the part of the pool that belongs to the layer group number `group`."""
        ...

    def now(self) -> Moment:
        """Return the moment when all work that the engine has begun so far is finished. The engine's thread calls
        it.
        """
        ...

    def load(self, sources: Sequence[tuple[Lease, Sequence[Place]]], after: Any) -> PageLoad:
        """Start to copy blocks of leases into pool blocks, and return the load. Each of `sources` is a lease, and the
        pool blocks for the leading blocks of that lease. The engine does not use these pool blocks after the moment
        `after`. Raises KVStoreError for blocks of another size.
        """
        ...

    def gather(self, block_id: Place, destination: Bytes) -> None:
        """Copy all layers of the block at the place `block_id` to `destination`, uint8[block_bytes] in shared memory.
        The step that filled the block must have ended.
        """
        ...

    def decoding(self, is_decoding: bool) -> None:
        """Note, before each step, whether the step continues answers. If `is_decoding` is True, copies out of the pool
        use only a part of the device's link.
        """
        ...

    def hurried(self) -> AbstractContextManager[None]:
        """Return a context manager inside which copies run at full speed, because the engine waits for them."""
        ...

    def close(self) -> None:
        """Wait for the copies under way, and refuse later ones. A second call does nothing."""
        ...
