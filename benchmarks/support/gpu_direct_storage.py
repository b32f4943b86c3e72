"""Whether GPUDirect Storage is there: its library, of a toolkit or of a wheel, and the kernel's module."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from kvstore_cuda.device import CudaDevice
from support.gpu_answers import Answer, Sizes

_NAMES = ("libcufile.so.0", "libcufile.so")
_WHEELS = ("cu13/lib", "cufile/lib")  # below nvidia/: of CUDA 13, of CUDA 12
_FS_STATISTICS = Path("/proc/driver/nvidia-fs/stats")


class _CufileError(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int), ("driver_code", ctypes.c_int))


def has_direct_storage(device: int, sizes: Sizes) -> Answer:
    """Whether NVMe and the device can exchange bytes without host memory. It only informs."""
    CudaDevice(device).use_in_this_thread()
    module = "nvidia-fs is loaded" if _FS_STATISTICS.exists() else "nvidia-fs is not loaded"
    for name in candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.cuFileDriverOpen.restype = _CufileError
        code = library.cuFileDriverOpen().code
        opened = "opens" if code == 0 else f"does not open (error {code})"
        return Answer(True, f"GPUDirect Storage: {name} {opened}; {module}", {"there": float(code == 0)})
    says = f"GPUDirect Storage: no {_NAMES[0]}, of the system or of the wheel nvidia-cufile; {module}"
    return Answer(True, says, {"there": 0.0})


def candidates() -> Iterator[str]:
    """Names and paths of the library, in the order in which they are tried: the loader knows no wheels."""
    yield from _NAMES
    found = importlib.util.find_spec("nvidia")
    for place in (found.submodule_search_locations or ()) if found else ():
        yield from (str(Path(place) / wheel / _NAMES[0]) for wheel in _WHEELS)
