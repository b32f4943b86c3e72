"""The ggml functions that the engine calls, with their C signatures.

Owns the list; `Library` binds exactly these, so a library that lacks one is refused at load and not in the
middle of a prompt. All belong to ggml's public C API (ggml.h, ggml-alloc.h, ggml-backend.h, ggml-cpu.h),
which has been stable across the builds that we support; `llama_*` is not used: its parameter structs drift.
"""

from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p

from kvstore_engine.ggml.structs import InitParams

_P, _I, _L, _F, _Z, _S, _B = c_void_p, c_int, c_int64, c_float, c_size_t, c_char_p, c_bool

LogCallback = CFUNCTYPE(None, c_int, c_char_p, c_void_p)

PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    # contexts and graphs
    "ggml_init": (_P, (InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_version": (_S, ()),
    "ggml_log_set": (None, (LogCallback, _P)),
    "ggml_tensor_overhead": (_Z, ()),
    "ggml_graph_overhead_custom": (_Z, (_Z, _B)),
    "ggml_new_graph_custom": (_P, (_P, _Z, _B)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_graph_n_nodes": (_I, (_P,)),
    # tensors
    "ggml_new_tensor_1d": (_P, (_P, _I, _L)),
    "ggml_new_tensor_2d": (_P, (_P, _I, _L, _L)),
    "ggml_set_name": (_P, (_P, _S)),
    "ggml_view_2d": (_P, (_P, _P, _L, _L, _Z, _Z)),
    "ggml_view_3d": (_P, (_P, _P, _L, _L, _L, _Z, _Z, _Z)),
    "ggml_set_input": (None, (_P,)),
    "ggml_set_output": (None, (_P,)),
    "ggml_get_data": (_P, (_P,)),
    "ggml_nbytes": (_Z, (_P,)),
    "ggml_row_size": (_Z, (_I, _L)),
    # types
    "ggml_type_name": (_S, (_I,)),
    "ggml_type_size": (_Z, (_I,)),
    "ggml_blck_size": (_L, (_I,)),
    "ggml_get_type_traits": (_P, (_I,)),
    "ggml_get_type_traits_cpu": (_P, (_I,)),
    # operations
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_rms_norm": (_P, (_P, _P, _F)),
    "ggml_get_rows": (_P, (_P, _P, _P)),
    "ggml_set_rows": (_P, (_P, _P, _P, _P)),
    "ggml_reshape_2d": (_P, (_P, _P, _L, _L)),
    "ggml_reshape_3d": (_P, (_P, _P, _L, _L, _L)),
    "ggml_rope_ext": (_P, (_P, _P, _P, _P, _I, _I, _I, _F, _F, _F, _F, _F, _F)),
    "ggml_swiglu": (_P, (_P, _P)),
    "ggml_swiglu_split": (_P, (_P, _P, _P)),
    "ggml_geglu_split": (_P, (_P, _P, _P)),
    "ggml_scale": (_P, (_P, _P, _F)),
    "ggml_tanh": (_P, (_P, _P)),
    "ggml_custom_4d": (_P, (_P, _I, _L, _L, _L, _L, POINTER(_P), _I, _P, _I, _P)),
    # the CPU backend, its buffers and its graph allocator
    "ggml_cpu_init": (None, ()),
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_free": (None, (_P,)),
    "ggml_backend_cpu_set_n_threads": (None, (_P, _I)),
    "ggml_backend_graph_compute": (_I, (_P, _P)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_cpu_buffer_from_ptr": (_P, (_P, _Z)),
    "ggml_backend_buft_alloc_buffer": (_P, (_P, _Z)),
    "ggml_backend_buft_get_alloc_size": (_Z, (_P, _P)),
    "ggml_backend_buft_name": (_S, (_P,)),
    "ggml_backend_buffer_get_base": (_P, (_P,)),
    "ggml_backend_buffer_set_usage": (None, (_P, _I)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_tensor_alloc": (_I, (_P, _P, _P)),
    "ggml_backend_tensor_set": (None, (_P, _P, _Z, _Z)),
    "ggml_gallocr_new": (_P, (_P,)),
    "ggml_gallocr_reserve": (_B, (_P, _P)),
    "ggml_gallocr_alloc_graph": (_B, (_P, _P)),
    "ggml_gallocr_get_buffer_size": (_Z, (_P, _I)),
    "ggml_gallocr_free": (None, (_P,)),
    "ggml_backend_cpu_reg": (_P, ()),
    "ggml_backend_reg_get_proc_address": (_P, (_P, _S)),
    "ggml_backend_reg_dev_get": (_P, (_P, _Z)),
}
