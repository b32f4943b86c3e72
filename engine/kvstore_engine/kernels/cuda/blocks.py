"""Moves of engine blocks on a device: gather, scatter, moves (copies, compaction) and swaps, in merged runs.

The module owns the argument's layout (csrc/blocks.cu), and makes runs and pieces from a table of blocks. `BlockRuns`
holds them as host arrays: the caller puts them where the device can read them. It owns no memory of the device.
"""

from __future__ import annotations

import ctypes as ct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.cuda.program import STREAM_OF_DEFAULT, KernelProgram, Launcher, address_of

Int32Array = npt.NDArray[np.int32]
PIECE_BYTES = 32 << 10  # what a thread block takes at once
_PROGRAM = KernelProgram.of("blocks.cu")


class _Argument(ct.Structure):
    _fields_ = (
        ("planes", ct.c_void_p),
        ("payloads", ct.c_void_p),
        ("runs", ct.c_void_p),
        ("first_pieces", ct.c_void_p),
        ("run_count", ct.c_int64),
        ("piece_bytes", ct.c_int64),
        ("block_bytes", ct.c_int64),
        ("blocks_per_payload", ct.c_int64),
    )


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """A list of copies between cache blocks, in runs: a run copies `count` consecutive blocks to consecutive places.
    Raises ValueError unless `block_bytes` is a multiple of 16.

    runs: int32 [n, 4], for a copy between a payload (the memory of one storage block) and the pool: number of the
    payload, first block in the payload, first block in the pool, count. For a copy within the pool: 0, first source
    block, first target block, count.
    """

    runs: Int32Array
    block_bytes: int
    blocks_per_payload: int = 0

    def __post_init__(self) -> None:
        if self.block_bytes <= 0 or self.block_bytes % 16:
            raise ValueError(f"blocks of {self.block_bytes} bytes: a multiple of 16 is needed")

    @classmethod
    def of_payloads(cls, tables: Int32Array, block_bytes: int) -> BlockRuns:
        """Return the runs for copies between the pool and payloads (each the memory of one storage block). `tables` has
        the numbers of the pool blocks of each payload, int32 [payloads, blocks_per_payload].
        """
        payloads, width = tables.shape
        first = np.repeat(np.arange(payloads), width), np.tile(np.arange(width), payloads)
        starts = (tables[:, 1:] != tables[:, :-1] + 1) if width else np.zeros((payloads, 0), bool)
        is_start = np.concatenate((np.ones((payloads, min(width, 1)), bool), starts), axis=1).ravel()
        return cls(_merged(is_start, *first, tables.ravel()), block_bytes, width)

    @classmethod
    def within(cls, sources: Int32Array, targets: Int32Array, block_bytes: int) -> BlockRuns:
        """Return the runs for copying pool block sources[i] over pool block targets[i]. Raises ValueError if a block is
        named twice, or if `sources` and `targets` differ in length.
        """
        named = np.concatenate((sources, targets))
        if len(sources) != len(targets) or len(np.unique(named)) != len(named):
            raise ValueError("each block may be a source or a target once, and as many of either are needed")
        steps = (np.diff(sources) != 1) | (np.diff(targets) != 1)
        is_start = np.concatenate((np.ones(min(len(sources), 1), bool), steps))
        return cls(_merged(is_start, np.zeros(len(sources), np.int64), sources, targets), block_bytes)

    @property
    def first_pieces(self) -> Int32Array:
        """The cumulated sizes of the runs, int32 [n + 1]: entry i is the number of pieces of PIECE_BYTES bytes in all
        runs before run i, the last entry their number in all runs.
        """
        pieces = -(-self.runs[:, 3].astype(np.int64) * self.block_bytes // PIECE_BYTES)
        return np.concatenate(([0], np.cumsum(pieces))).astype(np.int32)


def _merged(is_start: npt.NDArray[np.bool_], *sides: npt.NDArray[np.signedinteger[Any]]) -> Int32Array:
    at = np.flatnonzero(is_start)
    counts = np.diff(np.append(at, len(is_start)))
    return np.stack((*(side[at] for side in sides), counts), axis=1).astype(np.int32)


class BlockMover:
    """A launcher of the CUDA kernels that copy blocks of the K/V pool. `blocks` is the number of CUDA thread blocks
    that copy at a time: with few, a step that runs meanwhile is slowed little.
    """

    def __init__(self, launcher: Launcher, *, blocks: int = 0) -> None:
        """Make a mover. `blocks`: 0 for two on each multiprocessor."""
        self._launcher = launcher
        self._blocks = blocks or 2 * launcher.multiprocessors

    def gather(self, planes: Any, payloads: Any, runs: BlockRuns, on_device: tuple[Any, Any], **options: int) -> None:
        """Queue a copy of blocks of the pool into payloads (each the memory of one storage block), as `runs` say.

        planes, payloads: arrays of uint64 addresses of the pool's planes and of the payloads. The device must be able
        to read the arrays and the memory behind the addresses: its own memory, or registered host memory. on_device:
        copies of `runs.runs` and `runs.first_pieces` in device memory. options: `plane_count`, the number of planes,
        and `stream`.
        """
        self._launch("kv_gather_blocks", planes, payloads, runs, on_device, **options)

    def scatter(self, planes: Any, payloads: Any, runs: BlockRuns, on_device: tuple[Any, Any], **options: int) -> None:
        """Queue copies of payloads (each the memory of one storage block) into blocks of the pool, as `runs` say. See
        `gather` for the parameters.
        """
        self._launch("kv_scatter_blocks", planes, payloads, runs, on_device, **options)

    def move(self, planes: Any, runs: BlockRuns, on_device: tuple[Any, Any], **options: int) -> None:
        """Queue copies of blocks to other blocks of the same plane, in every plane, as `runs` say. See `gather` for the
        parameters.
        """
        self._launch("kv_move_blocks", planes, 0, runs, on_device, **options)

    def swap(self, planes: Any, runs: BlockRuns, on_device: tuple[Any, Any], **options: int) -> None:
        """Queue exchanges in every plane: each source block of `runs` gets the content of its target block, and the
        reverse. See `gather` for the parameters.
        """
        self._launch("kv_swap_blocks", planes, 0, runs, on_device, **options)

    def _launch(
        self, kernel: str, planes: Any, payloads: Any, runs: BlockRuns, on_device: tuple[Any, Any], *,
        plane_count: int, stream: int = STREAM_OF_DEFAULT,
    ) -> None:  # fmt: skip
        pieces = int(runs.first_pieces[-1])
        if pieces == 0 or plane_count == 0:
            return
        argument = _Argument(
            planes=address_of(planes),
            payloads=address_of(payloads),
            runs=address_of(on_device[0]),
            first_pieces=address_of(on_device[1]),
            run_count=len(runs.runs),
            piece_bytes=PIECE_BYTES,
            block_bytes=runs.block_bytes,
            blocks_per_payload=runs.blocks_per_payload,
        )
        grid = (min(pieces, max(1, self._blocks // plane_count)), plane_count, 1)
        self._launcher.launch(_PROGRAM, kernel, grid, argument, stream=stream)
