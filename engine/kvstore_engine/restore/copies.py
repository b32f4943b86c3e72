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
    """A running copy of stored blocks into the K/V pool. The lease on the blocks must last until `finish` has
    returned.
    """

    def finish(self) -> bool:
        """Wait until all blocks are copied. Return True if they are in the pool and the lease was valid to the end. It
        does not raise and may be called again.
        """
        ...

    @property
    def seconds(self) -> float | None:
        """The seconds that the copies took, once `finish` has returned; None if the caller must measure them."""
        ...


class PoolCopies(Protocol):
    """A maker of copies of blocks between the daemon's memory and one K/V pool. If `waits_by_layer` is true, a step may
    begin before a load is finished; it then waits for each layer. `device` is the device memory with which to open
    sessions, or None.
    """

    @property
    def waits_by_layer(self) -> bool: ...
    @property
    def device(self) -> DeviceMemory | None: ...

    def load(self, lease: KvLease, blocks: Sequence[tuple[int, list[int]]]) -> PoolLoad:
        """Begin to copy blocks of `lease` into the pool, and return the running copy. Each entry of `blocks` is the
        number of a storage block in the lease and the pool blocks that it fills, in token order.
        """
        ...

    def payload(self, table: list[int]) -> Payload:
        """Return a function that writes one storage block, which is in the pool blocks `table`, into the daemon's
        memory when the block is stored.
        """
        ...

    def decoding(self, is_decoding: bool) -> None:
        """Receive before each step whether it computes next tokens of answers. While it does, copies that no request
        waits for leave the link to the device free.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Copied:
    is_whole: bool
    seconds: None = None

    def finish(self) -> bool:
        return self.is_whole


class HostPoolCopies:
    """A maker of copies between the daemon's shared memory and a pool in host memory. The processor copies, and a copy
    is finished when `load` returns.
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
        """Do nothing, because copies in host memory use no link to a device."""
