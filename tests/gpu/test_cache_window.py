"""A window of the L2 cache: which blocks it holds, and what the driver is asked, over the emulated one."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kvstore_engine.kernels.cuda.device import CacheWindow
from tests.gpu.emulated import emulated_node

WINDOWS = """
import ctypes
from kvstore_engine.kernels.cuda.device import CacheWindow, Device
from kvstore_engine.kernels.cuda.program import CudaError
from kvstore_cuda.device import CudaDevice

driver, device = CudaDevice(0).use_in_this_thread(), Device(0)
stream = int(driver.stream())
memory = driver.map(driver.create(8 << 20), 8 << 20)
library = ctypes.CDLL("libcuda.so.1")


def window():
    class Window(ctypes.Structure):
        _fields_ = (("address", ctypes.c_uint64), ("nbytes", ctypes.c_size_t), ("hit_ratio", ctypes.c_float),
                    ("hit", ctypes.c_int), ("miss", ctypes.c_int))
    found = Window()
    assert library.cuStreamGetAttribute(ctypes.c_void_p(stream), 1, ctypes.byref(found)) == 0
    return found.address - memory if found.nbytes else 0, found.nbytes, found.hit_ratio, found.hit, found.miss


"""
ASK = f"""{WINDOWS}
print(device.window_bytes, device.set_aside_cache(64 << 20), device.set_aside_cache(1 << 20))
device.keep_in_cache(CacheWindow(memory + 4096, 1 << 19), stream=stream)
print(*window())
device.keep_in_cache(CacheWindow(memory, 4 << 20), stream=stream)
print(*window())
device.keep_in_cache(None, stream=stream)
print(*window(), device.set_aside_cache(0))
try:
    device.keep_in_cache(CacheWindow(memory, 32 << 20), stream=stream)
except CudaError as error:
    print(error)
"""

PREFIX = f"""{WINDOWS}
import numpy as np
from kvstore_engine.torch_executor.prefix_window import PrefixWindow

prefix = PrefixWindow.wanted(device, 4096)
tables = [np.array(each, np.int32) for each in ([5, 6, 7, 1], [5, 6, 7, 2], [9])]
prefix.choose(tables)
for plane in (memory, memory + (1 << 20)):
    prefix.place(plane, stream)
    print(*window())
prefix.choose(tables[1:])
prefix.place(memory, stream)
print(*window())
"""


@pytest.mark.parametrize(
    ("blocks", "most", "first", "count"),
    [
        ([5], 1000, 5, 1),
        ([3, 4, 5, 9, 10], 1000, 3, 3),
        ([9, 10, 3, 4, 5], 1000, 3, 3),
        ([1, 2, 7, 8], 1000, 1, 2),
        ([8, 7, 6], 1000, 8, 1),
        ([0, 1, 2, 3, 4, 5], 45, 0, 4),
    ],
)
def test_a_window_is_the_longest_run_that_fits(blocks: list[int], most: int, first: int, count: int) -> None:
    window = CacheWindow.of_blocks(4096, 10, np.array(blocks, np.int32), most)
    assert window == CacheWindow(4096 + 10 * first, 10 * count)


def test_where_no_block_fits_there_is_no_window() -> None:
    assert CacheWindow.of_blocks(4096, 10, np.array([1, 2], np.int32), 9) is None
    assert CacheWindow.of_blocks(4096, 10, np.zeros(0, np.int32), 100) is None


@pytest.mark.slow
def test_a_stream_has_the_window_and_the_cache_is_shared_out_as_devices_bound_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | emulated_node(must_emulate=True), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        f"{16 << 20} {4 << 20} {1 << 20}",
        f"4096 {1 << 19} 1.0 2 0",
        f"0 {4 << 20} 0.25 2 0",
        "0 0 0.0 0 0 0",
        "cuStreamSetAttribute: CUDA_ERROR_INVALID_VALUE",
    ]


@pytest.mark.slow
def test_the_prefix_that_a_batch_shares_is_the_window_of_each_plane_of_keys() -> None:
    node = emulated_node(must_emulate=True) | {"KVENGINE_L2_PREFIX": "2MiB"}
    ended = subprocess.run([sys.executable, "-c", PREFIX], env=os.environ | node, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    begins = [5 * 4096, (1 << 20) + 5 * 4096]
    assert ended.stdout.splitlines() == [*(f"{begin} {3 * 4096} 1.0 2 0" for begin in begins), "0 0 0.0 0 0"]
