"""Compile a program of kernels for one architecture with NVRTC, once, into the user's cache directory.

The module owns the process of a compilation and the cached file's name, which holds a digest of the source, of every
header beside it, the options and NVRTC's version. It needs no device.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore_cuda.kernel_cache import cache_folder, keep
from kvstore_cuda.nvrtc import CompileError, CompilerCrash, call, check_loadable, library

LONGEST_S = 300.0  # a compilation takes seconds


@dataclass(frozen=True, slots=True)
class Program:
    """The source of CUDA kernels: the file `source` in the directory `folder`, compiled with the macros `defines`."""

    folder: Path
    source: str
    defines: tuple[tuple[str, str], ...]


def compile_program(
    program: Program, architecture: str, folder: Path | None = None, *, longest_s: float = LONGEST_S
) -> bytes:
    """Return the cubin (machine code for a GPU) of `program` for `architecture`, such as "sm_90". It is compiled once,
    and then read from `folder`, by default the user's cache. A compiler that runs for `longest_s` seconds is
    stopped; one that crashes is tried once more. Raises CompileError.
    """
    target = (folder or cache_folder()) / f"cuda-{program_digest(program, architecture)}.cubin"
    try:
        return target.read_bytes()
    except OSError:
        pass
    try:
        cubin, _ = compile_with_log(program, architecture, longest_s=longest_s)
    except CompilerCrash:
        cubin, _ = compile_with_log(program, architecture, longest_s=longest_s)
    keep(target, cubin)
    return cubin


def load_program(
    driver_call: Callable[..., Any], program: Program, architecture: str, *, longest_s: float = LONGEST_S
) -> Any:
    """Compile `program` for `architecture`, or read it from the cache, and return it as a module of the current CUDA
    context. `driver_call` gets the name of a driver function and its arguments. Raises CompileError, also if the
    driver is too old for the compiler's output, and the errors of `driver_call`.
    """
    cubin = compile_program(program, architecture, longest_s=longest_s)
    try:
        return driver_call("cuModuleLoadData", cubin)
    except Exception:
        check_loadable(driver_call("cuDriverGetVersion"))  # says more
        raise


def compile_with_log(
    program: Program, architecture: str, *extra: str, longest_s: float = LONGEST_S
) -> tuple[bytes, str]:
    """Compile `program` for `architecture` without the cache, and return the code and the compiler's log. The code is a
    cubin, or PTX for a virtual architecture ("compute_80"). `extra` are further options of the compiler. Raises
    CompileError, also if it takes more than `longest_s` seconds.
    """
    library()  # says what to install where it is missing
    what = f"{program.source} for {architecture}"
    command = [
        sys.executable, "-m", "kvstore_cuda.nvrtc", str(program.folder / program.source),
        architecture, *_options(program), f"--include-path={program.folder}", *extra,
    ]  # fmt: skip
    try:
        ended = subprocess.run(command, capture_output=True, check=False, timeout=longest_s)
    except subprocess.TimeoutExpired:
        raise CompileError(f"NVRTC did not compile {what} within {longest_s:.0f} s") from None
    if ended.returncode < 0:
        raise CompilerCrash(f"NVRTC crashed ({signal_name(-ended.returncode)}) on {what}: try again")
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").splitlines() or [f"status {ended.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise CompileError(f"NVRTC cannot compile {what}: {reason}")
    sizes, _, rest = ended.stdout.partition(b"\n")
    code_bytes, log_bytes = map(int, sizes.split())
    return rest[:code_bytes], rest[code_bytes : code_bytes + log_bytes].decode()


def signal_name(number: int) -> str:
    """Return the name of the signal with this `number`. A real-time signal, for which Python has no name, becomes
    "signal 40".
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _options(program: Program) -> list[str]:
    return ["--std=c++17", *(f"-D{name}={value}" for name, value in program.defines)]


def program_digest(program: Program, architecture: str) -> str:
    """Return a digest of everything that the compiled code of `program` depends on: sources, headers, options,
    `architecture` and the compiler's version. Raises CompileError if the compiler is not installed.
    """
    digest = hashlib.blake2b(digest_size=12)
    for path in (*sorted(program.folder.glob("*.h")), program.folder / program.source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for text in (str(call("nvrtcVersion")), architecture, *_options(program)):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()
