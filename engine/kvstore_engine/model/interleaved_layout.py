"""Matrices with eight rows interleaved, so that a vector's lanes belong to as many columns of a product.

The module owns two layouts. q4_0's is the one in which ggml's repacking leaves matrices on x86 (block_q4_0x8), with the
test by which it is recognised: ggml has others for other processors, and does not report which one it used. q8_0's is
the project's own, for `q8_product`.
"""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
ROWS_TOGETHER = 8
_SCALE_BYTES = 2
_Q4_BLOCK_BYTES, _CHUNK_BYTES = 18, 8
_Q8_BLOCK_BYTES, _FOURS = 34, 8
_SIGN = np.uint8(0x88)  # turns a nibble that is 8 too large into a signed one


def interleave_q4_0(rows: Bytes) -> Bytes:
    """Return the q4_0 matrix `rows`, uint8 [8 * n, row bytes], in the layout in which eight rows are interleaved, uint8
    [n, 8 * row bytes]. For each block of 32 elements come first the scales of the eight rows, then their signed
    nibbles, eight bytes of each row in turn.
    """
    blocks = rows.reshape(-1, ROWS_TOGETHER, rows.shape[1] // _Q4_BLOCK_BYTES, _Q4_BLOCK_BYTES).swapaxes(1, 2)
    groups, count = blocks.shape[:2]
    scales = blocks[..., :_SCALE_BYTES].reshape(groups, count, -1)
    nibbles = blocks[..., _SCALE_BYTES:].reshape(groups, count, ROWS_TOGETHER, -1, _CHUNK_BYTES) ^ _SIGN
    chunks = nibbles.swapaxes(2, 3).reshape(groups, count, -1)
    return np.concatenate((scales, chunks), axis=2).reshape(groups, -1)


def is_interleaved_q4_0(rows: Bytes, repacked: Bytes) -> bool:
    """Return True if `repacked`, uint8 [8 * row bytes], is what `interleave_q4_0` returns for the first eight rows of
    `rows`.
    """
    return bool(np.array_equal(interleave_q4_0(rows[:ROWS_TOGETHER])[0], repacked))


def interleave_q8_0(rows: Bytes, target: Bytes) -> None:
    """Write the q8_0 matrix `rows`, uint8 [8 * n, row bytes], to `target`, uint8 [8 * n * row bytes], in the layout in
    which eight rows are interleaved. For each block of 32 elements come first the scales of the eight rows, then their
    values, four bytes of each row in turn. Both arrays are contiguous.
    """
    row_bytes = rows.shape[1]
    groups, count = len(rows) // ROWS_TOGETHER, row_bytes // _Q8_BLOCK_BYTES
    group_bytes, tile_bytes = ROWS_TOGETHER * row_bytes, ROWS_TOGETHER * _Q8_BLOCK_BYTES
    for row in range(ROWS_TOGETHER):
        for dtype, each, begin, at in (
            ("<u2", 1, 0, _SCALE_BYTES * row),
            ("<u4", _FOURS, _SCALE_BYTES, _SCALE_BYTES * ROWS_TOGETHER + 4 * row),
        ):
            shape = (groups, count, each)
            source = np.ndarray(shape, dtype, rows, row * row_bytes + begin, (group_bytes, _Q8_BLOCK_BYTES, 4))
            turns = np.ndarray(shape, dtype, target, at, (group_bytes, tile_bytes, 4 * ROWS_TOGETHER))
            np.copyto(turns, source)
