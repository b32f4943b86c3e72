"""The memory of K and V of one sequence: one tensor for all layers, written in place, so that a block is one copy.

The module owns the tensor [layer, K or V, head, token, dimension] and its growth. `StoreLayer` is a `DynamicLayer`
whose `keys` and `values` are views of it. Any other operation on a layer (another batch, a reordering, gradients) makes
it a plain `DynamicLayer` from then on, and the stack reports that it is no longer whole. The module knows no tokens and
talks to no daemon. Invariant: bytes before a layer's length are not written again while the stack is whole, so another
thread may read them; a layer that is being loaded is not touched before the load has ended.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvstore_connectors.moments import Moment
from kvstore_connectors.transformers.copies import BlockRun, Copying, TensorCopies
from kvstore_connectors.transformers.host_copies import HostTensorCopies
from kvstore_connectors.transformers.state import KVShape

LEAST_HEADROOM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class StackBlocks:
    """The computed blocks of one sequence in the tensor of a `KVStack`, for the thread that stores them. They are
    complete once the moment `ready` has come. It implements `BlockSource`.
    """

    copies: TensorCopies
    tensor: torch.Tensor
    block_tokens: int
    ready: Moment

    def runs(self, blocks: range) -> list[BlockRun]:
        payloads = self.copies.payloads(self.tensor, blocks, self.block_tokens, self.ready)
        return [BlockRun(None, blocks.start, payloads)]

    def stored(self, blocks: range) -> None:
        """Do nothing, because the blocks are in the sequence's own tensor, which stays."""


class KVStack:
    """The K and V of all layers of one sequence, in one tensor. `copies` moves blocks into and out of the tensor; by
    default the CPU does. `is_whole` becomes False when the layers begin to keep their K and V in tensors of their own.
    """

    def __init__(self, shape: KVShape, copies: TensorCopies | None = None) -> None:
        self.shape = shape
        self.copies = copies or HostTensorCopies()
        self.is_whole = True
        self.layers = [StoreLayer(self, index) for index in range(shape.layers)]
        self.tensor: torch.Tensor | None = None
        self.coming: Copying | None = None  # copies into the tensor, and the model may wait for it by layer

    @property
    def can_go_back(self) -> bool:
        return True

    @property
    def cut_tokens(self) -> int:
        """Return 0, because a call of the model may end at any token."""
        return 0

    @property
    def capacity(self) -> int:
        return 0 if self.tensor is None else int(self.tensor.shape[3])

    def takes(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether `keys` and `values` can be added to the stack: they are of one sequence, with the stack's
        shape, dtype and device.
        """
        expected = (1, self.shape.heads, keys.shape[-2], self.shape.head_dim)
        return (
            self.is_whole
            and tuple(keys.shape) == tuple(values.shape) == expected
            and keys.dtype == values.dtype == self.shape.dtype
            and keys.device == values.device
            and (self.tensor is None or self.tensor.device == keys.device)
            and not (keys.requires_grad or values.requires_grad)
        )

    def holds(self, tokens: int) -> bool:
        """Return whether every layer holds the K and V of exactly `tokens` tokens, in the stack's tensor."""
        return self.is_whole and all(layer.length == tokens and layer.is_ours for layer in self.layers)

    def reserve(self, tokens: int, device: torch.device) -> None:
        """Make room for `tokens` tokens on `device`. If the tensor is too small, its content moves to a larger one;
        other threads may still read the old tensor.
        """
        if tokens <= self.capacity:
            return
        if self.coming is not None:
            self.coming.finish()
        room = tokens + max(LEAST_HEADROOM_TOKENS, tokens // 8)
        with torch.inference_mode(False):  # else it could not be written to outside of inference mode, later on
            larger = self.copies.empty(self.shape, room, device)
        if self.tensor is not None:
            kept = max(layer.length for layer in self.layers)
            larger[:, :, :, :kept].copy_(self.tensor[:, :, :, :kept])
        self.tensor = larger
        for layer in self.layers:
            layer.show(layer.length)

    def extend_to(self, tokens: int) -> None:
        for layer in self.layers:
            layer.show(tokens)

    def go_back(self, tokens: int) -> None:
        """Remove the K and V of all tokens behind the first `tokens`. Some layers may hold more tokens than others."""
        if self.tensor is not None:
            self.extend_to(tokens)

    def settle(self) -> bool:
        """Finish the copy that ran beside the model's last call, if there was one. Return False if it may have copied
        other bytes than the leased ones.
        """
        copying, self.coming = self.coming, None
        return copying is None or copying.finish()

    def blocks_until(self, tokens: int, block_tokens: int, ready: Moment) -> StackBlocks | None:
        """Return the blocks in the tensor, which were computed at the moment `ready`, or None if there is no tensor
        yet.
        """
        return None if self.tensor is None else StackBlocks(self.copies, self.tensor, block_tokens, ready)

    def break_up(self) -> None:
        """Make the layers keep K and V themselves from now on. Tensors that they have returned stay readable."""
        self.is_whole = False


class StoreLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A Transformers cache layer whose K and V are layer number `index` of the tensor of `stack`. The model uses it as
    a `DynamicLayer`.
    """

    def __init__(self, stack: KVStack, index: int) -> None:
        super().__init__()
        self._stack = weakref.ref(stack)  # it holds us: a cycle would keep K and V until the next collection
        self._index = index
        self._shown: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self.length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stack = self._stack()
        if stack is not None and stack.coming is not None:
            stack.coming.wait(self._index)
        if stack is None or not (self.is_ours and stack.takes(key_states, value_states)):
            if stack is not None:
                stack.break_up()
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        begin, end = self.length, self.length + key_states.shape[-2]
        stack.reserve(end, key_states.device)
        assert stack.tensor is not None
        own = stack.tensor[self._index]
        own[0, :, begin:end].copy_(key_states[0])
        own[1, :, begin:end].copy_(value_states[0])
        self.show(end)
        return self.keys, self.values

    @property
    def is_ours(self) -> bool:
        """True while `keys` and `values` of this layer are views of the stack's tensor, and no other code has replaced
        them.
        """
        if self.length == 0:
            return bool(self.get_seq_length() == 0)
        return self.keys is self._shown[0] and self.values is self._shown[1]

    def show(self, length: int) -> None:
        """Set `keys` and `values` to views of the first `length` tokens in the stack's tensor."""
        stack = self._stack()
        assert stack is not None and stack.tensor is not None, "only a stack that has room shows anything"
        tensor = stack.tensor
        own = tensor[self._index, :, None, :, :length]
        self.keys, self.values = self._shown = (own[0], own[1])
        self.dtype, self.device = tensor.dtype, tensor.device
        self.is_initialized = True
        self.length = length

    def reset(self) -> None:
        super().reset()
        self._shown = (None, None)
        self.length = 0
