"""The memory for the bounds of K in each block, beside the planes of a pool.

The module owns its layout, and the rule that keeps it right: whoever writes to a block forgets its bounds. The kernel
computes them again when it next needs them (page_choice.cpp).
"""

import mmap
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_ALIGNMENT_BYTES = 64
_VALUE_BYTES = 2
Memory = mmap.mmap | memoryview


class PageBounds:
    """The least and the greatest key of each channel, as bfloat16, for `layers` layers of each of `blocks` pool blocks,
    and flags that say whether they are known. Pass `beside(memory)` to the pool in place of its `memory`.
    """

    def __init__(self, layers: int, blocks: int, kv_heads: int, head_dim: int) -> None:
        self._layers, self._kv_heads = layers, kv_heads
        self._values_shape = layers, blocks, kv_heads, 2, head_dim
        self._known_shape = blocks, layers, kv_heads

    @staticmethod
    def block_bytes(layers: int, kv_heads: int, head_dim: int) -> int:
        """Return the bytes that these bounds add to a pool for each of its blocks."""
        return layers * kv_heads * (2 * head_dim * _VALUE_BYTES + 1)

    def beside(self, memory: Callable[[int], Memory]) -> Callable[[int], memoryview]:
        """Return a function that allocates the memory of a pool by `memory`, with the room of these bounds behind."""

        def allocate(size_bytes: int) -> memoryview:
            first = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            values, known = (int(np.prod(shape)) for shape in (self._values_shape, self._known_shape))
            whole = memoryview(memory(first + _VALUE_BYTES * values + known))
            self.values = np.frombuffer(whole, np.uint16, values, first).reshape(self._values_shape)
            self.known = np.frombuffer(whole, np.uint8, known, first + _VALUE_BYTES * values).reshape(self._known_shape)
            return whole[:size_bytes]

        return allocate

    def forget(self, blocks: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Note that the pool blocks `blocks` were or are about to be written to."""
        self.known[np.asarray(blocks, np.int64)] = 0

    def addresses(self, layer: int) -> tuple[int, int, int]:
        """Return for layer number `layer` of those with bounds the address of its values and of its flags, and the
        bytes from one block's flags to the next.
        """
        known = self.known.ctypes.data + layer * self._kv_heads
        return self.values[layer].ctypes.data, known, self._layers * self._kv_heads
