"""NVRTC, the compiler of CUDA kernels, as a library and as the process that one compilation has for itself: it can
crash, which an engine with requests under way must not.

    python -m kvstore_cuda.nvrtc SOURCE ARCHITECTURE [OPTION ...]

writes a line with the bytes of the code and of the log, then both. It exits with 1 and the reason on standard error
where the source does not compile. cuda-bindings finds the library: the wheel nvidia-cuda-nvrtc, then a toolkit of the
system.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kvstore_proto.version import pip_install

EXTRA = pip_install("cuda")


class CompileError(RuntimeError):
    """The error of a CUDA kernel that cannot be compiled here. The message says why and, if possible, what to do."""


class CompilerCrash(CompileError):
    """The error of a compiler whose process died, which happens to NVRTC sometimes. Another try may succeed."""


@cache
def library() -> ModuleType:
    """Return the Python module of NVRTC, the compiler of CUDA kernels. Raises CompileError if it is not installed."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise CompileError(f"the CUDA kernels need the library cuda-bindings: {EXTRA}") from None
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # of the library's own, which says at length where it looked
        raise CompileError(f"libnvrtc.so cannot be loaded ({type(error).__name__}): {EXTRA}") from None
    found: ModuleType = nvrtc
    return found


def check_loadable(driver_version: int) -> None:
    """Raise CompileError if the CUDA driver is too old to load what the installed NVRTC compiles. `driver_version` is
    the driver's number, 12080 for CUDA 12.8.
    """
    major, minor = call("nvrtcVersion")
    if driver_version // 1000 < major:
        driver = f"{driver_version // 1000}.{driver_version % 1000 // 10}"
        advice = pip_install("cuda12") if major == 13 else "a newer driver"
        raise CompileError(f"the driver, of CUDA {driver}, cannot load kernels of NVRTC {major}.{minor}: {advice}")


def call(name: str, *arguments: Any) -> Any:
    """Call the function `name` of NVRTC with `arguments`, and return its results without the status code: None, one
    value or a tuple. Raises CompileError if the code reports a failure.
    """
    code, *answers = getattr(library(), name)(*arguments)
    if code != 0:
        raise CompileError(f"{name}: error {int(code)}")
    return answers[0] if len(answers) == 1 else tuple(answers)


def compiled(source: Path, architecture: str, options: list[str]) -> tuple[bytes, bytes]:
    """Compile the file `source` in this process, for `architecture` and with the compiler's `options`. Return the
    cubin, or PTX for a virtual architecture, and the log. Raises CompileError, with the log as its message if the
    source is wrong.
    """
    words = [option.encode() for option in (f"--gpu-architecture={architecture}", *options)]
    handle = call("nvrtcCreateProgram", source.read_bytes(), source.name.encode(), 0, [], [])
    try:
        (code,) = library().nvrtcCompileProgram(handle, len(words), words)
        log = _filled("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", handle).rstrip(b"\0")
        if code != 0:
            raise CompileError(log.decode() or f"error {int(code)}")
        kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
        return _filled(f"nvrtcGet{kind}Size", f"nvrtcGet{kind}", handle), log
    finally:
        library().nvrtcDestroyProgram(handle)


def _filled(size_call: str, get_call: str, handle: Any) -> bytes:
    buffer = bytearray(call(size_call, handle))
    call(get_call, handle, buffer)
    return bytes(buffer)


def main(arguments: list[str]) -> int:
    source, architecture, *options = arguments
    try:
        code, log = compiled(Path(source), architecture, options)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(b"%d %d\n" % (len(code), len(log)) + code + log)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
