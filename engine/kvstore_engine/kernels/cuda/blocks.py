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
    """Runs of blocks that are consecutive on both sides. Block sizes are multiples of 16 bytes; ValueError for others.

    runs: int32 [n, 4]: payload (0 within the pool), first block there (or source), first block in the pool (or target),
    count.
    """

    runs: Int32Array
    block_bytes: int
    blocks_per_payload: int = 0

    def __post_init__(self) -> None:
        if self.block_bytes <= 0 or self.block_bytes % 16:
            raise ValueError(f"blocks of {self.block_bytes} bytes: a multiple of 16 is needed")

    @classmethod
    def of_payloads(cls, tables: Int32Array, block_bytes: int) -> BlockRuns:
        """Return the runs for copies between the pool and payloads. `tables` has the pool blocks of each payload, int32
        [payloads, blocks_per_payload].
        """
        payloads, width = tables.shape
        first = np.repeat(np.arange(payloads), width), np.tile(np.arange(width), payloads)
        starts = (tables[:, 1:] != tables[:, :-1] + 1) if width else np.zeros((payloads, 0), bool)
        is_start = np.concatenate((np.ones((payloads, min(width, 1)), bool), starts), axis=1).ravel()
        return cls(_merged(is_start, *first, tables.ravel()), block_bytes, width)

    @classmethod
    def within(cls, sources: Int32Array, targets: Int32Array, block_bytes: int) -> BlockRuns:
        """Return the runs for copying block sources[i] over block targets[i]. Raises ValueError if a block is named
        twice.
        """
        named = np.concatenate((sources, targets))
        if len(sources) != len(targets) or len(np.unique(named)) != len(named):
            raise ValueError("each block may be a source or a target once, and as many of either are needed")
        steps = (np.diff(sources) != 1) | (np.diff(targets) != 1)
        is_start = np.concatenate((np.ones(min(len(sources), 1), bool), steps))
        return cls(_merged(is_start, np.zeros(len(sources), np.int64), sources, targets), block_bytes)

    @property
    def first_pieces(self) -> Int32Array:
        """The number of pieces of PIECE_BYTES bytes that precede each run, and in all, int32 [n + 1]."""
        pieces = -(-self.runs[:, 3].astype(np.int64) * self.block_bytes // PIECE_BYTES)
        return np.concatenate(([0], np.cumsum(pieces))).astype(np.int32)


def _merged(is_start: npt.NDArray[np.bool_], *sides: npt.NDArray[np.signedinteger[Any]]) -> Int32Array:
    at = np.flatnonzero(is_start)
    counts = np.diff(np.append(at, len(is_start)))
    return np.stack((*(side[at] for side in sides), counts), axis=1).astype(np.int32)


class BlockMover:
    """A launcher of CUDA kernels that copy pool blocks. `blocks` is the number of thread blocks; few leave the device
    to a step that runs meanwhile.
    """

    def __init__(self, launcher: Launcher, *, blocks: int = 0) -> None:
        """Make a mover. `blocks`: 0 for two on each multiprocessor."""
        self._launcher = launcher
        self._blocks = blocks or 2 * launcher.multiprocessors

    def gather(self, planes: Any, payloads: Any, runs: BlockRuns, on_device: tuple[Any, Any], **options: int) -> None:
        """Queue a copy of blocks of the pool into payloads.

        planes, payloads: uint64 arrays of addresses that the device can read (its own memory, or registered host
        memory); the arrays of addresses themselves must be readable too. on_device: `runs.runs` and `runs.first_pieces`
        there. options: `plane_count`, and `stream`.
        """
        self._launch("kv_gather_blocks", planes, payloads, runs, on_device, **options)

    def scatter(self, planes: Any, payloads: Any, runs: BlockRuns, on_device: tuple[Any, Any], **options: int) -> None:
        """Queue copies of payloads into blocks of the pool. See `gather` for the parameters."""
        self._launch("kv_scatter_blocks", planes, payloads, runs, on_device, **options)

    def move(self, planes: Any, runs: BlockRuns, on_device: tuple[Any, Any], **options: int) -> None:
        """Queue copies of blocks to other blocks of the same plane, in every plane, as `runs` say. See `gather` for the
        parameters.
        """
        self._launch("kv_move_blocks", planes, 0, runs, on_device, **options)

    def swap(self, planes: Any, runs: BlockRuns, on_device: tuple[Any, Any], **options: int) -> None:
        """Queue exchanges of the contents of source and target blocks in every plane, as `runs` say. See `gather` for
        the parameters.
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
