"""The CUDA driver through the library `cuda-bindings`, loaded on first use.

The library looks for libcuda.so.1 in LD_LIBRARY_PATH, then in the system.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kvstore_proto.version import pip_install

# Only a new process helps; 214 and 220 are of memory and links that lost bits.
BROKEN_CONTEXT = frozenset((214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999))
_NOT_FOUND = 500
LIBRARY_MISSING = f"the library cuda-bindings is missing: {pip_install('gpu')}"


class DriverError(OSError):
    """The error of a failed call of the CUDA driver. `call` is the function's name, `code` its CUresult, and `name`
    that code's name.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.code = code

    @property
    def is_final(self) -> bool:
        """Return whether the error has made the CUDA context unusable, so that only a new process helps."""
        return self.code in BROKEN_CONTEXT


class NoDriver(OSError):
    """The error of a missing CUDA driver, Python library for it, or device. The message says what to do."""


def cuda_driver(missing: str = LIBRARY_MISSING) -> ModuleType:
    """Return the Python module of the CUDA driver. Raises NoDriver if there is no driver, or with the message `missing`
    if the library `cuda-bindings` is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise NoDriver(missing) from None
    try:
        driver.cuDriverGetVersion()
    except Exception as error:  # of the library's own, which says at length where it looked
        raise NoDriver(
            f"libcuda.so.1 cannot be loaded, is the NVIDIA driver installed? ({type(error).__name__})"
        ) from None
    library: ModuleType = driver
    return library


def call(driver: ModuleType, name: str, *arguments: Any) -> Any:
    """Call the function `name` of the CUDA driver with `arguments`, and return its results without the status code:
    None, one value or a tuple. Raises DriverError if the code reports a failure.
    """
    try:
        code, *answers = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # this driver is too old to have the function
        raise DriverError(name, _NOT_FOUND, str(error)) from None
    check(driver, name, code)
    return answers[0] if len(answers) == 1 else tuple(answers)


def check(driver: ModuleType, name: str, code: int) -> None:
    """Raise DriverError if `code`, a CUresult, says that the driver's function `name` failed."""
    if code != 0:
        found, text = driver.cuGetErrorName(code)
        raise DriverError(name, int(code), text.decode() if found == 0 and text else f"error {int(code)}")
