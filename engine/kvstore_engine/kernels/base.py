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
    """The engine's own functions for the processor: attention, products with interleaved matrices, and copies of pool
    blocks.
    """

    name: str

    @property
    @abstractmethod
    def attention_address(self) -> int:
        """The address of the native function that computes attention. It is a `ggml_custom_op_t`; its user data is the
        address of a `layout.Layer`.
        """

    @property
    def page_choice_address(self) -> int:
        """The address of a native function (`ggml_custom_op_t`) that runs before attention, with the address of the
        same `layout.Layer` as its user data, and chooses the pages that rows which may not read all of them read; 0 if
        attention always reads all.
        """
        return 0

    @property
    def q4_product_address(self) -> int:
        """The address of a native function (`ggml_custom_op_t`) that multiplies rows with an interleaved q4_0 matrix,
        or 0 if ggml's own function is to be used. Its user data is the address of a `layout.Product`. It MUST give the
        same bits as ggml.
        """
        return 0

    @property
    def q8_product_address(self) -> int:
        """The address of a native function (`ggml_custom_op_t`) that multiplies rows with an interleaved q8_0 matrix,
        or 0 if such matrices should not be interleaved. A row's result MUST NOT depend on the other rows or the number
        of threads.
        """
        return 0

    @abstractmethod
    def copy_blocks(
        self, planes: Bytes, payloads: Sequence[Bytes], tables: Int32Array, *, into_pool: bool, threads: int = 1
    ) -> None:
        """Copy storage blocks (the units that kvstored keeps) into the K/V pool if `into_pool`, otherwise out of it.

        planes: the pool, uint8 [planes, blocks, block_bytes]. payloads: one array for each storage block, uint8 [planes
        * blocks_per_payload * block_bytes]. tables: for each storage block the numbers of its pool blocks, int32
        [storage blocks, blocks_per_payload]. `threads` threads do it.
        """

    @abstractmethod
    def move_blocks(self, planes: Bytes, sources: Int32Array, targets: Int32Array, *, threads: int = 1) -> None:
        """Copy pool block sources[i] over pool block targets[i] in every plane of `planes`, uint8 [planes, blocks,
        block_bytes], with `threads` threads. No block may be both a source and a target.
        """
