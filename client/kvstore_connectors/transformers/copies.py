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
    """The tokens from `begin` to `end` - 1 of a sequence that is stored in blocks of `block_tokens` tokens."""

    begin: int
    end: int
    block_tokens: int

    @property
    def blocks(self) -> range:
        """The numbers of the blocks that hold the tokens of this span. The first and the last block may hold tokens
        outside it.
        """
        return range(self.begin // self.block_tokens, -(-self.end // self.block_tokens))


class BlockRun(NamedTuple):
    """Payloads of consecutive blocks of one layer group, ready to store: `payloads[i]` belongs to block `first` + i.
    `group` is None for a model with one group.
    """

    group: int | None
    first: int
    payloads: list[FillSlot]


class BlockSource(Protocol):
    """A source of the payloads of one sequence's computed blocks. The thread that stores the blocks reads them from
    it.
    """

    def runs(self, blocks: range) -> list[BlockRun]:
        """Return the payloads of `blocks`, in one run for each layer group. The run of the group that has all of the
        blocks comes first.
        """
        ...

    def stored(self, blocks: range) -> None:
        """Note that `blocks` are stored or will not be stored, so that the memory of their payloads is no longer
        needed.
        """
        ...


class Copying(Protocol):
    """A copy of leased tokens into a tensor that is under way, layer by layer. Its methods raise nothing."""

    def wait(self, layer: int) -> None:
        """Make the model's further work wait until layer number `layer` is in the tensor, or until the copy has
        failed.
        """
        ...

    def finish(self) -> bool:
        """Wait for all layers and release the lease. Return True if all copied bytes are the leased bytes. A second
        call returns the first result.
        """
        ...


class TensorCopies(Protocol):
    """An object that copies between stored blocks and tensors on one kind of device. The tensors are made by `empty`,
    with the axes [layer, K or V, head, token, dimension].
    """

    @property
    def layout(self) -> str:
        """The name of the layout of payloads, as in `Fingerprint.layout`."""
        ...

    @property
    def least_beside_bytes(self) -> int:
        """The least size in bytes of a copy that may run while the model computes. Smaller copies end before the model
        goes on.
        """
        ...

    def empty(self, shape: KVShape, room: int, device: torch.device) -> torch.Tensor:
        """Return a new tensor on `device` for the K/V of `room` tokens. `shape` gives the sizes of the other axes and
        the dtype.
        """
        ...

    def copy(self, lease: Lease, tensor: torch.Tensor, span: TokenSpan) -> bool:
        """Copy the tokens `span` from `lease`, which covers the prefix from its first block on, into `tensor`. Return
        False if the lease ended meanwhile, so that the copied bytes may be wrong. Raises the error that prevented the
        copy.
        """
        ...

    def start(self, lease: Lease, tensor: torch.Tensor, span: TokenSpan, held: ExitStack) -> Copying:
        """Start to copy the tokens `span` from `lease` into `tensor` while the model computes, and return the copy
        under way. The copy takes over the contents of `held`, which keeps the lease, and closes it at the end. If this
        raises, `held` stays with the caller.
        """
        ...

    def payloads(self, tensor: torch.Tensor, blocks: range, block_tokens: int, ready: Any) -> list[FillSlot]:
        """Return for each of `blocks` a payload for `Session.put` that reads the block from `tensor`. They are full
        blocks of `block_tokens` tokens, complete once the moment `ready` has come. The caller keeps `ready` until they
        are written.
        """
        ...

    def moment(self) -> Moment:
        """Return the moment when all work that the model has begun so far is finished."""
        ...
