"""What the worker's half asks of vLLM's paged pool, wherever that is: copies of whole blocks, layer by layer, and when
the engine's work on it has been done.

`tensors` answers for a pool in host memory and for one on a CUDA device; saver and worker know this alone. On a device
vLLM queues work and goes on: a moment has then not come yet when `now` names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvstore_client.lease import Lease
from kvstore_client.memory import Bytes
from kvstore_connectors.moments import Moment


class BlockLoad(Protocol):
    """Blocks on their way into the pool. They count only if their leases are valid after `finish`."""

    def wait(self, layer: int) -> None:
        """What the calling thread has the engine do from now on comes after this layer, or after the load has failed.
        Raises nothing."""
        ...

    def finish(self) -> None:
        """Wait until nothing of it is written or read any more. Raises what went wrong. Another thread may `wait`."""
        ...


class Pages(Protocol):
    """The pool. `block_bytes`: of one block, all layers. `is_on_device`: a step has only been queued when vLLM says
    that it has run, and what waits for a layer is the device's stream."""

    block_bytes: int
    is_on_device: bool

    def now(self) -> Moment:
        """For the engine's thread."""
        ...

    def load(self, sources: Sequence[tuple[Lease, Sequence[int]]], after: Any) -> BlockLoad:
        """Copy leading blocks of leases into pool blocks that the engine does not use after the moment `after`. Raises
        KVStoreError for blocks of another size."""
        ...

    def gather(self, block_id: int, destination: Bytes) -> None:
        """Copy a pool block of all layers to uint8[block_bytes] in the daemon's memory. The moment of the step that
        filled it has come."""
        ...

    def decoding(self, is_decoding: bool) -> None:
        """Before each step: whether it continues answers. Copies out of the pool leave a device's link to it then."""
        ...

    def hurried(self) -> AbstractContextManager[None]:
        """Meanwhile they do not: the engine waits for them."""
        ...

    def close(self) -> None:
        """Wait for copies; none begins any more. Idempotent."""
        ...
