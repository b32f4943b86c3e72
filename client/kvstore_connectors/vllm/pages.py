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
    """Blocks on their way into the pool. They count only if their leases are valid after `finish`."""

    def wait(self, layer: int) -> None:
        """Make the calling thread's further engine work run after this layer has come, or after the load has failed.
        Raises nothing.
        """
        ...

    def finish(self) -> None:
        """Wait until the load no longer reads or writes. Raises the load's error. Another thread may call `wait` at
        that time.
        """
        ...


class Pages(Protocol):
    """The pages of one layer group in vLLM's pool, which blocks are copied to and from. `block_bytes`: the bytes of one
    block, all layers. `is_on_device`: a step has only been queued when vLLM says that it has run, and the device's
    stream waits for a layer.
    """

    block_bytes: int
    is_on_device: bool

    def of(self, group: int) -> Pages:
        """Return the pool of a layer group, in the same memory; this is the first one's."""
        ...

    def now(self) -> Moment:
        """Return the present moment of the engine. Called by the engine's thread."""
        ...

    def load(self, sources: Sequence[tuple[Lease, Sequence[Place]]], after: Any) -> PageLoad:
        """Copy leading blocks of leases into pool blocks that the engine does not use after the moment `after`. Raises
        KVStoreError for blocks of another size.
        """
        ...

    def gather(self, block_id: Place, destination: Bytes) -> None:
        """Copy a block of all layers to uint8[block_bytes] in the daemon's memory. The step that filled it has
        ended.
        """
        ...

    def decoding(self, is_decoding: bool) -> None:
        """Say before each step whether it continues answers. If it does, copies out of the pool leave the device's link
        to it.
        """
        ...

    def hurried(self) -> AbstractContextManager[None]:
        """Return a context manager; inside it copies run at full speed, since the engine waits for them."""
        ...

    def close(self) -> None:
        """Wait for copies; later ones are refused. Idempotent."""
        ...
