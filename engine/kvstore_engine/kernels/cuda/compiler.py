"""Compiles the kernels for one architecture with NVRTC, once, into the user's cache directory.

Owns NVRTC's calls and the cached file's name, which holds a digest of every source, the options and NVRTC's version.
It needs no device. The library is found by cuda-bindings: the wheel nvidia-cuda-nvrtc, then a toolkit of the system.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kvstore_engine.errors import OperationError
from kvstore_engine.kernels.build import cache_folder
from kvstore_engine.kernels.cuda.program import SOURCES, Program

EXTRA = "pip install 'kvstored[cuda]'"


class CudaError(OperationError):
    """A kernel cannot be compiled or launched here; the message says why and, where it can, what to do."""


def compile_program(program: Program, architecture: str, folder: Path | None = None) -> bytes:
    """The cubin of `program` for `architecture`, such as "sm_90". Raises CudaError."""
    nvrtc = _library()
    options = _options(program, architecture)
    target = (folder or cache_folder()) / f"cuda-{_digest(nvrtc, program, options)}.cubin"
    try:
        return target.read_bytes()
    except OSError:
        pass
    cubin, _ = compile_with_log(program, architecture)
    _keep(target, cubin)
    return cubin


def compile_with_log(program: Program, architecture: str, *extra: str) -> tuple[bytes, str]:
    """The cubin and what the compiler says; `extra` are further options. Nothing is cached. Raises CudaError."""
    nvrtc = _library()
    options = [option.encode() for option in (*_options(program, architecture), *extra)]
    text = (SOURCES / program.source).read_bytes()
    handle = _call(nvrtc, "nvrtcCreateProgram", text, program.source.encode(), 0, [], [])
    try:
        (code,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
        log = _filled(nvrtc, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog", handle).rstrip(b"\0").decode()
        if code != 0:
            reason = next((line for line in log.splitlines() if "error" in line), f"error {int(code)}")
            raise CudaError(f"NVRTC cannot compile {program.source} for {architecture}: {reason}")
        return _filled(nvrtc, "nvrtcGetCUBINSize", "nvrtcGetCUBIN", handle), log
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _options(program: Program, architecture: str) -> tuple[str, ...]:
    defines = (f"-D{name}={value}" for name, value in program.defines)
    return (f"--gpu-architecture={architecture}", "--std=c++17", f"--include-path={SOURCES}", *defines)


def _digest(nvrtc: ModuleType, program: Program, options: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in (*sorted(SOURCES.glob("*.h")), SOURCES / program.source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = _call(nvrtc, "nvrtcVersion")
    for text in (str(version), *(option for option in options if not option.startswith("--include-path"))):
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


@cache
def _library() -> ModuleType:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise CudaError(f"the CUDA kernels need the library cuda-bindings: {EXTRA}") from None
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # of the library's own, which says at length where it looked
        raise CudaError(f"libnvrtc.so cannot be loaded ({type(error).__name__}): {EXTRA}") from None
    library: ModuleType = nvrtc
    return library


def _call(nvrtc: ModuleType, name: str, *arguments: Any) -> Any:
    code, *answers = getattr(nvrtc, name)(*arguments)
    if code != 0:
        raise CudaError(f"{name}: error {int(code)}")
    return answers[0] if len(answers) == 1 else tuple(answers)


def _filled(nvrtc: ModuleType, size_call: str, call: str, handle: Any) -> bytes:
    buffer = bytearray(_call(nvrtc, size_call, handle))
    _call(nvrtc, call, handle, buffer)
    return bytes(buffer)
