"""Moves storage blocks from leases into a block pool, and from a pool into puts: the contract, and the processor's
copies.

The caller keeps the engine blocks of a load allocated and unread until the load is finished, and its lease until then;
blocks of a payload stay unchanged until the put has returned. Loads are begun and finished by the engine's thread
alone, payloads are filled by the thread that stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvstore_engine.pool import BlockPool
from kvstore_engine.restore.session import KvLease, Payload

if TYPE_CHECKING:
    from kvstore_client.device import DeviceMemory


class PoolLoad(Protocol):
    """Blocks on their way into the pool."""

    def finish(self) -> bool:
        """Wait for all copies. Return whether the blocks are there, which is so if their lease was valid at the end.
        Never raises; may be called again.
        """
        ...

    @property
    def seconds(self) -> float | None:
        """The seconds that the copies took, once the load is finished; None if the caller must time them."""
        ...


class PoolCopies(Protocol):
    """The copies of one pool. `waits_by_layer`: a step that begins before a load is finished waits for each layer by
    itself, and counts only if the load turns out to be good. `device`: the device to connect sessions with.
    """

    @property
    def waits_by_layer(self) -> bool: ...
    @property
    def device(self) -> DeviceMemory | None: ...

    def load(self, lease: KvLease, blocks: Sequence[tuple[int, list[int]]]) -> PoolLoad:
        """Begin to copy the lease's blocks; each is given with the engine blocks that it fills, in token order."""
        ...

    def payload(self, table: list[int]) -> Payload:
        """Return a function that writes the storage block in the engine blocks `table` to a put's slot."""
        ...

    def decoding(self, is_decoding: bool) -> None:
        """Note before each step whether it continues answers. Copies that no request waits for leave the link to it."""
        ...


@dataclass(frozen=True, slots=True)
class _Copied:
    is_whole: bool
    seconds: None = None

    def finish(self) -> bool:
        return self.is_whole


class HostPoolCopies:
    """Copies that read leases and fill slots as arrays in host memory, through the pool's own copies. A load ends in
    `load`.
    """

    waits_by_layer, device = False, None

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def load(self, lease: KvLease, blocks: Sequence[tuple[int, list[int]]]) -> PoolLoad:
        self._pool.scatter_blocks([lease.payload(block) for block, _ in blocks], [table for _, table in blocks])
        return _Copied(lease.valid)

    def payload(self, table: list[int]) -> Payload:
        return partial(self._pool.gather_block, table)

    def decoding(self, is_decoding: bool) -> None:
        """Do nothing: copies in host memory use no link."""
