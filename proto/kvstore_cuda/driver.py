"""The CUDA driver as the library `cuda-bindings` shows it, loaded when it is first needed.

The GPU tier's worker, a client that reads device memory and the engine's kernels call it; this is all that they have in
common. The library finds libcuda.so.1 by LD_LIBRARY_PATH, then in the system.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Only a new process helps; 214 and 220 are of memory and links that lost bits.
BROKEN_CONTEXT = frozenset((214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999))
_NOT_FOUND = 500


class DriverError(OSError):
    """A call of the driver failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.code = code

    @property
    def is_final(self) -> bool:
        """Whether the context is of no more use."""
        return self.code in BROKEN_CONTEXT


def cuda_driver(missing: str = "the library cuda-bindings is missing: pip install 'kvstored[gpu]'") -> ModuleType:
    """Raises OSError that says what to install: `missing`, where the library is not there."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise OSError(missing) from None
    try:
        driver.cuDriverGetVersion()
    except Exception as error:  # of the library's own, which says at length where it looked
        raise OSError(
            f"libcuda.so.1 cannot be loaded, is the NVIDIA driver installed? ({type(error).__name__})"
        ) from None
    library: ModuleType = driver
    return library


def device_identity(driver: ModuleType, device: Any) -> int:
    """A number of 64 bits, not 0, that no other device has: the same in each process, and after a restart of the
    machine. Raises DriverError."""
    return int.from_bytes(bytes(call(driver, "cuDeviceGetUuid", device).bytes)[:8], "little") or 1


def call(driver: ModuleType, name: str, *arguments: Any) -> Any:
    """What a function of the driver answers beside its code: nothing, one thing or a tuple. Raises DriverError."""
    try:
        code, *answers = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # this driver is too old to have the function
        raise DriverError(name, _NOT_FOUND, str(error)) from None
    check(driver, name, code)
    return answers[0] if len(answers) == 1 else tuple(answers)


def check(driver: ModuleType, name: str, code: int) -> None:
    """Raises DriverError where `code` says that the call failed."""
    if code != 0:
        found, text = driver.cuGetErrorName(code)
        raise DriverError(name, int(code), text.decode() if found == 0 and text else f"error {int(code)}")


def launch(
    driver_call: Callable[..., Any], function: Any, grid: tuple[int, int, int], threads: int,
    argument: ctypes.Structure, *, shared_bytes: int = 0, stream: Any,
) -> None:  # fmt: skip
    """Queue a kernel that has one argument, which is copied before this returns. `driver_call` gets the name of the
    driver's function and its arguments; raises what that raises."""
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    size = (*grid, threads, 1, 1)
    driver_call("cuLaunchKernel", function, *size, shared_bytes, stream, ctypes.addressof(parameters), 0)
