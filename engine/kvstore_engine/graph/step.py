"""The input of one forward step, and the flat arrays that the graph reads.

The module owns the checks that keep a wrong input from ggml and the kernels, where it would corrupt memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstore_engine.page_selection import LEAST_PAGES, PageSelection

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Some consecutive tokens of one sequence that a step computes. tokens: int32 [n], at least one. start: the
    position of the first; the K/V of positions 0..start-1 must be in the pool already. block_table: int32, the numbers
    of the pool blocks for positions 0, 16, 32...; it covers at least start + n tokens. outputs: the tokens whose logits
    are wanted: "none", "last" or "all"; "states": the states of all tokens instead, behind the model's last norm, in a
    step that has no other slices. window_table: int32, as `block_table` for layers that have a pool of their own;
    blocks that have left the window are 0. read_pages: the most pages of 32 tokens that the token reads in a layer
    without a window, if the slice has one token; 0: all.
    """

    tokens: Int32Array
    start: int
    block_table: Int32Array
    outputs: Literal["last", "all", "none", "states"] = "last"
    window_table: Int32Array | None = None
    read_pages: int = 0


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step as flat arrays with an entry for each row (token): token ids, positions, and `slots`, the
    place of its K and V in the pool. `outputs` are the numbers of the rows that get logits. `sequences` is int32 [s,
    4], for each sequence: first row, rows, context in tokens, the pages that are read (0: all). `window_slots` are the
    places in the pool of layers with a sliding window, if they have one.
    """

    tokens: Int32Array
    positions: Int32Array
    slots: Int64Array
    outputs: Int32Array
    sequences: Int32Array
    window_slots: Int64Array | None = None


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits that an executor was built for: the size of its vocabulary and pool, and the most tokens, sequences
    and context of a step. `selection`: the pages that a token of an answer reads;
    None: no slice may leave out pages.
    """

    vocabulary: int
    pool_blocks: int
    block_tokens: int
    max_tokens: int
    max_sequences: int
    max_context: int
    window_blocks: int = 0
    selection: PageSelection | None = None


def plan_step(slices: Sequence[SequenceSlice], limits: StepLimits) -> StepInputs:
    """Check the `slices` of a step against `limits`, and return the step's inputs as flat arrays. Raises ValueError;
    the message names the mistake.
    """
    if not 0 < len(slices) <= limits.max_sequences:
        raise ValueError(f"a step takes 1 to {limits.max_sequences} sequences, not {len(slices)}")
    counts = np.array([len(piece.tokens) for piece in slices], np.int64)
    total = int(counts.sum())
    if total > limits.max_tokens:
        raise ValueError(f"a step takes at most {limits.max_tokens} tokens, not {total}")
    starts = np.array([piece.start for piece in slices], np.int64)
    ends, size = starts + counts, limits.block_tokens
    used = -(-ends // size)
    tables = [piece.block_table[:blocks] for piece, blocks in zip(slices, used.tolist(), strict=True)]
    if not _is_sound(slices, counts, starts, ends, used, tables, limits):
        for piece in slices:
            _check(piece, limits)  # says what is wrong
    # Of all sequences at once: a decode step has many, of one token each.
    firsts = np.cumsum(counts) - counts
    positions = np.arange(total) + np.repeat(starts - firsts, counts)
    places = np.repeat(np.cumsum(used) - used, counts) + positions // size
    slots = np.concatenate(tables).astype(np.int64)[places] * size + positions % size
    window_slots = None
    if limits.window_blocks:
        windows = [_window_table(piece, blocks, limits) for piece, blocks in zip(slices, used.tolist(), strict=True)]
        window_slots = np.concatenate(windows).astype(np.int64)[places] * size + positions % size
    for each in (slots, window_slots):
        if each is not None and len(slices) > 1 and len(set(each.tolist())) != total:
            raise ValueError("two tokens of one step would be written to the same place in the pool")
    sequences = np.zeros((len(slices), 4), np.int32)
    sequences[:, 0], sequences[:, 1], sequences[:, 2] = firsts, counts, ends
    sequences[:, 3] = [piece.read_pages for piece in slices]
    if ((sequences[:, 3] != 0) & ((counts != 1) | (sequences[:, 3] < LEAST_PAGES) | (limits.selection is None))).any():
        raise ValueError(f"a slice of one token may read {LEAST_PAGES} pages or more, where the pool has page bounds")
    tokens = np.concatenate([piece.tokens for piece in slices]).astype(np.int32, copy=False)
    outputs = _outputs(slices, firsts, counts)
    return StepInputs(tokens, positions.astype(np.int32), slots, outputs, sequences, window_slots)


def _window_table(piece: SequenceSlice, used: int, limits: StepLimits) -> Int32Array:
    """Return the leading `used` entries of the slice's table for windowed layers. Raises ValueError."""
    table = None if piece.window_table is None else np.asarray(piece.window_table)[:used]
    if table is None or len(table) < used:
        raise ValueError("the model's windowed layers have blocks of their own: give window_table for each slice")
    if table.min() < 0 or table.max() >= limits.window_blocks:
        raise ValueError(f"block ids of windowed layers must be in 0..{limits.window_blocks - 1}")
    return table


def _outputs(slices: Sequence[SequenceSlice], firsts: Int64Array, counts: Int64Array) -> Int32Array:
    if all(piece.outputs == "last" for piece in slices):
        return (firsts + counts - 1).astype(np.int32)
    rows: list[int] = []
    for piece, first, last in zip(slices, firsts.tolist(), (firsts + counts).tolist(), strict=True):
        rows += {"last": [last - 1], "none": ()}.get(piece.outputs, range(first, last))
    return np.array(rows, np.int32)


def _is_sound(
    slices: Sequence[SequenceSlice],
    counts: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
    used: Int64Array,
    tables: Sequence[Int32Array],
    limits: StepLimits,
) -> bool:
    """Return whether `_check` would find nothing in any slice, by one test of all."""
    if not counts.all() or starts.min() < 0 or ends.max() > limits.max_context:
        return False
    if any(piece.tokens.ndim != 1 for piece in slices) or [len(table) for table in tables] != used.tolist():
        return False
    tokens, blocks = (np.concatenate(arrays) for arrays in ([piece.tokens for piece in slices], tables))
    in_vocabulary = tokens.min() >= 0 and tokens.max() < limits.vocabulary
    return bool(in_vocabulary and blocks.min() >= 0 and blocks.max() < limits.pool_blocks)


def _check(piece: SequenceSlice, limits: StepLimits) -> None:
    tokens, table = np.asarray(piece.tokens), np.asarray(piece.block_table)
    end = piece.start + len(tokens)
    if tokens.ndim != 1 or not len(tokens) or piece.start < 0:
        raise ValueError("a slice needs at least one token and a start of at least 0")
    if tokens.min() < 0 or tokens.max() >= limits.vocabulary:
        raise ValueError(f"token ids must be in 0..{limits.vocabulary - 1}")
    if end > limits.max_context:
        raise ValueError(f"the sequence would reach {end} tokens, the context holds {limits.max_context}")
    used = table[: -(-end // limits.block_tokens)]
    if len(used) * limits.block_tokens < end:
        raise ValueError(f"the block table holds {len(table)} blocks, too few for {end} tokens")
    if used.min() < 0 or used.max() >= limits.pool_blocks:
        raise ValueError(f"block ids must be in 0..{limits.pool_blocks - 1}")
