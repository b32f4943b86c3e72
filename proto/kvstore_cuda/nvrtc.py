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
    """A kernel cannot be compiled here; the message says why and, if possible, what to do."""


class CompilerCrash(CompileError):
    """NVRTC's process died, as it does sometimes; another try may succeed."""


@cache
def library() -> ModuleType:
    """Return the NVRTC library. Raises CompileError."""
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
    """Raise CompileError if a driver of `driver_version` (12080: of CUDA 12.8) is too old to load what NVRTC makes."""
    major, minor = call("nvrtcVersion")
    if driver_version // 1000 < major:
        driver = f"{driver_version // 1000}.{driver_version % 1000 // 10}"
        advice = pip_install("cuda12") if major == 13 else "a newer driver"
        raise CompileError(f"the driver, of CUDA {driver}, cannot load kernels of NVRTC {major}.{minor}: {advice}")


def call(name: str, *arguments: Any) -> Any:
    """Call the library's function `name`, and return its results without the code: None, one value or a tuple. Raises
    CompileError.
    """
    code, *answers = getattr(library(), name)(*arguments)
    if code != 0:
        raise CompileError(f"{name}: error {int(code)}")
    return answers[0] if len(answers) == 1 else tuple(answers)


def compiled(source: Path, architecture: str, options: list[str]) -> tuple[bytes, bytes]:
    """Return the cubin, or PTX for a virtual architecture, and the log. Raises CompileError; if the source does not
    compile, the log is its message.
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
