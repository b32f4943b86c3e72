"""A pool's planes as a torch tensor, and the copies between it and host memory.

Owns the tensor and the staging memory. Copies to and from a GPU pass through pinned memory, in pieces in the order of
the planes, on a stream of each direction: they run beside a step, and have ended when a method returns. Within the
device, blocks are moved by our kernels where there is a launcher for them (`block_moves`). Gathers are called from the
storing thread too, so each direction has its lock. What moves blocks without this detour: `device_copies`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore_engine.devices import DeviceName
from kvstore_engine.errors import UsageError
from kvstore_engine.kernels.base import Bytes, Int32Array
from kvstore_engine.kernels.cuda import Launcher
from kvstore_engine.planes import PoolPlanes
from kvstore_engine.torch_executor.block_moves import BlockMoves, KernelMoves, TorchMoves
from kvstore_engine.torch_executor.library import current_stream, free_bytes, torch_library

Memory = Callable[[tuple[int, ...]], Any]
"""A new uint8 tensor of a shape, on the device."""
_STAGE_BYTES = 16 << 20


class TorchPlanes(PoolPlanes):
    """`tensor`: uint8 [planes, blocks, block_bytes] on `device`; on the processor `array` is the same memory."""

    def __init__(
        self, count: int, blocks: int, block_bytes: int, *, device: DeviceName,
        launcher: Launcher | None = None, memory: Memory | None = None,
    ) -> None:  # fmt: skip
        """`launcher`: of our kernels. `memory`: provides the tensor, torch does by default. UsageError if the planes do
        not fit the device's memory."""
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
        """What is queued within has run at the end."""
        with self._lock, self._torch.inference_mode():
            if self._stream is None:
                yield
                return
            with self._torch.cuda.stream(self._stream):
                yield
                self._stream.synchronize()

    def stage(self, shape: tuple[int, ...]) -> Any:
        """Host memory, uint8 of `shape`, that no copy reads any more."""
        self._turn = 1 - self._turn
        if self._leaving[self._turn] is not None:
            self._leaving[self._turn].synchronize()
        return self._stages[self._turn][: int(np.prod(shape))].view(shape)

    def staged(self) -> None:
        """The copy out of the last stage is queued."""
        if self._stream is not None:
            self._leaving[self._turn] = self._stream.record_event()

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def pieces(planes: int, blocks: int, block_bytes: int, *, limit: int) -> Iterator[tuple[slice, slice]]:
    """Cut [planes, blocks] into pieces of at most `limit` bytes, plane after plane; a block is never cut."""
    together = max(1, limit // max(1, blocks * block_bytes))
    width = blocks if blocks * block_bytes <= limit else max(1, limit // block_bytes)
    for plane in range(0, planes, together):
        for block in range(0, blocks, width):
            yield slice(plane, plane + together), slice(block, block + width)
