"""Copies of payloads in host memory by compiled code: one pass over the bytes for a copy and its hash, and stores past
the caches where a payload is large. A copy past the caches moves two bytes for each byte,
an ordinary one three, and a hash after it a fourth.

The module gives the functions of `host_copies.cpp`, also to check and judge many records, and those for many keys
(`key_tables.cpp`) and rows (`row_queues.cpp`). Where there is no compiler or another processor, and until the code is
compiled, it gives None, and callers use `ctypes.memmove`, numpy and `xxhash`, with equal results.
"""

from __future__ import annotations

import ctypes as ct
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_cuda.native_library import NativeLibrary, has_avx2, is_x86
from kvstore_cuda.side_thread import together

Addresses = npt.NDArray[np.int64]
NATIVE_VARIABLE = "KVSTORED_NATIVE_COPIES"  # 0: none
HASHED_MIN_BYTES = 241  # the compiled hash is for more bytes than xxh3 has short forms for
PAST_CACHES_BYTES = 128 * 1024  # what is shorter is copied as quickly by anyone
_NAME, _FOLDER = "host-copies", Path(__file__).parent
_SOURCES = "host_copies.cpp", "key_tables.cpp", "row_queues.cpp"


def ship() -> None:
    """Compile the library beside its source, for machines without a compiler. Raises BuildError."""
    from kvstore_cuda.native_build import AVX2, Unit, ship_library

    if is_x86():
        ship_library(_NAME, _FOLDER, [Unit(source, AVX2) for source in _SOURCES])


def _made(may_compile: bool = True) -> ct.CDLL:
    from kvstore_cuda.native_build import AVX2, BuildError, Unit, build_library  # by the few processes that need it

    if not has_avx2():
        raise BuildError("this processor has no AVX2")
    units = [Unit(source, AVX2) for source in _SOURCES]
    path = str(build_library(_NAME, _FOLDER, units, may_compile=may_compile))
    found = ct.CDLL(path)
    place, size = ct.c_void_p, ct.c_size_t
    found.kv_copy.argtypes, found.kv_copy.restype = (place, place, size), None
    found.kv_copy_runs.argtypes = (place, ct.c_uint64, place, place, ct.c_uint64)
    found.kv_copy_runs.restype = None
    found.kv_copy_and_hash.argtypes, found.kv_copy_and_hash.restype = (place, place, size), ct.c_uint64
    found.kv_hash_begin.argtypes, found.kv_hash_begin.restype = (place,), None
    found.kv_hash_more.argtypes = (place, place, place, ct.c_uint64, ct.c_uint64)
    found.kv_hash_more.restype = ct.c_uint64
    found.kv_store_images.argtypes = (place, ct.c_uint64, place, place, place, place)
    found.kv_store_images.restype = None
    found.kv_load_records.argtypes = (place, ct.c_uint64, place, place, ct.c_uint64, place)
    found.kv_load_records.restype = None
    long, word = ct.c_uint64, ct.c_uint32
    found.kv_judge_records.argtypes = (place, long, long, long, long, *[place] * 6, long, place)
    found.kv_judge_records.restype = ct.c_int32
    found.kv_fill_table.argtypes = (place, place, long, word, long, word, place, long, place)
    found.kv_find_keys.argtypes, found.kv_find_keys.restype = (place, long, word, word, place, place, long, place), None
    found.kv_fill_table.restype = ct.c_int64
    few = ct.PyDLL(path).kv_find_keys  # it takes some µs: it keeps the GIL
    few.argtypes, few.restype = found.kv_find_keys.argtypes, None
    vars(found).update(kv_find_few=few)
    found.kv_link_rows.argtypes, found.kv_link_rows.restype = (long, place, place, place), None
    found.kv_number_rows.argtypes, found.kv_number_rows.restype = (long, place, word, place), None
    return found


native = NativeLibrary(_NAME, NATIVE_VARIABLE, "payloads are copied", _made, logging.INFO)


def load_if_compiled() -> None:
    """Load the library now, in this thread, if it was shipped or an earlier process has compiled it."""
    native.load(partial(_made, may_compile=False))


def copy_array(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """Copy the bytes of `source` to `target`, without the GIL. Both are one-dimensional, contiguous and of equal
    length.
    """
    library = native.get() if target.nbytes >= PAST_CACHES_BYTES else None
    if library is None or source.nbytes != target.nbytes:
        np.copyto(target, source)
    else:
        library.kv_copy(address_of(target), address_of(source), target.nbytes)


def copy_runs(targets: Addresses, sources: Addresses, nbytes: int, *, shares: bool = False) -> None:
    """Copy `nbytes` bytes from each address of `sources` to the address of `targets` at the same position, without the
    GIL. Both are int64[runs]; the caller keeps the memory alive. If it `shares`, many bytes are copied by two threads
    while a second processor is idle. Raises ValueError for unequal numbers of addresses.
    """
    if len(targets) != len(sources):
        raise ValueError(f"{len(targets)} targets for {len(sources)} sources")
    library = native.get()
    if library is None:
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ct.memmove(target, source, nbytes)
        return
    targets, sources = np.ascontiguousarray(targets, np.int64), np.ascontiguousarray(sources, np.int64)
    taken, places = ct.c_uint64(), (len(targets), address_of(targets), address_of(sources), nbytes)
    copy = partial(library.kv_copy_runs, ct.byref(taken), *places)
    together(copy, len(targets) * nbytes if shares else 0)


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first byte; quicker than `array.ctypes.data`."""
    address: int = array.__array_interface__["data"][0]
    return address
