"""The types in which K and V may be stored, and the conversion of stored rows to floats: the slow twin of elements.h.

The module owns the list of types that the kernels read. ggml writes them (`ggml_set_rows`), so the formats are ggml's.
"""

import numpy as np
import numpy.typing as npt

from kvstore_proto.ggml_types import BF16, F16, F32, Q4_0, Q8_0, TENSOR_TYPES

KV_TYPES = {"f16": F16, "bf16": BF16, "f32": F32, "q8_0": Q8_0, "q4_0": Q4_0}


def widen_rows(rows: npt.NDArray[np.uint8], kv_type: int) -> npt.NDArray[np.float32]:
    """Return stored K or V as floats: float32 [n, elements]. `rows` is uint8 [n, bytes of a row], stored in ggml's type
    number `kv_type`.
    """
    rows = np.ascontiguousarray(rows)
    if kv_type == F32:
        return rows.view(np.float32)
    if kv_type == F16:
        return rows.view(np.float16).astype(np.float32)
    if kv_type == BF16:
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = rows.reshape(len(rows), -1, TENSOR_TYPES[kv_type].block_bytes)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float32)
    packed = blocks[:, :, 2:]
    if kv_type == Q8_0:
        values = packed.view(np.int8).astype(np.float32)
    else:
        values = np.concatenate((packed & 15, packed >> 4), axis=2).astype(np.float32) - 8
    scaled: npt.NDArray[np.float32] = values * scales
    return scaled.reshape(len(rows), -1)
