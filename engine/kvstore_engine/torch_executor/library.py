"""torch, imported on first use, and its answers about devices.

Only this file imports torch at a call.
"""

from __future__ import annotations

from types import ModuleType

from kvstore_engine.devices import DeviceName
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.host_memory import available_bytes
from kvstore_proto.version import pip_install

_OLDEST = (2, 8)  # the first whose products of bf16 give float32


def torch_library() -> ModuleType:
    """Return the module torch, which is imported if it was not yet. Raises OperationError if torch is missing or older
    than 2.8; the message says what to install.
    """
    try:
        import torch
    except ImportError:
        raise OperationError(f"this device needs torch: {pip_install('engine,torch')}") from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
        raise OperationError(f"torch {torch.__version__} is too old, 2.8 is needed: {pip_install('torch')}")
    library: ModuleType = torch
    return library


def check_device(device: DeviceName) -> None:
    """Raise UsageError if this machine does not have `device`."""
    torch = torch_library()
    if not device.is_cuda:
        return
    if not torch.cuda.is_available():
        raise UsageError(f"device {device.name}: torch {torch.__version__} finds no CUDA device here; use --device cpu")
    count = torch.cuda.device_count()
    if device.index >= count:
        raise UsageError(f"device {device.name}: this machine has {count} CUDA devices, cuda:0 is the first")


def check_answers(device: DeviceName) -> None:
    """Raise OperationError if `device` has failed in a way that no later call in this process can succeed, for example
    after a kernel's wrong memory access.
    """
    if device.is_cuda:
        try:
            torch_library().cuda.synchronize(device.torch_name)
        except RuntimeError as error:
            raise OperationError(f"{device.name} computes nothing more in this process: {error}") from error


def free_bytes(device: DeviceName) -> int:
    """Return the number of free bytes of the memory of `device`."""
    if device.is_cuda:
        return int(torch_library().cuda.mem_get_info(device.torch_name)[0])
    return available_bytes()


def current_stream(device: DeviceName) -> int:
    """Return the address of the CUDA stream on which this thread's work for `device` is queued; 0 on the processor."""
    return int(torch_library().cuda.current_stream(device.torch_name).cuda_stream) if device.is_cuda else 0


def numerics(device: DeviceName) -> str:
    """Return a name for the way `device` rounds and sums. K/V blocks are shared only between engines with an equal
    name.
    """
    if not device.is_cuda:
        return "torch-bf16-cpu"
    major, minor = torch_library().cuda.get_device_capability(device.torch_name)
    return f"torch-bf16-sm_{major}{minor}"
