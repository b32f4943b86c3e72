"""Runs the engine's CUDA kernels on the host: the same .cu files, by the C++ compiler with `shim.h` before them.

Owns the compiled libraries, one for each program and state of the sources. Arguments are the device's own, with
addresses of the host.
"""

from __future__ import annotations

import ctypes as ct
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.kernels.cuda.program import SOURCES, STREAM_OF_DEFAULT, THREADS, Launcher, Program

Element = TypeVar("Element", bound=np.generic)
HERE = Path(__file__).parent
SANITIZE = "SHIM_SANITIZE"  # when it is set, programs are compiled with the address sanitizer
_KERNEL = re.compile(r"__global__ void __launch_bounds__\(\w+\) (\w+)\(const (\w+) call\)")
_FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off", "-fPIC")


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
        run = getattr(_library(program), f"shim_{kernel}")
        run.argtypes = [ct.c_void_p, ct.c_uint, ct.c_ulong, ct.c_uint, ct.c_void_p]
        code = run((ct.c_uint * 3)(*grid), THREADS, shared_bytes, self.order, ct.addressof(argument))
        assert code == 0, f"{kernel}: threads wait at a barrier that others never reach, or end with copies under way"


def placed(array: npt.NDArray[Element]) -> npt.NDArray[Element]:
    """A copy that starts at a multiple of 16, as device memory does, and ends where a sanitizer sees its end."""
    copied = np.array(array, order="C", copy=True)
    assert copied.ctypes.data % 16 == 0
    return copied


def compiler() -> str:
    """Skips the test where there is no C++ compiler."""
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("no C++ compiler (g++): the CUDA kernels cannot run on the host")
    return found


@cache
def _library(program: Program) -> ct.CDLL:
    sources = [*sorted(SOURCES.iterdir()), HERE / "shim.h"]
    flags = (*_FLAGS, *(("-fsanitize=address", "-g") if SANITIZE in os.environ else ()))
    digest = hashlib.sha256(repr((program, flags, [source.read_bytes() for source in sources])).encode())
    target = Path(tempfile.gettempdir()) / f"cuda-shim-{os.getuid()}" / f"{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _build(program, flags, target)
    return ct.CDLL(str(target))


def _build(program: Program, flags: tuple[str, ...], target: Path) -> None:
    text = (SOURCES / program.source).read_text()
    kernels = "".join(f"SHIM_KERNEL({name}, {argument})\n" for name, argument in _KERNEL.findall(text))
    assert kernels, f"{program.source} has no kernel that the shim recognises"
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        unit, made = Path(scratch) / "unit.cpp", Path(scratch) / "unit.so"
        unit.write_text(f'#include "{program.source}"\n{kernels}')
        defines = [f"-D{name}={value}" for name, value in program.defines]
        command = [compiler(), *flags, *defines, f"-I{SOURCES}", "-include", str(HERE / "shim.h"), "-shared"]
        built = subprocess.run([*command, str(unit), "-o", str(made)], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        os.replace(made, target)
