"""The few ggml structs whose layout this code uses through ctypes.

The module owns their field order. `Library` proves it against the loaded library before anything relies on it
(`self_check`). Everything else in ggml is an opaque pointer here.
"""

import ctypes as ct

MAX_DIMENSIONS = 4
MAX_SOURCES = 10


class Tensor(ct.Structure):
    """The C structure `ggml_tensor`, unchanged from ggml 0.15 to 0.26."""

    _fields_ = (
        ("type", ct.c_int),
        ("buffer", ct.c_void_p),
        ("ne", ct.c_int64 * MAX_DIMENSIONS),
        ("nb", ct.c_size_t * MAX_DIMENSIONS),
        ("op", ct.c_int),
        ("op_params", ct.c_int32 * 16),
        ("flags", ct.c_int32),
        ("src", ct.c_void_p * MAX_SOURCES),
        ("view_src", ct.c_void_p),
        ("view_offs", ct.c_size_t),
        ("data", ct.c_void_p),
        ("name", ct.c_char * 64),
        ("extra", ct.c_void_p),
        ("padding", ct.c_char * 8),
    )


class InitParams(ct.Structure):
    """The C structure `ggml_init_params`, the argument of `ggml_init`."""

    _fields_ = (("mem_size", ct.c_size_t), ("mem_buffer", ct.c_void_p), ("no_alloc", ct.c_bool))


class CpuTypeTraits(ct.Structure):
    """The C structure `ggml_type_traits_cpu`: the functions with which the CPU multiplies matrices of one tensor type.
    A pointer is null if the CPU cannot.
    """

    _fields_ = (
        ("from_float", ct.c_void_p),
        ("vec_dot", ct.c_void_p),
        ("vec_dot_type", ct.c_int),
        ("rows_at_once", ct.c_int64),
    )


DATA_OFFSET_BYTES: int = Tensor.data.offset
SOURCES_OFFSET_BYTES: int = Tensor.src.offset
EXTENTS_OFFSET_BYTES: int = Tensor.ne.offset


def tensor_at(address: int) -> Tensor:
    """Return the C structure of the ggml tensor at the memory address `address`. It is ggml's own memory, so writing a
    field changes the tensor.
    """
    return Tensor.from_address(address)
