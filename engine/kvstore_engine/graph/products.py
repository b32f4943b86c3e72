"""Which products with matrices our own operations compute, and which are ggml's.

Owns the rule: those with interleaved matrices are ours.
"""

from dataclasses import dataclass

from kvstore_engine.ggml.structs import tensor_at
from kvstore_engine.gguf.tensor_types import Q4_0, Q8_0
from kvstore_engine.model import Linear


@dataclass(frozen=True, slots=True)
class ProductOperations:
    """The native callbacks for interleaved matrices, 0: there is none; and the address of their user data."""

    q4_0: int
    q8_0: int
    userdata: int

    def operation(self, linear: Linear) -> int:
        """The callback that multiplies with the weights, 0: ggml's own product does."""
        return {Q4_0: self.q4_0, Q8_0: self.q8_0}[tensor_at(linear.weight).type] if linear.interleaved else 0
