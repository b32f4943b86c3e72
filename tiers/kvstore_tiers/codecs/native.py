"""The compiled code of codecs, and the choice between it and NumPy's, which gives the same bytes more slowly.

The C++ sources in `csrc/` are compiled once into the user's cache directory, in a thread of their own: until they are
there, and where there is no compiler, `library` says None. A library is for the instructions of this processor, and its
name says so.
"""

from __future__ import annotations

import ctypes as ct
import logging
import os
import platform
import threading
from pathlib import Path
from typing import Any

import numpy.typing as npt

from kvstore_cuda.native_build import AVX2, AVX512, BuildError, Unit, build_library

NATIVE_VARIABLE = "KVSTORED_CODECS_NATIVE"  # 0: NumPy alone
_SOURCES = ("quantised_encode.cpp", "quantised_decode.cpp", "context_encode.cpp", "context_decode.cpp")
_HEADERS = ("context_layout.h", "context_tables.h", "numbers.h", "quantised.h")
_WANTED = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_log = logging.getLogger(__name__)


class _Loading:
    """The one attempt of this process to build and load the library."""

    def __init__(self) -> None:
        self.library: ct.CDLL | None = None
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._is_begun = False

    def begin(self) -> None:
        with self._lock:
            if self._is_begun:
                return
            self._is_begun = True
        if os.environ.get(NATIVE_VARIABLE) == "0":
            self.ended.set()
        else:
            threading.Thread(target=self._run, name="codecs-build", daemon=True).start()

    def _run(self) -> None:
        try:
            units = [Unit(source, ("-Wno-psabi", "-Wno-unused-function", *_instructions())) for source in _SOURCES]
            path = build_library("codecs", Path(__file__).with_name("csrc"), units, _HEADERS)
            self.library = _declared(ct.CDLL(str(path), mode=ct.RTLD_LOCAL))
        except (BuildError, OSError) as error:
            _log.warning("codecs run without compiled code, more slowly: %s", error)
        finally:
            self.ended.set()


_loading = _Loading()


def library() -> ct.CDLL | None:
    """Return the compiled functions; None when there are none, or none yet."""
    if not _loading.ended.is_set():
        _loading.begin()
    return _loading.library


def wait_for_library(timeout_s: float = 600.0) -> ct.CDLL | None:
    """Return the compiled functions once the attempt to build them has ended; None when there are none."""
    _loading.begin()
    _loading.ended.wait(timeout_s)
    return _loading.library


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first byte; quicker than `array.ctypes.data`."""
    address: int = array.__array_interface__["data"][0]
    return address


def _instructions() -> tuple[str, ...]:
    """Return the compiler's flags for the best instructions that this processor has and the sources know."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        found = set(next((line for line in file if line.startswith("flags")), "").split())
    if not found >= {"avx2", "fma", "f16c"}:
        return ()
    return AVX512 if found >= _WANTED else AVX2


def _declared(found: ct.CDLL) -> ct.CDLL:
    size, place = ct.c_int64, ct.c_void_p
    found.kv_quantise.restype = found.kv_dequantise.restype = size
    found.kv_quantise.argtypes = [place, size, place, size, size, size, place, size, ct.c_double, place, place]
    found.kv_dequantise.argtypes = [place, size, place, size, size, place, size]
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
