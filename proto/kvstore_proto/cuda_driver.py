"""The CUDA driver as the library `cuda-bindings` shows it, loaded when it is first needed.

The GPU tier's worker, a client that reads device memory and the engine's kernels call it; this is all that they have in
common. The library finds libcuda.so.1 by LD_LIBRARY_PATH, then in the system.
"""

from __future__ import annotations

from types import ModuleType


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
