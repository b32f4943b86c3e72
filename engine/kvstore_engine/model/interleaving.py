"""The layout in which ggml's repacking leaves q4_0 matrices on x86: eight rows of the matrix interleaved.

Owns the layout (block_q4_0x8), and the test by which it is recognised: ggml has others for other processors, and
does not say which it took.
"""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
ROWS_TOGETHER = 8
_BLOCK_BYTES, _SCALE_BYTES, _CHUNK_BYTES = 18, 2, 8
_SIGN = np.uint8(0x88)  # makes of a nibble that is 8 too large a signed one


def interleave(rows: Bytes) -> Bytes:
    """q4_0 rows, uint8 [8 * n, row bytes], as uint8 [n, 8 * row bytes].

    Of each block of 32 elements first the scales of eight rows, then their nibbles in turns of eight bytes, signed.
    """
    blocks = rows.reshape(-1, ROWS_TOGETHER, rows.shape[1] // _BLOCK_BYTES, _BLOCK_BYTES).swapaxes(1, 2)
    groups, count = blocks.shape[:2]
    scales = blocks[..., :_SCALE_BYTES].reshape(groups, count, -1)
    nibbles = blocks[..., _SCALE_BYTES:].reshape(groups, count, ROWS_TOGETHER, -1, _CHUNK_BYTES) ^ _SIGN
    chunks = nibbles.swapaxes(2, 3).reshape(groups, count, -1)
    return np.concatenate((scales, chunks), axis=2).reshape(groups, -1)


def is_interleaved(rows: Bytes, repacked: Bytes) -> bool:
    """Whether `repacked`, uint8 [8 * row bytes], is what `interleave` makes of the first eight of `rows`."""
    return bool(np.array_equal(interleave(rows[:ROWS_TOGETHER])[0], repacked))
