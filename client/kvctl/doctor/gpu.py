"""GPU tiers: the library for the driver, NVIDIA's devices, and whether the daemon's unit may open them.

The driver is never started: that would load modules and take device memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from kvctl.doctor.finding import Finding, fail, ok, warn
from kvctl.doctor.settings import Settings
from kvctl.doctor.surroundings import Surroundings

_DROP_IN = "install systemd/kvstored.service.d/gpu.conf as deploy/README.md says, then restart kvstored"
_CONTROL, _MEMORY = "nvidiactl", "nvidia-uvm"
# What a unit calls a device when it allows it; names of modules are patterns of systemd's.
_ALLOWED_AS = {
    _CONTROL: ("char-195", "char-nvidia", "char-nvidiactl", "char-nvidia-frontend", "/dev/nvidiactl"),
    _MEMORY: ("char-nvidia-uvm", "/dev/nvidia-uvm"),
}
_FOR_ALL = stat.S_IROTH | stat.S_IWOTH


def tiers_of(settings: Settings) -> list[str]:
    """Names of the GPU tiers."""
    return settings.tiers("gpu", mark="from_nvme")


def library() -> Iterator[Finding]:
    try:
        is_there = find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # not even its namespace
        is_there = False
    if is_there:
        yield ok("cuda-bindings", "installed where kvctl runs")
    else:
        advice = "pip install 'kvstored[gpu]', in the daemon's environment"
        yield fail("cuda-bindings", "not installed where kvctl runs", advice)


def devices(around: Surroundings) -> Iterator[Finding]:
    """The nodes that the driver opens, from here: a unit or a container may see others."""
    gpus = sorted(path.name for path in around.dev.glob("nvidia[0-9]*"))
    for name in (_CONTROL, _MEMORY, *(gpus or ["nvidia0"])):
        yield _device(around.dev / name)


def unit(around: Surroundings) -> Iterator[Finding]:
    """The sandbox of the systemd unit, where there is one."""
    if not around.systemd.is_dir():
        return
    properties = "LoadState,PrivateDevices,DevicePolicy,DeviceAllow,MemoryDenyWriteExecute"
    text = around.run(["systemctl", "show", "kvstored", f"--property={properties}"])
    shown = [(name, value) for name, _, value in (line.partition("=") for line in text.splitlines())]
    settings = dict(shown)
    if settings.get("LoadState") != "loaded":
        return
    allowed = [value.split()[0] for name, value in shown if name == "DeviceAllow" and value]
    is_closed = bool(allowed) or settings.get("DevicePolicy") in ("closed", "strict")
    if settings.get("PrivateDevices") == "yes":
        yield fail("unit", "PrivateDevices=yes hides /dev/nvidia* from the daemon", _DROP_IN)
    elif settings.get("MemoryDenyWriteExecute") == "yes":
        advice = "MemoryDenyWriteExecute=no: the driver maps pages that it writes and executes"
        yield fail("unit", "MemoryDenyWriteExecute=yes keeps the CUDA driver from starting", advice)
    elif is_closed and (closed := [name for name in _ALLOWED_AS if not _is_allowed(name, allowed)]):
        yield fail("unit", f"DeviceAllow= leaves out {' and '.join(f'/dev/{name}' for name in closed)}", _DROP_IN)
    else:
        yield ok("unit", "lets the daemon open NVIDIA's devices")


def _device(path: Path) -> Finding:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        status = path.stat()
    except FileNotFoundError:
        seen = f"{path} does not exist: NVIDIA's driver is not installed or not loaded, or a container hides it"
        return fail(path.name, seen, "as root, nvidia-smi and `nvidia-modprobe -c 0 -u` make them until the next boot")
    except PermissionError:
        return fail(path.name, f"{path} may not be opened here", "its mode, or the device rules of a container")
    except OSError as error:
        return fail(path.name, f"{path} cannot be opened: {error.strerror}", "nvidia-smi, and `dmesg | grep NVRM`")
    if status.st_mode & _FOR_ALL == _FOR_ALL:
        return ok(path.name, f"{path} can be opened")
    seen = f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, group {status.st_gid}"
    return warn(path.name, seen, f"the daemon must be in the group: SupplementaryGroups={status.st_gid} in gpu.conf")


def _is_allowed(name: str, allowed: Sequence[str]) -> bool:
    return any(fnmatchcase(called, pattern) for called in _ALLOWED_AS[name] for pattern in allowed)
