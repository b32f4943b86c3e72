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
    """A call of the driver failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.code = code

    @property
    def is_final(self) -> bool:
        """Return whether the error has made the context unusable."""
        return self.code in BROKEN_CONTEXT


class NoDriver(OSError):
    """The driver, its library or the device is missing; the message says what to do."""


def cuda_driver(missing: str = LIBRARY_MISSING) -> ModuleType:
    """Return the library, which looks for a driver. Raises NoDriver; `missing` says what to install if the library is
    not there.
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
    """Call the driver's function `name`, and return its results without the code: None, one value or a tuple. Raises
    DriverError.
    """
    try:
        code, *answers = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # this driver is too old to have the function
        raise DriverError(name, _NOT_FOUND, str(error)) from None
    check(driver, name, code)
    return answers[0] if len(answers) == 1 else tuple(answers)


def check(driver: ModuleType, name: str, code: int) -> None:
    """Raise DriverError if `code` says that the call `name` failed."""
    if code != 0:
        found, text = driver.cuGetErrorName(code)
        raise DriverError(name, int(code), text.decode() if found == 0 and text else f"error {int(code)}")
