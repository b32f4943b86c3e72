"""The products that the engine's own operations compute: products with interleaved matrices. ggml computes the
others.
"""

from dataclasses import dataclass

from kvstore_engine.ggml.structs import tensor_at
from kvstore_engine.model.weights import Linear
from kvstore_proto.ggml_types import Q4_0, Q8_0


@dataclass(frozen=True, slots=True)
class ProductOperations:
    """The addresses of the engine's native functions that multiply with interleaved q4_0 and q8_0 matrices (0: ggml's
    are used), and of the data that they get.
    """

    q4_0: int
    q8_0: int
    userdata: int

    def operation(self, linear: Linear) -> int:
        """Return the address of the function that multiplies with the matrix `linear`; 0 if ggml's own product is
        used.
        """
        return {Q4_0: self.q4_0, Q8_0: self.q8_0}[tensor_at(linear.weight).type] if linear.interleaved else 0
