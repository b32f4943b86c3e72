"""Compiles a program's kernels for the host: the same .cu file, by the C++ compiler with `shim.h` before it.

Owns the compiled libraries, one for each program and state of the sources.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from kvstore_cuda.compiler import Program

HERE = Path(__file__).parent
SANITIZE = "SHIM_SANITIZE"  # when it is set, programs are compiled with the address sanitizer
_KERNEL = re.compile(r"__global__ void __launch_bounds__\(\w+\) (\w+)\(const (\w+) call\)")
_FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off", "-fPIC")


def compiler() -> str:
    """Skips the test where there is no C++ compiler."""
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("no C++ compiler (g++): the CUDA kernels cannot run on the host")
    return found


@cache
def shim_library(program: Program) -> Path:
    """The library with `shim_NAME` for each kernel NAME of the program."""
    sources = [*sorted(program.folder.glob("*.cu")), *sorted(program.folder.glob("*.h")), HERE / "shim.h"]
    flags = (*_FLAGS, *(("-fsanitize=address", "-g") if SANITIZE in os.environ else ()))
    digest = hashlib.sha256(repr((program, flags, [source.read_bytes() for source in sources])).encode())
    target = Path(tempfile.gettempdir()) / f"cuda-shim-{os.getuid()}" / f"{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _build(program, flags, target)
    return target


def _build(program: Program, flags: tuple[str, ...], target: Path) -> None:
    text = (program.folder / program.source).read_text()
    kernels = "".join(f"SHIM_KERNEL({name}, {argument})\n" for name, argument in _KERNEL.findall(text))
    assert kernels, f"{program.source} has no kernel that the shim recognises"
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        unit, made = Path(scratch) / "unit.cpp", Path(scratch) / "unit.so"
        unit.write_text(f'#include "{program.source}"\n{kernels}')
        defines = [f"-D{name}={value}" for name, value in program.defines]
        command = [compiler(), *flags, *defines, f"-I{program.folder}", "-include", str(HERE / "shim.h"), "-shared"]
        built = subprocess.run([*command, str(unit), "-o", str(made)], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        os.replace(made, target)
