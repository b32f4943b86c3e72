"""The input of one forward step, and the flat arrays that the graph reads.

The module owns the checks that keep a wrong input from ggml and the kernels, where it would corrupt memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    counts = [len(piece.tokens) for piece in slices]
    total = sum(counts)
    if total > limits.max_tokens:
        raise ValueError(f"a step takes at most {limits.max_tokens} tokens, not {total}")
    # Plain lists: a decode step has few rows, for which they are quicker than arrays.
    ends = [piece.start + count for piece, count in zip(slices, counts, strict=True)]
    used = [-(-end // limits.block_tokens) for end in ends]
    tables = [piece.block_table[:blocks] for piece, blocks in zip(slices, used, strict=True)]
    if not _is_sound(slices, counts, ends, used, tables, limits):
        for piece in slices:
            _check(piece, limits)  # says what is wrong
    positions = [position for piece, end in zip(slices, ends, strict=True) for position in range(piece.start, end)]
    slots = _slots(slices, ends, tables, limits)
    window_slots = None
    if limits.window_blocks:
        windows = [_window_table(piece, blocks, limits) for piece, blocks in zip(slices, used, strict=True)]
        window_slots = _slots(slices, ends, windows, limits)
    firsts = [behind - count for behind, count in zip(accumulate(counts), counts, strict=True)]
    pages = [piece.read_pages for piece in slices]
    for read, count in zip(pages, counts, strict=True):
        if read and (count != 1 or read < LEAST_PAGES or limits.selection is None):
            raise ValueError(
                f"a slice of one token may read {LEAST_PAGES} pages or more, where the pool has page bounds"
            )
    sequences = np.array(list(zip(firsts, counts, ends, pages, strict=True)), np.int32)
    tokens = np.concatenate([piece.tokens for piece in slices]).astype(np.int32, copy=False)
    outputs = _outputs(slices, firsts, counts)
    return StepInputs(tokens, np.array(positions, np.int32), slots, outputs, sequences, window_slots)


def _slots(
    slices: Sequence[SequenceSlice], ends: Sequence[int], tables: Sequence[Int32Array], limits: StepLimits
) -> Int64Array:
    """Return the place of each row of `slices` in the pool whose blocks `tables` name. Raises ValueError if two rows
    have the same place.
    """
    size, slots = limits.block_tokens, list[int]()
    for piece, end, table in zip(slices, ends, tables, strict=True):
        first = piece.start // size
        blocks = table[first:].tolist()
        slots += [blocks[at // size - first] * size + at % size for at in range(piece.start, end)]
    if len(slices) > 1 and len(set(slots)) != len(slots):
        raise ValueError("two tokens of one step would be written to the same place in the pool")
    return np.array(slots, np.int64)


def _window_table(piece: SequenceSlice, used: int, limits: StepLimits) -> Int32Array:
    """Return the leading `used` entries of the slice's table for windowed layers. Raises ValueError."""
    table = None if piece.window_table is None else np.asarray(piece.window_table)[:used]
    if table is None or len(table) < used:
        raise ValueError("the model's windowed layers have blocks of their own: give window_table for each slice")
    if table.min() < 0 or table.max() >= limits.window_blocks:
        raise ValueError(f"block ids of windowed layers must be in 0..{limits.window_blocks - 1}")
    return table


def _outputs(slices: Sequence[SequenceSlice], firsts: Sequence[int], counts: Sequence[int]) -> Int32Array:
    rows: list[int] = []
    for piece, first, count in zip(slices, firsts, counts, strict=True):
        last = first + count
        rows += {"last": (last - 1,), "none": ()}.get(piece.outputs, range(first, last))
    return np.array(rows, np.int32)


def _is_sound(
    slices: Sequence[SequenceSlice],
    counts: Sequence[int],
    ends: Sequence[int],
    used: Sequence[int],
    tables: Sequence[Int32Array],
    limits: StepLimits,
) -> bool:
    """Return whether `_check` would find nothing in any slice, by one test of all."""
    if not all(counts) or min(piece.start for piece in slices) < 0 or max(ends) > limits.max_context:
        return False
    if any(piece.tokens.ndim != 1 for piece in slices) or [len(table) for table in tables] != used:
        return False
    tokens = [token for piece in slices for token in piece.tokens.tolist()]
    blocks = np.concatenate(tables)
    in_vocabulary = min(tokens) >= 0 and max(tokens) < limits.vocabulary
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
