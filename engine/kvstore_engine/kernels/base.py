"""The contract of a kernel set: paged attention and products as ggml custom operations, and the copies of blocks.

The caller guarantees that step and layer records describe live memory, that block ids are inside the pool and that
payloads have the right size. The implementation MUST compute each row independently of the other rows of the step: a
token at a position over a context gives equal bits in any batch. It MUST NOT let keys or values past a row's own
position, which may be uninitialised, change that row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]


class Kernels(ABC):
    """One implementation of the engine's own CPU kernels."""

    name: str

    @property
    @abstractmethod
    def attention_address(self) -> int:
        """The address of a `ggml_custom_op_t`; its user data is a `layout.Layer`."""

    @property
    def q4_product_address(self) -> int:
        """The address of a `ggml_custom_op_t` that multiplies rows with an interleaved q4_0 matrix, or 0: use ggml's.

        Its sources are the rows and the matrix, its user data is a `layout.Product`. It MUST give ggml's bits.
        """
        return 0

    @property
    def q8_product_address(self) -> int:
        """The address of a `ggml_custom_op_t` that multiplies rows with an interleaved q8_0 matrix
        (`interleaving.interleave_q8_0`), with an order of sums of its own.

        The sums MUST NOT depend on the numbers of rows or threads. 0: do not interleave q8_0 matrices.
        """
        return 0

    @abstractmethod
    def copy_blocks(
        self, planes: Bytes, payloads: Sequence[Bytes], tables: Int32Array, *, into_pool: bool, threads: int = 1
    ) -> None:
        """Copy storage blocks into the pool, or out of it.

        planes: uint8 [planes, blocks, block_bytes], the pool. payloads: one uint8 [planes * blocks_per_payload *
        block_bytes] for each storage block. tables: int32 [storage blocks, blocks_per_payload], engine block ids.
        """

    @abstractmethod
    def move_blocks(self, planes: Bytes, sources: Int32Array, targets: Int32Array, *, threads: int = 1) -> None:
        """Copy block sources[i] of every plane over block targets[i]. No block is both a source and a target."""
