"""The compiled code of codecs, and the choice between it and NumPy's, which gives the same bytes more slowly.

The C++ sources in `csrc/` are compiled once into the user's cache directory, in a thread of their own, unless the
package brings them compiled: until they are there, and where there is no compiler, `library` says None. A library is
for the instructions of this processor, and its name says so.
"""

from __future__ import annotations

import ctypes as ct
from pathlib import Path

from kvstore_cuda.native_build import AVX2, AVX512, Unit, build_library, ship_library
from kvstore_cuda.native_library import NativeLibrary, has_avx2, is_x86, processor_flags

NATIVE_VARIABLE = "KVSTORED_CODECS_NATIVE"  # 0: NumPy alone
_SOURCES = ("quantised_encode.cpp", "quantised_decode.cpp", "context_encode.cpp", "context_decode.cpp")
_HEADERS = ("context_layout.h", "context_tables.h", "numbers.h", "quantised.h", "quantised_avx2.h")
_FOLDER = Path(__file__).with_name("csrc")
_WANTED = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


def ship() -> None:
    """Compile the codecs beside their sources for each set of instructions, for machines without a compiler. Raises
    BuildError.
    """
    for flags in ((), AVX2, AVX512) if is_x86() else ((),):
        ship_library("codecs", _FOLDER, _units(flags), _HEADERS)


def _units(flags: tuple[str, ...]) -> list[Unit]:
    return [Unit(source, ("-Wno-psabi", "-Wno-unused-function", *flags)) for source in _SOURCES]


def _made() -> ct.CDLL:
    path = build_library("codecs", _FOLDER, _units(_instructions()), _HEADERS)
    return _declared(ct.CDLL(str(path), mode=ct.RTLD_LOCAL))


_loading = NativeLibrary("codecs", NATIVE_VARIABLE, "codecs run", _made)
library, wait_for_library = _loading.get, _loading.wait


def _instructions() -> tuple[str, ...]:
    """Return the compiler's flags for the best instructions that this processor has and the sources know."""
    if not has_avx2():
        return ()
    return AVX512 if processor_flags() >= _WANTED else AVX2


def _declared(found: ct.CDLL) -> ct.CDLL:
    size, place = ct.c_int64, ct.c_void_p
    found.kv_quantise.restype = found.kv_dequantise.restype = size
    found.kv_quantise.argtypes = [place, size, place, size, size, size, place, size, ct.c_double, place, place]
    found.kv_dequantise.argtypes = [place, size, place, size, size, place, size, place, place]
    found.kv_context_encode.restype = found.kv_context_decode.restype = size
    found.kv_context_encode.argtypes = [
        size,
        place,
        size,
        place,
        size,
        size,
        place,
        size,
        place,
        place,
        place,
        place,
        size,
    ]
    found.kv_context_decode.argtypes = [size, place, size, place, size, place, place, size, place, size, place, size]
    return found
