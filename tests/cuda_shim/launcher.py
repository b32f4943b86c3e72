"""Runs CUDA kernels on the host, by the libraries of `build`. Arguments are the device's, with host addresses."""

from __future__ import annotations

import ctypes as ct
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore_cuda.compiler import Program
from kvstore_engine.kernels.cuda.program import STREAM_OF_DEFAULT, THREADS, Launcher
from tests.cuda_shim.build import shim_library

Element = TypeVar("Element", bound=np.generic)


class ShimLauncher(Launcher):
    """`order`: in which order a block's threads run: 0 as they are, 1 backwards, else by chance (the seed)."""

    def __init__(self, order: int = 0, multiprocessors: int = 4) -> None:
        self.order = order
        self.launched: list[str] = []
        self._multiprocessors = multiprocessors

    @property
    def multiprocessors(self) -> int:
        return self._multiprocessors

    def launch(
        self, program: Program, kernel: str, grid: tuple[int, int, int], argument: ct.Structure,
        *, shared_bytes: int = 0, stream: int = STREAM_OF_DEFAULT,
    ) -> None:  # fmt: skip
        self.launched.append(kernel)
        run_kernel(program, kernel, grid, argument, threads=THREADS, shared_bytes=shared_bytes, order=self.order)


def placed(array: npt.NDArray[Element]) -> npt.NDArray[Element]:
    """A copy that starts at a multiple of 16, as device memory does, and ends where a sanitizer sees its end."""
    copied = np.array(array, order="C", copy=True)
    assert copied.ctypes.data % 16 == 0
    return copied


def run_kernel(
    program: Program, kernel: str, grid: tuple[int, int, int], argument: ct.Structure, *, threads: int,
    shared_bytes: int = 0, order: int = 0,
) -> None:  # fmt: skip
    """Run a kernel to its end, with thread blocks of `threads`."""
    run = getattr(ct.CDLL(str(shim_library(program))), f"shim_{kernel}")
    run.argtypes = [ct.c_void_p, ct.c_uint, ct.c_ulong, ct.c_uint, ct.c_void_p]
    code = run((ct.c_uint * 3)(*grid), threads, shared_bytes, order, ct.addressof(argument))
    assert code == 0, f"{kernel}: threads wait at a barrier that others never reach, or end with copies under way"
