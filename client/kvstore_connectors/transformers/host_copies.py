"""Copies between blocks and a tensor with the CPU, in a thread of its own if that is worth it.

The tensor is laid out as [layer, K or V, head, token, dimension]. It may be on another device than the CPU: then torch
copies, and waits. A copy beside the model owns its thread and the lease; the model may read a layer as soon as it is
copied. Only at the end is it known whether the lease outlived the copy: the model's results count if `finish` returns
True. Nothing here raises into the model.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore_client.lease import Lease
from kvstore_client.payload import FillSlot
from kvstore_connectors.moments import HostMoment, LayerProgress
from kvstore_connectors.transformers.copies import TokenSpan
from kvstore_connectors.transformers.fingerprint import LAYOUT
from kvstore_connectors.transformers.state import KVShape

LEAST_BYTES = 4 * 1024 * 1024  # less is copied before the thread would run
Bytes = npt.NDArray[np.uint8]


class HostTensorCopies:
    """An object that copies between stored blocks and tensors by the CPU, for a model on `device` (None: the CPU). It
    implements `TensorCopies`.
    """

    layout = LAYOUT
    least_beside_bytes = LEAST_BYTES

    def __init__(self, device: torch.device | None = None) -> None:
        self._is_host = device is None or device.type == "cpu"

    def empty(self, shape: KVShape, room: int, device: torch.device) -> torch.Tensor:
        return torch.empty((shape.layers, 2, shape.heads, room, shape.head_dim), dtype=shape.dtype, device=device)

    def copy(self, lease: Lease, tensor: torch.Tensor, span: TokenSpan) -> bool:
        scatter(tensor, _payloads(lease, span), span)
        return lease.valid

    def start(self, lease: Lease, tensor: torch.Tensor, span: TokenSpan, held: ExitStack) -> LayerCopy:
        payloads = _payloads(lease, span)

        def copy(layer: int) -> None:
            scatter(tensor, payloads, span, slice(layer, layer + 1))

        return LayerCopy(len(tensor), copy, lease, held.pop_all()).start()

    def payloads(self, tensor: torch.Tensor, blocks: range, block_tokens: int, ready: Any) -> list[FillSlot]:
        return [partial(gather, tensor, block * block_tokens, (block + 1) * block_tokens) for block in blocks]

    def moment(self) -> HostMoment:
        return HostMoment(time.perf_counter() if self._is_host else None)


def _payloads(lease: Lease, span: TokenSpan) -> list[Bytes]:
    return [lease.payload(block) for block in span.blocks]


def scatter(tensor: torch.Tensor, blocks: Sequence[Bytes], span: TokenSpan, layers: slice = slice(None)) -> None:
    """Copy the tokens `span` from `blocks` into `tensor`. `blocks` are the payloads of the blocks that hold those
    tokens. Only the layers in the slice `layers` are copied.
    """
    count, _, heads, _, head_dim = tensor.shape
    begin, end, block_tokens = span.begin, span.end, span.block_tokens
    part = tensor[layers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # we only read it
        origin = begin // block_tokens * block_tokens
        for run in runs_of(blocks):
            stored = torch.from_numpy(run).view(tensor.dtype)
            stored = stored.view(len(run), count, 2, heads, block_tokens, head_dim)[:, layers]
            stop = origin + len(run) * block_tokens
            first, last = max(begin, origin), min(end, stop)
            if (first, last) == (origin, stop):
                place = part[:, :, :, first:last].unflatten(3, (len(run), block_tokens))
                place.copy_(stored.permute(1, 2, 3, 0, 4, 5))
            else:  # a run that is wanted in part: of its first or last block only some tokens
                for index, block in enumerate(stored):
                    at = origin + index * block_tokens
                    low, high = max(first, at), min(last, at + block_tokens)
                    part[:, :, :, low:high].copy_(block[:, :, :, low - at : high - at])
            origin = stop


def runs_of(blocks: Sequence[Bytes]) -> Iterator[Bytes]:
    """Yield `blocks` as arrays [block, byte], without a copy. Consecutive blocks at equal distances in memory form one
    array.

    Each array is copied in one call of torch, which takes less time than a call for each block. The last block is an
    array of its own, because only a part of it may be wanted.
    """
    starts = [block.__array_interface__["data"][0] for block in blocks]
    first = 0
    while first < len(blocks):
        step, last = 0, first
        while last + 2 < len(blocks) and starts[last + 1] - starts[last] >= len(blocks[first]):
            if step not in (0, starts[last + 1] - starts[last]):
                break
            step, last = starts[last + 1] - starts[last], last + 1
        count, block = last + 1 - first, blocks[first]
        yield np.lib.stride_tricks.as_strided(block, (count, len(block)), (step or len(block), 1), writeable=False)
        first = last + 1


def gather(tensor: torch.Tensor, begin: int, end: int, destination: Bytes) -> None:
    """Copy the tokens `begin` to `end` - 1 of `tensor` into `destination`, a block's payload. On the CPU, torch's
    threads are not used, because the model needs them.
    """
    source = tensor[:, :, :, begin:end]
    if source.device.type == "cpu":
        raw = source.view(torch.uint8).numpy()
        np.copyto(destination.reshape(raw.shape), raw)
    else:
        torch.from_numpy(destination).view(tensor.dtype).view(source.shape).copy_(source)


class Expiring(Protocol):
    """A lease, or several of them."""

    @property
    def valid(self) -> bool:
        """True if all bytes that were copied until now are the leased bytes."""
        ...


class LayerCopy:
    """A copy of `layers` layers in a thread, while the model computes. `copy(layer)` writes one layer. `held` keeps the
    lease, and is closed at the end.
    """

    def __init__(self, layers: int, copy: Callable[[int], None], lease: Expiring, held: ExitStack) -> None:
        self._copy, self._lease, self._held = copy, lease, held
        self._layers = layers
        self._progress = LayerProgress()
        self._is_whole = False
        self._is_valid: bool | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-hook-layers", daemon=True)

    def start(self) -> LayerCopy:
        self._thread.start()
        return self

    def wait(self, layer: int) -> None:
        """Wait until layer number `layer` is copied, or the copy has ended without it."""
        self._progress.wait(layer)

    def finish(self) -> bool:
        """Wait for all layers and release the lease. Return True if all copied bytes are the leased bytes."""
        if self._is_valid is None:
            self._thread.join()
            self._is_valid = self._is_whole and self._lease.valid
            self._held.close()
        return self._is_valid

    def _run(self) -> None:
        try:
            for layer in range(self._layers):
                self._copy(layer)
                self._progress.copied(range(layer, layer + 1))
            self._is_whole = True
        except Exception:  # a lease whose memory is gone, or a bug here: the model computes all again
            self._is_whole = False
        self._progress.end()
