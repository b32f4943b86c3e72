"""How blocks get into and out of the tensor in which a stack keeps K and V: the contract.

Two implementations: `host_copies` (a thread copies with the CPU) and `device_copies` (the copy engines of a CUDA
device). The caller guarantees that room for the tokens is there, that those that are copied are not read before
`Copying.wait`, and that tokens of which payloads are taken are not written again. An implementation MUST never write a
token before `Span.begin`, MUST keep the tensor's memory as long as it copies, and MUST say so when what it copied may
not be the leased bytes. It decides how the tensor is laid out in memory, and so the layout of a payload.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvstore_client.lease import Lease
from kvstore_client.payload import FillSlot
from kvstore_connectors.moments import Moment
from kvstore_connectors.transformers.fingerprint import KVShape


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [begin, end) of a sequence that is stored in blocks of `block_tokens`."""

    begin: int
    end: int
    block_tokens: int

    @property
    def blocks(self) -> range:
        """Those that have the tokens. Of the first and of the last one some tokens may be outside."""
        return range(self.begin // self.block_tokens, -(-self.end // self.block_tokens))


class Copying(Protocol):
    """Leased tokens on their way into a tensor, layer by layer. Raises nothing."""

    def wait(self, layer: int) -> None:
        """What the model does from now on finds this layer there, or nothing more will come."""
        ...

    def finish(self) -> bool:
        """Wait for all layers and release the lease: whether all that was copied are the leased bytes. Idempotent."""
        ...


class BlockCopies(Protocol):
    """See the module. A `tensor` is one that `empty` made: [layer, K or V, head, token, dimension]."""

    @property
    def layout(self) -> str:
        """Of the payloads, as the fingerprint of a session names it."""
        ...

    @property
    def least_beside_bytes(self) -> int:
        """Less is better copied at once than beside the model."""
        ...

    def empty(self, shape: KVShape, room: int, device: torch.device) -> torch.Tensor:
        """A new tensor with room for `room` tokens."""
        ...

    def copy(self, lease: Lease, tensor: torch.Tensor, span: Span) -> bool:
        """Copy tokens of a lease on the prefix from its first block on. False if they may not be the leased bytes.
        Raises what kept it from copying."""
        ...

    def start(self, lease: Lease, tensor: torch.Tensor, span: Span, held: ExitStack) -> Copying:
        """The same, beside the model. What `held` has (the lease) is taken over, unless this raises."""
        ...

    def payloads(self, tensor: torch.Tensor, blocks: range, block_tokens: int, ready: Any) -> list[FillSlot]:
        """Of full blocks, which the model has computed at `ready`; that is to be kept until they are written."""
        ...

    def moment(self) -> Moment:
        """Behind all that the model does up to now."""
        ...
