"""The device on the host finds what hardware would punish: each kernel here is wrong in one way, or right."""

from __future__ import annotations

import ctypes as ct
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cuda_shim.build import HERE, SANITIZE, compiler
from tests.tidy.tree import ROOT

KERNELS = """
struct Call { const float* from; float* to; long long flag; };

// Reverses a block's values through shared memory; flag: with the barrier that this needs.
extern "C" void reverse(const Call call) {
    KV_SHARED(shared);
    float* const values = reinterpret_cast<float*>(shared);
    values[threadIdx.x] = call.from[threadIdx.x];
    if (call.flag) __syncthreads();
    call.to[threadIdx.x] = values[127 - threadIdx.x];
}

// Copies through shared memory; flag: waits before it reads, else only in the end.
extern "C" void staged(const Call call) {
    KV_SHARED(shared);
    if (threadIdx.x % 4 == 0) copy_async<16>(shared + threadIdx.x * 4, call.from + threadIdx.x, true);
    if (call.flag) wait_copies();
    __syncthreads();
    call.to[threadIdx.x] = reinterpret_cast<float*>(shared)[threadIdx.x];
    wait_copies();
}

// flag: all threads reach the barrier.
extern "C" void divergent(const Call call) {
    if (call.flag || threadIdx.x < 64) __syncthreads();
    call.to[threadIdx.x] = call.from[threadIdx.x];
}

extern "C" void summed(const Call call) {
    float value = call.from[threadIdx.x];
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    call.to[threadIdx.x] = value;
}

SHIM_KERNEL(reverse, Call)
SHIM_KERNEL(staged, Call)
SHIM_KERNEL(divergent, Call)
SHIM_KERNEL(summed, Call)
"""


class Call(ct.Structure):
    _fields_ = (("source", ct.c_void_p), ("target", ct.c_void_p), ("flag", ct.c_int64))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ct.CDLL:
    folder = tmp_path_factory.mktemp("shim")
    (folder / "unit.cpp").write_text(KERNELS)
    command = [compiler(), "-std=c++17", "-fPIC", "-shared", "-include", str(HERE / "shim.h"), str(folder / "unit.cpp")]
    subprocess.run([*command, "-o", str(folder / "unit.so")], check=True)
    return ct.CDLL(str(folder / "unit.so"))


SOURCE = np.arange(128, dtype=np.float32)


def run(library: ct.CDLL, kernel: str, flag: bool, order: int) -> tuple[int, np.ndarray]:
    target = np.full_like(SOURCE, np.nan)
    call = Call(SOURCE.ctypes.data, target.ctypes.data, flag)
    function = getattr(library, f"shim_{kernel}")
    function.argtypes = [ct.c_void_p, ct.c_uint, ct.c_ulong, ct.c_uint, ct.c_void_p]
    return function((ct.c_uint * 3)(1, 1, 1), 128, 512, order, ct.addressof(call)), target


@pytest.mark.parametrize("order", [0, 1, 7])
def test_a_missing_barrier_shows(library: ct.CDLL, order: int) -> None:
    assert np.array_equal(run(library, "reverse", True, order)[1], SOURCE[::-1])
    assert not np.array_equal(run(library, "reverse", False, order)[1], SOURCE[::-1])


def test_a_read_before_the_copy_has_been_waited_for_shows(library: ct.CDLL) -> None:
    assert np.array_equal(run(library, "staged", True, 0)[1], SOURCE)
    assert np.isnan(run(library, "staged", False, 0)[1]).any()


def test_a_barrier_that_some_threads_miss_is_an_error(library: ct.CDLL) -> None:
    assert run(library, "divergent", True, 0)[0] == 0
    assert run(library, "divergent", False, 0)[0] == 1


def test_shuffles_stay_in_their_warp(library: ct.CDLL) -> None:
    assert np.array_equal(run(library, "summed", True, 5)[1], np.repeat(SOURCE.reshape(4, 32).sum(axis=1), 32))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_touch_no_memory_that_is_not_theirs() -> None:
    """The kernels' quick tests once more, with every access checked by the compiler's address sanitizer."""
    found = subprocess.run([compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("this compiler has no address sanitizer (libasan)")
    environment = os.environ | {
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        SANITIZE: "1",
        "PYTHONMALLOC": "malloc",
    }
    files = [f"tests/property/test_cuda_{name}.py" for name in ("attention", "rope", "blocks", "checksums")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "not slow", *files]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert " passed" in run.stdout
