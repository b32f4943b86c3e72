"""The engine's launcher on the emulated driver: it loads a program and its kernel moves blocks; both ways of attention
are timed, and what comes of it is remembered.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_cuda.compiler import compile_program
from kvstore_engine.kernels.cuda.attention import PagedAttention
from kvstore_engine.kernels.cuda.program import CacheShape, KernelProgram
from tests.cuda_shim.build import shim_library
from tests.cuda_shim.launcher import ShimLauncher
from tests.gpu.emulated import compiled, emulated_node
from tests.reference.nvrtc import need_nvrtc

BLOCKS = KernelProgram.of("blocks.cu")
MOVE = """
import ctypes, mmap
import numpy as np
from kvstore_engine.kernels.cuda.blocks import BlockMover, BlockRuns
from kvstore_engine.kernels.cuda.device import Device
from kvstore_engine.kernels.cuda.program import CudaError, KernelProgram
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice

CHUNK, BLOCK = 2 << 20, 4096
driver, device = CudaDevice(0).use_in_this_thread(), Device(0)
stream = driver.stream()
at = driver.map(driver.create(CHUNK), CHUNK)
page = np.frombuffer(mmap.mmap(-1, CHUNK), np.uint8)
driver.register(page.ctypes.data, CHUNK, for_kernels=True)
page[: 8 * BLOCK] = np.repeat(np.arange(8, dtype=np.uint8), BLOCK)
driver.copy(Runs.of([CopyRun(at, page.ctypes.data, 8 * BLOCK)]), "to device", stream)

runs = BlockRuns.within(np.array([1, 2], np.int32), np.array([5, 6], np.int32), BLOCK)
shared = driver.device_pointer(page.ctypes.data) + 16 * BLOCK
lists = page[16 * BLOCK :]
lists[:8] = np.array([at], np.uint64).view(np.uint8)
lists[1024 : 1024 + runs.runs.nbytes] = np.ascontiguousarray(runs.runs).view(np.uint8).ravel()
lists[2048 : 2048 + runs.first_pieces.nbytes] = runs.first_pieces.view(np.uint8)
driver.synchronize(stream)
BlockMover(device).move(shared, runs, (shared + 1024, shared + 2048), plane_count=1, stream=int(stream))
device.synchronize()
driver.call("cuStreamQuery", stream)  # raises where the kernel has not run
driver.copy(Runs.of([CopyRun(page.ctypes.data, at, 8 * BLOCK)]), "to host", stream)
driver.synchronize(stream)
print(page[: 8 * BLOCK : BLOCK].tolist(), device.architecture, device.multiprocessors)
try:
    device.launch(KernelProgram.of("blocks.cu"), "kv_others", (1, 1, 1), ctypes.c_uint64(0))
except CudaError as error:
    print(error)
device.close()
"""


def test_blocks_are_moved_by_a_kernel() -> None:
    need_nvrtc()
    node = emulated_node(must_emulate=True)
    compiled(BLOCKS)
    node |= {"EMULATED_CUDA_KERNELS": str(shim_library(BLOCKS)), "EMULATED_CUDA_DELAY_US": "100000"}
    ended = subprocess.run(
        [sys.executable, "-c", MOVE], env=os.environ | node, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    moved, refused = ended.stdout.splitlines()
    assert moved == "[0, 1, 2, 3, 4, 1, 2, 7] sm_90 8"
    assert refused == "cuModuleGetFunction: CUDA_ERROR_NOT_FOUND"


SHAPE = CacheShape(2, 1, 64, 16)
TIME = """
import mmap
import numpy as np
from kvstore_engine.kernels.cuda.attention import KernelRows, PagedAttention
from kvstore_engine.kernels.cuda.device import Device
from kvstore_engine.kernels.cuda.program import CacheShape
from kvstore_engine.kernels.cuda.crossover import measured, pass_ratios, settled
from kvstore_cuda.copies import CopyRun, Runs
from kvstore_cuda.device import CudaDevice

CHUNK, BLOCKS, LONGEST_DELAY_S = 2 << 20, 8, 2e-4
driver, device = CudaDevice(0).use_in_this_thread(), Device(0)
stream, pages = driver.stream(), []


def place(array):
    at, page = driver.map(driver.create(CHUNK), CHUNK), np.frombuffer(mmap.mmap(-1, CHUNK), np.uint8)
    page[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    driver.register(page.ctypes.data, CHUNK)
    driver.copy(Runs.of([CopyRun(at, page.ctypes.data, CHUNK)]), "to device", stream)
    pages.append(page)
    return at


attention = PagedAttention(device, CacheShape(2, 1, 64, 16), partition_keys=32)
planes = tuple(place(np.zeros((BLOCKS, attention.shape.block_bytes), np.uint8)) for _ in range(2))


def measure():
    print("measuring")
    ratios = pass_ratios(attention, planes, place, device.seconds, blocks=BLOCKS, rows=(1, 2), context=80)
    assert all(ratio > 0 for ratio in ratios.values())
    return measured(attention, ratios)


for _ in range(2):
    found = settled(attention, device.architecture, device.name, measure)
    print(found.blocks_per_multiprocessor * device.multiprocessors)

table = place(np.arange(5, dtype=np.int32))
row = KernelRows(1, place(np.zeros(1, np.int32)), place(np.full(1, 80, np.int32)), table, 5, 80)
queries, output = (place(np.zeros((1, 2, 64), np.uint16)) for _ in range(2))


def queue(stream, launches):
    for _ in range(launches):
        attention.attend(queries, output, planes, row, version=1, stream=stream)


one_s, many_s = (
    min(device.seconds(lambda stream: queue(stream, launches)) for _ in range(3))  # a busy machine delays some
    for launches in (1, 8)
)
print(many_s > 3 * one_s > 3 * LONGEST_DELAY_S)
device.close()
"""


@pytest.mark.slow
def test_attention_is_timed_when_a_device_is_new_and_not_again(tmp_path: Path) -> None:
    found = _timed(tmp_path)
    assert found[0] == "measuring" and found[1] == found[2] and float(found[1]) in (1, 2, 4), "rows, of one block each"
    assert found[3] == "True", "each launch counts, and takes longer than the driver's delay"


@pytest.mark.slow
def test_attention_has_the_default_where_it_cannot_be_timed(tmp_path: Path) -> None:
    found = _timed(tmp_path, EMULATED_CUDA_FAULTS="cuGraphInstantiate:1=2, cuGraphInstantiate:2=2")
    assert found[:4] == ["measuring", "16.0", "measuring", "16.0"], "two thread blocks each of 8 multiprocessors"


def _timed(folder: Path, **variables: str) -> list[str]:
    need_nvrtc()
    node = emulated_node(must_emulate=True) | variables | {"XDG_CACHE_HOME": str(folder)}
    program = PagedAttention(ShimLauncher(), SHAPE).program
    compile_program(program, "sm_90", folder / "kvstored" / "kernels")
    node["EMULATED_CUDA_KERNELS"] = str(shim_library(program))
    ended = subprocess.run(
        [sys.executable, "-c", TIME], env=os.environ | node, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()
