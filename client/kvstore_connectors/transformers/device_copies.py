"""Copies between blocks and a tensor on a CUDA device, by its copy engines, beside the model's stream.

The tensor is laid out as [layer, token, K or V, head, dimension]: a block of tokens is then one run of bytes in each
layer; ordered by heads it would be two small runs for each head. To the copies a tensor is a pool whose page p is block
p. The module owns the session's `CopyResources`, made on first use. Only `finish` waits for copies, nothing waits for
the model, and the model's stream waits only for the copies of the layer that it reads next. Invariant: copies into a
tensor begin behind the work that the model's stream has queued on it so far.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

import torch

from kvstore_client.device import (
    CopyResources,
    DeviceMemory,
    DeviceMoment,
    DevicePool,
    DeviceTransfers,
    LayerLoad,
    PoolPart,
)
from kvstore_client.errors import invalid
from kvstore_client.lease import Lease
from kvstore_client.payload import FillSlot
from kvstore_connectors.transformers.copies import TokenSpan
from kvstore_connectors.transformers.fingerprint import DEVICE_LAYOUT
from kvstore_connectors.transformers.state import KVShape


class TorchStream:
    """The CUDA stream of `device` on which this thread queues the model's kernels now. It also gives memory from
    torch's allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def address(self) -> int:
        """Return the address of the current CUstream."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)


class DeviceCopying:
    """A load from a lease to a tensor on a device, which runs while the model computes. `held` keeps the lease, and is
    closed at the end. A load that is dropped early ends by itself: the pool keeps the tensor, and the source memory
    stays mapped.
    """

    def __init__(self, load: LayerLoad, stream: TorchStream, held: ExitStack) -> None:
        self._load, self._stream, self._held = load, stream, held
        self._is_valid: bool | None = None

    def wait(self, layer: int) -> None:
        self._load.wait_quietly(layer, self._stream.address())

    def finish(self) -> bool:
        if self._is_valid is None:
            try:
                self._is_valid = self._load.finish()
            except Exception:  # the device failed: the model computes all again
                self._is_valid = False
            self._held.close()
        return self._is_valid


class DeviceTensorCopies:
    """The copies between blocks of one session and tensors on its CUDA device `device`. It implements `TensorCopies`.
    Close it before the session ends.
    """

    layout = DEVICE_LAYOUT
    least_beside_bytes = 0

    def __init__(self, device: DeviceMemory, stream: TorchStream) -> None:
        self._device, self._stream = device, stream
        self._lock = threading.Lock()  # of what follows
        self._resources: CopyResources | None = None
        self._is_closed = False

    def empty(self, shape: KVShape, room: int, device: torch.device) -> torch.Tensor:
        in_memory = self._stream.empty((shape.layers, room, 2, shape.heads, shape.head_dim), shape.dtype, device)
        return in_memory.permute(0, 2, 3, 1, 4)

    def copy(self, lease: Lease, tensor: torch.Tensor, span: TokenSpan) -> bool:
        return self.start(lease, tensor, span, ExitStack()).finish()

    def start(self, lease: Lease, tensor: torch.Tensor, span: TokenSpan, held: ExitStack) -> DeviceCopying:
        transfers = self._transfers_of(tensor, span.block_tokens)
        pages = span.blocks
        if span.begin % span.block_tokens:
            _copy_rest(lease, tensor, span)
            pages = pages[1:]
        behind = self.moment()
        load = transfers.load(lease, pages, pages.start, after=behind.event, keep=behind)
        return DeviceCopying(load, self._stream, held.pop_all())

    def payloads(self, tensor: torch.Tensor, blocks: range, block_tokens: int, ready: DeviceMoment) -> list[FillSlot]:
        transfers = self._transfers_of(tensor, block_tokens)
        return [transfers.payload_of(block, [ready.event]) for block in blocks]

    def moment(self) -> DeviceMoment:
        return DeviceMoment(self._device, self._stream.address())

    def close(self) -> None:
        """Wait for the copies under way, and refuse later ones. A second call does nothing."""
        with self._lock:
            self._is_closed = True
            if self._resources is not None:
                self._resources.close()

    def _transfers_of(self, tensor: torch.Tensor, block_tokens: int) -> DeviceTransfers:
        place = _in_memory(tensor)
        layer_bytes, token_bytes = (place.stride(axis) * place.element_size() for axis in (0, 1))
        begin, page_bytes = place.data_ptr(), block_tokens * token_bytes
        parts = [[PoolPart(begin + layer * layer_bytes, page_bytes, page_bytes)] for layer in range(len(place))]
        pool = DevicePool(parts, place.shape[1] // block_tokens, memory=tensor)
        with self._lock:
            if self._is_closed:
                raise invalid("the session of this cache is closed")
            if self._resources is None:
                self._resources = CopyResources(self._device, pool.block_bytes)
            return DeviceTransfers(self._device, pool, resources=self._resources)


def _copy_rest(lease: Lease, tensor: torch.Tensor, span: TokenSpan) -> None:
    """Copy the missing tokens of the span's first block, of which some are held already and must not be written
    again.
    """
    block = span.blocks[0]
    origin = block * span.block_tokens
    end = min(span.end, origin + span.block_tokens)
    place = _in_memory(tensor)
    layers, _, *token = place.shape
    stored = torch.from_numpy(lease.payload(block).copy()).view(tensor.dtype)
    stored = stored.view(layers, span.block_tokens, *token)
    place[:, span.begin : end].copy_(stored[:, span.begin - origin : end - origin])


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor as [layer, token, K or V, head, dimension]."""
    return tensor.permute(0, 3, 1, 2, 4)
