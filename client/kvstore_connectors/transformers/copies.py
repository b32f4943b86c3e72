"""The contract for copies between blocks and the tensor in which a stack keeps K and V.

Two implementations: `host_copies` (a thread copies with the CPU) and `device_copies` (the copy engines of a CUDA
device). The caller guarantees that the tensor has room for the tokens, that copied tokens are not read before
`Copying.wait`, and that tokens whose payloads were taken are not written again. An implementation MUST never write a
token before `TokenSpan.begin`, MUST keep the tensor's memory as long as it copies, and MUST report when the copied
bytes may not be the leased bytes. It decides the layout of the tensor in memory, and so the layout of a payload.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from kvstore_client.lease import Lease
from kvstore_client.payload import FillSlot
from kvstore_connectors.moments import Moment
from kvstore_connectors.transformers.state import KVShape


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The tokens [begin, end) of a sequence that is stored in blocks of `block_tokens`."""

    begin: int
    end: int
    block_tokens: int

    @property
    def blocks(self) -> range:
        """The blocks that hold the tokens. The first and the last one may also hold tokens outside the span."""
        return range(self.begin // self.block_tokens, -(-self.end // self.block_tokens))


class BlockRun(NamedTuple):
    """Payloads of blocks `first`, `first` + 1, … of a layer group; None for the only one."""

    group: int | None
    first: int
    payloads: list[FillSlot]


class BlockSource(Protocol):
    """The computed blocks of a sequence, on their way into the store. Used by another thread than the model's."""

    def runs(self, blocks: range) -> list[BlockRun]:
        """Return the payloads of `blocks`, of the group that has all of them first."""
        ...

    def stored(self, blocks: range) -> None:
        """Take note that `blocks` are stored or given up: their memory is not needed any more."""
        ...


class Copying(Protocol):
    """Leased tokens on their way into a tensor, layer by layer. Raises nothing."""

    def wait(self, layer: int) -> None:
        """Make the model's further work find this layer in the tensor, or return when the copy has failed."""
        ...

    def finish(self) -> bool:
        """Wait for all layers and release the lease. Return whether all copied bytes are the leased bytes.
        Idempotent.
        """
        ...


class TensorCopies(Protocol):
    """The copies of one kind of device. `tensor` parameters are made by `empty`: [layer, K or V, head, token,
    dimension].
    """

    @property
    def layout(self) -> str:
        """The layout of the payloads, as the fingerprint of a session names it."""
        ...

    @property
    def least_beside_bytes(self) -> int:
        """The least size in bytes of a copy beside the model; smaller copies are made at once."""
        ...

    def empty(self, shape: KVShape, room: int, device: torch.device) -> torch.Tensor:
        """Return a new tensor with room for `room` tokens."""
        ...

    def copy(self, lease: Lease, tensor: torch.Tensor, span: TokenSpan) -> bool:
        """Copy tokens of a lease that covers the prefix from its first block on. Return False if they may not be the
        leased bytes. Raises the error that prevented the copy.
        """
        ...

    def start(self, lease: Lease, tensor: torch.Tensor, span: TokenSpan, held: ExitStack) -> Copying:
        """Start the copy that `copy` makes, beside the model, and return it. The copy takes over the contents of `held`
        (the lease), unless this raises.
        """
        ...

    def payloads(self, tensor: torch.Tensor, blocks: range, block_tokens: int, ready: Any) -> list[FillSlot]:
        """Return functions that write the payloads of full blocks, which the model has computed at the moment `ready`.
        The caller keeps `ready` until they are written.
        """
        ...

    def moment(self) -> Moment:
        """Return a moment behind all work of the model up to now."""
        ...
