"""Cuts a step into pieces that follow one another through the stages. Pure.

Invariant: the pieces compute the bits of the step. ggml multiplies the last rows of a product, and a single row, with
other kernels (`graph.plan`); so whole storage blocks are taken from the head of each prompt, and everything whose
logits are wanted remains in one piece, which has the step's last rows and as many outputs.
"""

from collections.abc import Sequence

from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.plan import BLOCK_TOKENS


def micro_batches(slices: Sequence[SequenceSlice], rows: int = BLOCK_TOKENS) -> list[list[SequenceSlice]]:
    """Pieces of `rows` rows, each of one sequence, and last what remains: of each slice `rows` to 2 * `rows` - 1 rows,
    or all of a shorter one and of one whose logits are all wanted. No piece but the last has outputs.
    """
    pieces, rest = [], []
    for each in slices:
        end = 0 if each.outputs == "all" else max(0, len(each.tokens) // rows - 1) * rows
        for first in range(0, end, rows):
            tokens = each.tokens[first : first + rows]
            pieces.append([SequenceSlice(tokens, each.start + first, each.block_table, "none")])
        rest.append(SequenceSlice(each.tokens[end:], each.start + end, each.block_table, each.outputs))
    return [*pieces, rest]
