"""Values of ggml's tensor types as floats and back, by ggml's own functions.

The module owns the one struct through which they are found (`struct ggml_type_traits`), and proves its layout for each
type.
"""

import ctypes as ct

import numpy as np
import numpy.typing as npt

from kvstore_engine.ggml.library import GGMLError, Library
from kvstore_proto.ggml_types import F32, TENSOR_TYPES

_TO_FLOAT = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_void_p, ct.c_int64)


class _TypeTraits(ct.Structure):
    _fields_ = (
        ("type_name", ct.c_char_p),
        ("block_elements", ct.c_int64),
        ("interleaved_elements", ct.c_int64),
        ("block_bytes", ct.c_size_t),
        ("is_quantised", ct.c_bool),
        ("to_float", ct.c_void_p),
        ("from_float", ct.c_void_p),
    )


def dequantised(library: Library, ggml_type: int, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the numbers that `raw` represents, as float32 1-d. `raw` is contiguous uint8: whole blocks of ggml's
    tensor type number `ggml_type`. Raises GGMLError for a type that ggml cannot convert to floats.
    """
    if ggml_type == F32:
        return raw.view(np.float32)
    kind = TENSOR_TYPES[ggml_type]
    traits = _TypeTraits.from_address(library.get_type_traits(ggml_type))
    if (traits.block_elements, traits.block_bytes) != (kind.block_elements, kind.block_bytes) or not traits.to_float:
        raise GGMLError(f"ggml {library.version().decode()} cannot turn {kind.name} into floats")
    values = np.empty(raw.size // kind.block_bytes * kind.block_elements, np.float32)
    _TO_FLOAT(traits.to_float)(raw.ctypes.data, values.ctypes.data, values.size)
    return values


def quantised(library: Library, ggml_type: int, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return `values`, float32 1-d, converted to blocks of ggml's tensor type number `ggml_type`, as uint8. The type
    must be one that ggml quantises without an importance matrix.
    """
    kind, values = TENSOR_TYPES[ggml_type], np.ascontiguousarray(values, np.float32)
    blocks = np.empty(kind.row_bytes(values.size), np.uint8)
    library.quantize_chunk(ggml_type, values.ctypes.data, blocks.ctypes.data, 0, 1, values.size, None)
    return blocks
