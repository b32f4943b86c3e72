"""A pool's planes as a torch tensor, and the copies between it and host memory.

The module owns the tensor and the staging memory. Copies to and from a GPU pass through pinned memory, in pieces in the
order of the planes, on a stream of each direction: they run beside a step, and have ended when a method returns. Within
the device, the engine's kernels move blocks if there is a launcher for them, in merged runs. Gathers are called from
the storing thread too, so each direction has its lock. `device_copies` moves blocks without this detour.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore_engine.devices import DeviceName
from kvstore_engine.errors import UsageError
from kvstore_engine.kernels.base import Bytes, Int32Array
from kvstore_engine.kernels.cuda.blocks import BlockMover, BlockRuns
from kvstore_engine.kernels.cuda.program import STREAM_OF_DEFAULT, Launcher
from kvstore_engine.planes import PoolPlanes
from kvstore_engine.torch_executor.library import current_stream, free_bytes, torch_library

_FEW_BLOCKS = 16  # thread blocks of a gather: it runs beside steps
Memory = Callable[[tuple[int, ...]], Any]
"""A new uint8 tensor of a shape, on the device."""
_STAGE_BYTES = 16 << 20


class BlockMoves(ABC):
    """An object that copies pool blocks within a device. `tensor` is the pool's memory, uint8 [planes, blocks,
    block_bytes]; block numbers are int32.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    @abstractmethod
    def gather(self, planes: slice, block_ids: Int32Array) -> Any:
        """Copy the blocks with the numbers `block_ids` of the planes `planes` into a new tensor on the device, uint8
        [planes, n, block_bytes], and return it.
        """

    @abstractmethod
    def scatter(self, parts: Any, planes: slice, block_ids: Int32Array) -> None:
        """Copy `parts`, uint8 [planes, n, block_bytes] on the device, into the blocks with the numbers `block_ids` of
        the planes `planes`. No block may occur twice.
        """

    @abstractmethod
    def move(self, sources: Int32Array, targets: Int32Array) -> None:
        """Copy pool block sources[i] over pool block targets[i] in every plane. No block may occur twice."""


class TorchMoves(BlockMoves):
    """A copier of pool blocks by torch's own operations, plane by plane, on any device."""

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
    """A copier of pool blocks by the engine's CUDA kernel, all planes in one launch. `stream()` returns the address of
    the current stream. Raises ValueError if a block's bytes are no multiple of 16.
    """

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
        """Copy between blocks and `parts`, which is one payload of the planes."""
        addresses = self._addresses[planes]
        runs = BlockRuns.of_payloads(np.asarray(block_ids, np.int32)[None], self._block_bytes)
        listed, payloads, lists, _kept = self._on_device(runs, addresses, parts.data_ptr())
        copy(listed, payloads, runs, lists, plane_count=len(addresses), stream=self._stream())

    def _on_device(self, runs: BlockRuns, planes: Any, payload: int = 0) -> tuple[int, int, tuple[int, int], Any]:
        """Return the addresses, for the kernel, of the planes' addresses, the payload, runs and pieces: all in one
        tensor, the last value. Its memory is reused only for work that is queued on that stream later.
        """
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


class TorchPlanes(PoolPlanes):
    """The memory of a pool as a torch tensor on `device`, uint8 [planes, blocks, block_bytes]. On the processor `array`
    is a NumPy view of it.
    """

    def __init__(
        self, count: int, blocks: int, block_bytes: int, *, device: DeviceName,
        launcher: Launcher | None = None, memory: Memory | None = None,
    ) -> None:  # fmt: skip
        """Allocate the memory. With `launcher` the engine's kernels copy blocks within the device. `memory` makes the
        tensor; by default torch does. Raises UsageError if the device has too little memory.
        """
        torch = torch_library()
        needed, free = count * blocks * block_bytes, free_bytes(device)
        if needed > free:
            raise UsageError(f"the K/V pool takes {needed >> 20} MiB, and {device.name} has {free >> 20} MiB free")
        shape = count, blocks, block_bytes
        if memory is not None:
            self.tensor = memory(shape).zero_()
        else:
            self.tensor = torch.zeros(shape, dtype=torch.uint8, device=device.torch_name)
        if device.is_cuda:
            torch.cuda.current_stream(device.torch_name).synchronize()  # copies are queued on other streams
        self.array = self.tensor if device.is_cuda else self.tensor.numpy()
        self._in, self._out = (_Direction(device, max(_STAGE_BYTES, block_bytes)) for _ in range(2))
        self._moves: BlockMoves = TorchMoves(self.tensor)
        if launcher is not None:
            self._moves = KernelMoves(self.tensor, launcher, partial(current_stream, device))

    def address(self, plane: int) -> int:
        return int(self.tensor[plane].data_ptr())

    def copy_blocks(self, payloads: Sequence[Bytes], tables: Int32Array, *, into_pool: bool, threads: int) -> None:
        planes, _, block_bytes = self.tensor.shape
        for payload, table in zip(payloads, tables, strict=True):
            parts = payload.reshape(planes, len(table), block_bytes)
            if into_pool:
                self.write_part(parts, table)
            else:
                self._read(table, parts)

    def write_part(self, parts: Bytes, block_ids: Int32Array) -> None:
        with self._in.used():
            for planes, blocks in pieces(*parts.shape, limit=self._in.stage_bytes):
                staged = self._in.stage(parts[planes, blocks].shape)
                np.copyto(staged.numpy(), parts[planes, blocks])
                arrived = staged.to(self.tensor.device, non_blocking=True)
                self._moves.scatter(arrived, planes, block_ids[blocks])
                self._in.staged()

    def move_blocks(self, sources: Int32Array, targets: Int32Array) -> None:
        with self._in.used():
            self._moves.move(sources, targets)

    def _read(self, block_ids: Int32Array, parts: Bytes) -> None:
        with self._out.used():
            for planes, blocks in pieces(*parts.shape, limit=self._out.stage_bytes):
                staged = self._out.stage(parts[planes, blocks].shape)
                staged.copy_(self._moves.gather(planes, block_ids[blocks]), non_blocking=True)
                self._out.synchronize()
                parts[planes, blocks] = staged.numpy()


class _Direction:
    """One direction's stream and its two stages of `stage_bytes`, used in turns."""

    def __init__(self, device: DeviceName, stage_bytes: int) -> None:
        self.stage_bytes = stage_bytes
        self._torch, self._lock = torch_library(), threading.Lock()
        self._stream = self._torch.cuda.Stream(device.torch_name) if device.is_cuda else None
        self._stages = [
            self._torch.empty(stage_bytes, dtype=self._torch.uint8, pin_memory=device.is_cuda) for _ in range(2)
        ]
        self._leaving: list[Any] = [None, None]  # events: what was staged there has left
        self._turn = 0

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Yield the direction for use; work queued inside the block has run at its end."""
        with self._lock, self._torch.inference_mode():
            if self._stream is None:
                yield
                return
            with self._torch.cuda.stream(self._stream):
                yield
                self._stream.synchronize()

    def stage(self, shape: tuple[int, ...]) -> Any:
        """Return host memory, uint8 of `shape`, that no copy reads any more."""
        self._turn = 1 - self._turn
        if self._leaving[self._turn] is not None:
            self._leaving[self._turn].synchronize()
        return self._stages[self._turn][: int(np.prod(shape))].view(shape)

    def staged(self) -> None:
        """Note that the copy out of the last stage is queued."""
        if self._stream is not None:
            self._leaving[self._turn] = self._stream.record_event()

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def pieces(planes: int, blocks: int, block_bytes: int, *, limit: int) -> Iterator[tuple[slice, slice]]:
    """Cut an array [planes, blocks] whose entries have `block_bytes` bytes into pieces of at most `limit` bytes, and
    yield the slices of each. A block is never cut.
    """
    together = max(1, limit // max(1, blocks * block_bytes))
    width = blocks if blocks * block_bytes <= limit else max(1, limit // block_bytes)
    for plane in range(0, planes, together):
        for block in range(0, blocks, width):
            yield slice(plane, plane + together), slice(block, block + width)
