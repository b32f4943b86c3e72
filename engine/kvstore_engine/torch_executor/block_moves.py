"""Moves of engine blocks within the device: by our kernels, in merged runs, or by torch, plane by plane.

Owns no memory but what a call needs. Work is queued on torch's current stream, which the caller waits for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore_engine.kernels.base import Int32Array
from kvstore_engine.kernels.cuda import BlockMover, Launcher
from kvstore_engine.kernels.cuda.blocks import BlockRuns
from kvstore_engine.kernels.cuda.program import STREAM_OF_DEFAULT
from kvstore_engine.torch_executor.library import torch_library

_FEW_BLOCKS = 16  # thread blocks of a gather: it runs beside steps


class BlockMoves(ABC):
    """Over `tensor`, uint8 [planes, blocks, block_bytes]. Block ids are those of the pool, int32."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    @abstractmethod
    def gather(self, planes: slice, block_ids: Int32Array) -> Any:
        """These blocks of some planes as a new tensor of the device, uint8 [planes, n, block_bytes]."""

    @abstractmethod
    def scatter(self, parts: Any, planes: slice, block_ids: Int32Array) -> None:
        """Such a tensor into these blocks, no one twice."""

    @abstractmethod
    def move(self, sources: Int32Array, targets: Int32Array) -> None:
        """Block sources[i] of every plane over block targets[i]; no block is named twice."""


class TorchMoves(BlockMoves):
    """On any device."""

    def gather(self, planes: slice, block_ids: Int32Array) -> Any:
        return self._tensor[planes].index_select(1, self._ids(block_ids))

    def scatter(self, parts: Any, planes: slice, block_ids: Int32Array) -> None:
        self._tensor[planes].index_copy_(1, self._ids(block_ids), parts)

    def move(self, sources: Int32Array, targets: Int32Array) -> None:
        source_ids, target_ids = self._ids(sources), self._ids(targets)
        for plane in self._tensor:
            plane.index_copy_(0, target_ids, plane.index_select(0, source_ids))

    def _ids(self, block_ids: Int32Array) -> Any:
        return torch_library().tensor(np.asarray(block_ids, np.int64), device=self._tensor.device)


class KernelMoves(BlockMoves):
    """By csrc/blocks.cu, all planes in one launch. `stream()`: the address of torch's current stream. ValueError for
    blocks that are no multiple of 16 bytes."""

    def __init__(self, tensor: Any, launcher: Launcher, stream: Callable[[], int] = lambda: STREAM_OF_DEFAULT) -> None:
        super().__init__(tensor)
        self._mover, self._beside = BlockMover(launcher), BlockMover(launcher, blocks=_FEW_BLOCKS)
        self._stream, self._torch, self._block_bytes = stream, torch_library(), int(tensor.shape[2])
        self._addresses = np.array([plane.data_ptr() for plane in tensor], np.uint64)

    def gather(self, planes: slice, block_ids: Int32Array) -> Any:
        count = len(self._addresses[planes])
        shape = count, len(block_ids), self._block_bytes
        parts = self._torch.empty(shape, dtype=self._torch.uint8, device=self._tensor.device)
        self._to_payload(self._beside.gather, parts, planes, block_ids)
        return parts

    def scatter(self, parts: Any, planes: slice, block_ids: Int32Array) -> None:
        self._to_payload(self._mover.scatter, parts, planes, block_ids)

    def move(self, sources: Int32Array, targets: Int32Array) -> None:
        runs = BlockRuns.within(sources, targets, self._block_bytes)
        planes, _, lists, _kept = self._on_device(runs, self._addresses)
        self._mover.move(planes, runs, lists, plane_count=len(self._addresses), stream=self._stream())

    def _to_payload(self, copy: Callable[..., None], parts: Any, planes: slice, block_ids: Int32Array) -> None:
        """`parts` is one payload of the planes."""
        addresses = self._addresses[planes]
        runs = BlockRuns.of_payloads(np.asarray(block_ids, np.int32)[None], self._block_bytes)
        listed, payloads, lists, _kept = self._on_device(runs, addresses, parts.data_ptr())
        copy(listed, payloads, runs, lists, plane_count=len(addresses), stream=self._stream())

    def _on_device(self, runs: BlockRuns, planes: Any, payload: int = 0) -> tuple[int, int, tuple[int, int], Any]:
        """Where the kernel finds addresses of planes, of the payload, runs and pieces: all in one tensor, the last
        value. Its memory is used again only for work that is queued on the same stream later."""
        arrays = [
            runs.runs,
            planes,
            np.array([payload], np.uint64),
            runs.first_pieces,
        ]  # runs are read 16 bytes at a time
        flat = [np.ascontiguousarray(array).view(np.uint8).reshape(-1) for array in arrays]
        memory = self._torch.from_numpy(np.concatenate(flat)).to(self._tensor.device)
        ends = np.cumsum([0, *(part.nbytes for part in flat)])
        lists, planes_at, payload_at, pieces = (int(memory.data_ptr() + end) for end in ends[:-1])
        return planes_at, payload_at, (lists, pieces), memory
