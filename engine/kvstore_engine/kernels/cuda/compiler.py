"""Compiles the kernels for one architecture with NVRTC, once, into the user's cache directory.

Owns the process of a compilation and the cached file's name, which holds a digest of every source, the options and
NVRTC's version. It needs no device.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from kvstore_engine.kernels.build import cache_folder
from kvstore_engine.kernels.cuda.nvrtc import CudaError, call, library
from kvstore_engine.kernels.cuda.program import SOURCES, Program

LONGEST_S = 300.0  # a compilation takes seconds


def compile_program(program: Program, architecture: str, folder: Path | None = None) -> bytes:
    """The cubin of `program` for `architecture`, such as "sm_90". Raises CudaError."""
    target = (folder or cache_folder()) / f"cuda-{_digest(program, architecture)}.cubin"
    try:
        return target.read_bytes()
    except OSError:
        pass
    cubin, _ = compile_with_log(program, architecture)
    _keep(target, cubin)
    return cubin


def compile_with_log(program: Program, architecture: str, *extra: str) -> tuple[bytes, str]:
    """The cubin, for a virtual architecture ("compute_80") the PTX, and what the compiler says; `extra` are further
    options. Nothing is cached. Raises CudaError."""
    library()  # says what to install where it is missing
    what = f"{program.source} for {architecture}"
    command = [
        sys.executable, "-m", "kvstore_engine.kernels.cuda.nvrtc_process", str(SOURCES / program.source), architecture,
        *_options(program), f"--include-path={SOURCES}", *extra,
    ]  # fmt: skip
    try:
        ended = subprocess.run(command, capture_output=True, check=False, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        raise CudaError(f"NVRTC did not compile {what} within {LONGEST_S:.0f} s") from None
    if ended.returncode < 0:
        raise CudaError(f"NVRTC crashed ({signal.Signals(-ended.returncode).name}) on {what}: try again")
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").splitlines() or [f"status {ended.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise CudaError(f"NVRTC cannot compile {what}: {reason}")
    sizes, _, rest = ended.stdout.partition(b"\n")
    code_bytes, log_bytes = map(int, sizes.split())
    return rest[:code_bytes], rest[code_bytes : code_bytes + log_bytes].decode()


def _options(program: Program) -> list[str]:
    return ["--std=c++17", *(f"-D{name}={value}" for name, value in program.defines)]


def _digest(program: Program, architecture: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in (*sorted(SOURCES.glob("*.h")), SOURCES / program.source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for text in (str(call("nvrtcVersion")), architecture, *_options(program)):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _keep(target: Path, cubin: bytes) -> None:
    """Write beside the target, then rename: a reader never sees half of it. A full disk costs the next start time."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, scratch = tempfile.mkstemp(dir=target.parent, suffix=".partial")
        with os.fdopen(descriptor, "wb") as file:
            file.write(cubin)
        os.replace(scratch, target)
    except OSError:
        return
