"""Finds a ggml shared library, loads it, and checks that the layouts of its structs are the expected ones.

The module owns the search order and the self-check. It does not build or download ggml, and never calls `llama_*`.

ggml answers a wrong argument with GGML_ASSERT, which aborts the process: so callers validate shapes and types *before*
they call, and all possible checks of the library are made here, once.
"""

import ctypes as ct
import importlib.util
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvstore_engine.errors import OperationError
from kvstore_engine.ggml.structs import InitParams, Tensor, tensor_at
from kvstore_proto.version import pip_install

LIBRARY_VARIABLE = "KVENGINE_GGML"
_SPLIT_LIBRARIES = ("ggml-base", "ggml-cpu", "ggml")
_SUFFIXES = (".so", ".dylib", ".dll")
# fmt: off
_CPU_FEATURES = (
    "sse3", "ssse3", "avx", "avx_vnni", "avx2", "f16c", "fma", "bmi2", "avx512", "avx512_vbmi",
    "avx512_vnni", "avx512_bf16", "amx_int8", "neon", "arm_fma", "fp16_va", "dotprod", "matmul_int8",
    "sve", "sme", "riscv_v", "vsx", "vxe", "wasm_simd", "llamafile",
)
# fmt: on
_F32 = 0
_WARNING_LEVEL, _ERROR_LEVEL = 3, 4  # GGML_LOG_LEVEL_*; 5 continues the line before
_log = logging.getLogger("ggml")

_P, _I, _L, _F, _Z, _S, _B = ct.c_void_p, ct.c_int, ct.c_int64, ct.c_float, ct.c_size_t, ct.c_char_p, ct.c_bool
_LogCallback = ct.CFUNCTYPE(None, ct.c_int, ct.c_char_p, ct.c_void_p)
# The functions that the engine calls: `Library` binds exactly these, so a library that lacks one is refused at load and
# not in the middle of a prompt. All belong to ggml's public C API (ggml.h, ggml-alloc.h, ggml-backend.h, ggml-cpu.h),
# which has been stable across the builds that we support; `llama_*` is not used: its parameter structs drift.
_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    # contexts and graphs
    "ggml_init": (_P, (InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_version": (_S, ()),
    "ggml_log_set": (None, (_LogCallback, _P)),
    "ggml_tensor_overhead": (_Z, ()),
    "ggml_graph_overhead_custom": (_Z, (_Z, _B)),
    "ggml_new_graph_custom": (_P, (_P, _Z, _B)),
    "ggml_build_forward_expand": (None, (_P, _P)),
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
    "ggml_quantize_chunk": (_Z, (_I, _P, _P, _L, _L, _L, _P)),
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
    "ggml_custom_4d": (_P, (_P, _I, _L, _L, _L, _L, ct.POINTER(_P), _I, _P, _I, _P)),
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

# How long libgomp's threads spin at each of ggml's barriers before they sleep. Its default (300,000 loops) is fast
# alone and ruinous beside others: with two threads on two busy cores, a decode step of a 135M model took 0.2-1.5 s;
# with this, 50-85 ms. Alone on the machine this costs decode 10 to 30 %. libgomp reads it when it is loaded; a user's
# own setting stands.
_BARRIER_SPINS = "1000"


class GGMLError(OperationError):
    """An error: no usable ggml library was found. The message says what was tried and what to install."""


def _forward_log(level: int, text: bytes, _: int | None) -> None:
    """Pass ggml's messages to Python's logging: only this process's own code writes to the terminal."""
    warning = logging.ERROR if level == _ERROR_LEVEL else logging.WARNING
    severity = warning if level in (_WARNING_LEVEL, _ERROR_LEVEL) else logging.DEBUG
    _log.log(severity, "%s", text.decode(errors="replace").rstrip())


_LOG_CALLBACK = _LogCallback(_forward_log)  # ggml keeps the pointer: it must live as long as the process


class Library:
    """A loaded ggml library as an object with its functions: `library.mul_mat(context, a, b)` calls `ggml_mul_mat`."""

    def __init__(self, path: Path) -> None:
        """Load the ggml library `path`, a shared library or a directory with its parts, and check the layout of its
        structures. Raises GGMLError.
        """
        self.path = path
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort must not start gdb
        os.environ.setdefault("GOMP_SPINCOUNT", _BARRIER_SPINS)
        try:
            # Never RTLD_GLOBAL: two ggml builds in one process would resolve into each other and crash.
            self._libraries = [ct.CDLL(str(file), mode=ct.RTLD_LOCAL) for file in _members(path)]
        except OSError as error:
            raise GGMLError(f"ggml library {path} cannot be loaded: {error}") from None
        self._functions = {name.removeprefix("ggml_"): self._bind(name) for name in _PROTOTYPES}
        self.log_set(_LOG_CALLBACK, None)
        self.cpu_init()
        self._check_layout()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            function: Callable[..., Any] = self.__dict__["_functions"][name]
        except KeyError:
            raise AttributeError(f"ggml_{name} is not bound: add it to _PROTOTYPES") from None
        self.__dict__[name] = function  # later look-ups skip this method
        return function

    def _symbol(self, name: str) -> Any:
        return next((getattr(library, name) for library in self._libraries if hasattr(library, name)), None)

    def _bind(self, name: str) -> Callable[..., Any]:
        function = self._symbol(name)
        if function is None:
            raise GGMLError(f"ggml library {self.path} has no {name}: too old, or not a ggml with a CPU backend")
        function.restype, function.argtypes = _PROTOTYPES[name]
        bound: Callable[..., Any] = function
        return bound

    def _check_layout(self) -> None:
        """Compare `Tensor` with a tensor that ggml makes: sizes, and every field that the engine or its kernels
        read.
        """
        header = self.tensor_overhead() - ct.sizeof(Tensor)
        if header not in (16, 32, 48):  # struct ggml_object in front of each tensor
            raise GGMLError(f"{self.path}: struct ggml_tensor has an unknown size; this ggml is not supported")
        context = self.init(InitParams(1 << 16, None, False))
        left, right = (self.new_tensor_2d(context, _F32, 3, 5) for _ in range(2))
        self.set_name(left, b"probe")
        result = self.add(context, left, right)
        probe, added = tensor_at(left), tensor_at(result)
        seen = (probe.type, list(probe.ne), list(probe.nb), probe.name, probe.data, list(added.src)[:3])
        wanted = (_F32, [3, 5, 1, 1], [4, 12, 60, 60], b"probe", self.get_data(left), [left, right, None])
        self.free(context)
        if seen != wanted:
            raise GGMLError(f"{self.path}: struct ggml_tensor is laid out otherwise; this ggml is not supported")

    def extra_buffer_types(self) -> dict[str, int]:
        """Return the addresses of the CPU backend's buffer types that repack weights, by name, in the order in which
        llama.cpp tries them.
        """
        registry = self.backend_cpu_reg()
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return {}
        list_types = ct.CFUNCTYPE(ct.POINTER(ct.c_void_p), ct.c_void_p)(address)
        array = list_types(self.backend_reg_dev_get(registry, 0))
        found: dict[str, int] = {}
        index = 0
        while array and (pointer := array[index]):
            found[self.backend_buft_name(pointer).decode()] = pointer
            index += 1
        return found

    def describe(self) -> dict[str, str]:
        """Return facts about the library by name: its path, its version, the CPU features that it was built with, and
        its buffer types that repack weights.
        """
        features = [f for f in _CPU_FEATURES if (has := self._symbol(f"ggml_cpu_has_{f}")) is not None and has()]
        return {
            "path": str(self.path),
            "version": self.version().decode(),
            "cpu_features": " ".join(features),
            "repacking": " ".join(self.extra_buffer_types()),
        }


def find_library() -> Path:
    """Return the path of the ggml library to load: the one that $KVENGINE_GGML names, otherwise the one in the wheel
    `xllamacpp`, otherwise the one in the wheel `ggml-python`. Raises GGMLError if none is found.
    """
    if named := os.environ.get(LIBRARY_VARIABLE):
        path = Path(named)
        if not path.exists():
            raise GGMLError(f"{LIBRARY_VARIABLE}={named} does not exist; name a ggml .so or its directory")
        return path
    # Both packages are located and not imported: importing them would load a second copy of ggml.
    if (package := _package_folder("xllamacpp")) and (extension := _shared_library(package, "xllamacpp")):
        return extension
    if (package := _package_folder("ggml")) and _shared_library(package / "lib", "libggml"):
        return package / "lib"
    raise GGMLError(
        f"no ggml library found: {pip_install('engine')}, or set {LIBRARY_VARIABLE} to a ggml .so or its directory"
    )


@cache
def load_library(path: Path | None = None) -> Library:
    """Return the ggml library in `path`, or with None the one that `find_library` finds. A process loads each library
    once. Raises GGMLError.
    """
    return Library(path or find_library())


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _shared_library(folder: Path, stem: str) -> Path | None:
    return next((f for suffix in _SUFFIXES for f in sorted(folder.glob(f"{stem}*{suffix}"))), None)


def _members(path: Path) -> list[Path]:
    """Return the files to load for `path`: itself, or a split build's libraries in order of dependence."""
    if path.is_file():
        return [path]
    named = (path / f"lib{stem}{suffix}" for stem in _SPLIT_LIBRARIES for suffix in _SUFFIXES)
    files = [file for file in named if file.exists()]
    if not files:
        raise GGMLError(f"{path} holds no libggml*.so")
    return files
