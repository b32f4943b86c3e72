"""NVRTC, the compiler of CUDA kernels, as a library.

cuda-bindings finds it: the wheel nvidia-cuda-nvrtc, then a toolkit of the system.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

EXTRA = "pip install 'kvstored[cuda]'"


class CompileError(RuntimeError):
    """A kernel cannot be compiled here; the message says why and, where it can, what to do."""


class CompilerCrash(CompileError):
    """NVRTC's process died, as it does now and then; the next one may not."""


@cache
def library() -> ModuleType:
    """Raises CompileError."""
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
    """Raises CompileError where a driver of this version (12080: of CUDA 12.8) is too old to load what NVRTC makes."""
    major, minor = call("nvrtcVersion")
    if driver_version // 1000 < major:
        driver = f"{driver_version // 1000}.{driver_version % 1000 // 10}"
        advice = "pip install 'kvstored[cuda12]'" if major == 13 else "a newer driver"
        raise CompileError(f"the driver, of CUDA {driver}, cannot load kernels of NVRTC {major}.{minor}: {advice}")


def call(name: str, *arguments: Any) -> Any:
    """What a function of the library answers beside its code: nothing, one thing or a tuple. Raises CompileError."""
    code, *answers = getattr(library(), name)(*arguments)
    if code != 0:
        raise CompileError(f"{name}: error {int(code)}")
    return answers[0] if len(answers) == 1 else tuple(answers)
