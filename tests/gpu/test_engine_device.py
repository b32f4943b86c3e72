"""The engine's launcher on the emulated driver: it compiles a program, loads it, and its kernel moves blocks."""

from __future__ import annotations

import os
import subprocess
import sys

from kvstore_engine.kernels.cuda.program import Program
from tests.cuda_shim.build import shim_library
from tests.gpu.emulated import emulated_node
from tests.reference.nvrtc import need_nvrtc

BLOCKS = Program.of("blocks.cu")
MOVE = """
import ctypes, mmap
import numpy as np
from kvstore_engine.kernels.cuda import BlockMover, CudaError, Device, Program
from kvstore_engine.kernels.cuda.blocks import BlockRuns
from kvstore_proto.cuda_copies import Run, Runs
from kvstore_tiers.gpu.driver import Driver

CHUNK, BLOCK = 2 << 20, 4096
driver, device = Driver(0), Device(0)
stream = driver.stream()
at = driver.map(driver.create(CHUNK), CHUNK)
page = np.frombuffer(mmap.mmap(-1, CHUNK), np.uint8)
driver.register(page.ctypes.data, CHUNK, for_kernels=True)
page[: 8 * BLOCK] = np.repeat(np.arange(8, dtype=np.uint8), BLOCK)
driver.copy(Runs.of([Run(at, page.ctypes.data, 8 * BLOCK)]), to_device=True, stream=stream)

runs = BlockRuns.within(np.array([1, 2], np.int32), np.array([5, 6], np.int32), BLOCK)
shared = driver.device_pointer(page.ctypes.data) + 16 * BLOCK
lists = page[16 * BLOCK :]
lists[:8] = np.array([at], np.uint64).view(np.uint8)
lists[1024 : 1024 + runs.runs.nbytes] = np.ascontiguousarray(runs.runs).view(np.uint8).ravel()
lists[2048 : 2048 + runs.first_pieces.nbytes] = runs.first_pieces.view(np.uint8)
driver.synchronize(stream)
BlockMover(device).move(shared, runs, (shared + 1024, shared + 2048), plane_count=1, stream=int(stream))
device.synchronize()
driver._call("cuStreamQuery", stream)  # raises where the kernel has not run
driver.copy(Runs.of([Run(page.ctypes.data, at, 8 * BLOCK)]), to_device=False, stream=stream)
driver.synchronize(stream)
print(page[: 8 * BLOCK : BLOCK].tolist(), device.architecture, device.multiprocessors)
try:
    device.launch(Program.of("blocks.cu"), "kv_others", (1, 1, 1), ctypes.c_uint64(0))
except CudaError as error:
    print(error)
device.close()
"""


def test_blocks_are_moved_by_a_kernel() -> None:
    need_nvrtc()
    node = emulated_node(must_emulate=True)
    node |= {"EMULATED_CUDA_KERNELS": str(shim_library(BLOCKS)), "EMULATED_CUDA_DELAY_US": "100000"}
    ended = subprocess.run(
        [sys.executable, "-c", MOVE], env=os.environ | node, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    moved, refused = ended.stdout.splitlines()
    assert moved == "[0, 1, 2, 3, 4, 1, 2, 7] sm_90 8"
    assert refused == "cuModuleGetFunction: CUDA_ERROR_NOT_FOUND"
