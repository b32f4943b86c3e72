"""Which products with matrices our own operations compute, and which are ggml's.

Owns the rule. Either gives the same bits, so it is about speed alone.
"""

from dataclasses import dataclass

from kvstore_engine.ggml.structs import tensor_at
from kvstore_engine.gguf.tensor_types import F32, Q8_0
from kvstore_engine.model import Linear

_F32_BYTES = 4
_MOST_Q8_ROWS = 128


@dataclass(frozen=True, slots=True)
class ProductOperations:
    """The native callbacks, 0: there is none; and the address of their user data."""

    interleaved_q4_0: int
    q8_0: int
    userdata: int

    def faster(self, linear: Linear, rows: int) -> int:
        """The callback that multiplies the tensor `rows` with the weights faster than ggml, 0: ggml's own is faster."""
        factor, matrix = tensor_at(rows), tensor_at(linear.weight)
        contiguous = (factor.type, *factor.nb[:2]) == (F32, _F32_BYTES, _F32_BYTES * factor.ne[0])
        if not contiguous or factor.ne[2] != 1:
            return 0
        if linear.interleaved:
            return self.interleaved_q4_0
        few = factor.ne[1] <= _MOST_Q8_ROWS
        return self.q8_0 if few and matrix.type == Q8_0 and not matrix.extra else 0
