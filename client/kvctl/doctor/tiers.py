"""Checks of GPU tiers and remote tiers. GPU tiers: the library for the driver, NVIDIA's devices, and whether the
daemon's unit may open them. Remote tiers: their packages, the daemon's report about the store, encryption, and the
files with their secrets.

NVIDIA's driver is never started: that would load modules and take device memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from kvctl.doctor.sockets import user_name
from kvctl.doctor.surroundings import DaemonSettings, Finding, Surroundings, fail, ok, warn
from kvstore_proto.version import pip_install

_EXTRA = f"{pip_install('remote')}, in the daemon's environment"
_PACKAGES = {
    "redis": "redis", "rediss": "redis", "unix": "redis", "mooncake": "mooncake", "s3": "obstore", "gs": "obstore",
    "az": "obstore", "file": "obstore",
}  # fmt: skip
_SECRET_BYTES = 32
_DROP_IN = "install systemd/kvstored.service.d/gpu.conf as deploy/README.md says, then restart kvstored"
_CONTROL, _MEMORY = "nvidiactl", "nvidia-uvm"
# What a unit calls a device when it allows it; names of modules are patterns of systemd's.
_ALLOWED_AS = {
    _CONTROL: ("char-195", "char-nvidia", "char-nvidiactl", "char-nvidia-frontend", "/dev/nvidiactl"),
    _MEMORY: ("char-nvidia-uvm", "/dev/nvidia-uvm"),
}
_FOR_ALL = stat.S_IROTH | stat.S_IWOTH


def remote_tiers(settings: DaemonSettings) -> list[str]:
    """Return the names of the remote tiers in `settings`."""
    return [name for name in settings.tiers("remote", mark="encrypt") if f"{name}.url" in settings.values]


def remote_tier(around: Surroundings, name: str) -> Iterator[Finding]:
    """Check the remote tier `name`."""
    values = around.settings.values
    if values.get(f"{name}.enabled", "true").lower() != "true":
        yield ok(name, "switched off: nothing is written to its store or asked of it")
        return
    yield from _packages(name, values[f"{name}.url"].partition("://")[0])
    yield _state(around, name)
    yield from _encryption(around.settings, name)
    yield from _private(around, f"{name}.credentials_file")


def cluster(around: Surroundings) -> Iterator[Finding]:
    """Check the cluster secret, from which nodes derive equal keys so that they find each other's blocks."""
    path = _file(around.settings, "cluster.secret_file")
    if path is None:
        seen = "cluster.secret_file is not set: no other node finds this node's blocks"
        yield ok("cluster secret", seen, "to share them, give all nodes the same file: docs/remote.md")
        return
    yield from _private(around, "cluster.secret_file", least_bytes=_SECRET_BYTES)


def _packages(name: str, scheme: str) -> Iterator[Finding]:
    wanted = ["cryptography", *([_PACKAGES[scheme]] if scheme in _PACKAGES else [])]
    missing = [package for package in wanted if find_spec(package) is None]
    if missing:
        yield fail(name, f"needs {' and '.join(missing)}, not installed where kvctl runs", _EXTRA)


def _state(around: Surroundings, name: str) -> Finding:
    if around.status is None:
        return ok(name, "whether its store answers is not known: the daemon was not asked")
    for part in around.status.degraded:
        if part.part == name:
            advice = (
                "the node goes on without it, and tries again every 2 s: is the store up, its address and its "
                "credentials right, is it quicker than timeout_ms?"
            )
            return warn(name, f"its store is {part.mode}: {part.reason}", advice)
    return ok(name, "no complaint about its store (kvctl tiers shows what it has)")


def _encryption(settings: DaemonSettings, name: str) -> Iterator[Finding]:
    risk = "who can read the store can read prompts, who can write to it can forge blocks"
    if settings.values.get(f"{name}.encrypt", "true").lower() != "true":
        yield warn(
            "encryption", f"{name}.encrypt is off: {risk}", "set encrypt = true, unless the store is yours alone"
        )
    plain = [
        key.split(".")[1]
        for key, value in settings.values.items()
        if key.startswith("tenant.") and key.endswith(".remote") and value == "plain"
    ]
    if plain:
        seen = f'off for tenant {", ".join(plain)} (remote = "plain"): {risk}'
        yield warn("encryption", seen, 'set remote = "encrypted", or leave it out')


def _private(around: Surroundings, setting: str, least_bytes: int = 1) -> Iterator[Finding]:
    """Check that a file of secrets belongs to the daemon or root and is closed to all others, with at least
    `least_bytes`.
    """
    path = _file(around.settings, setting)
    if path is None:
        return
    name = "cluster secret" if setting.startswith("cluster.") else "credentials"
    try:
        status = path.stat()
    except FileNotFoundError:
        yield fail(name, f"{setting}: {path} does not exist", "make it, mode 0600: the daemon needs it to start")
        return
    except PermissionError:
        yield ok(name, f"{path} is closed to user {user_name(around.uid)}, as it should be")
        return
    seen = f"{path}, mode {stat.S_IMODE(status.st_mode):04o}, owner {user_name(status.st_uid)}"
    if not stat.S_ISREG(status.st_mode):
        yield fail(name, f"{setting}: {path} is not a regular file", "name a file")
    elif status.st_mode & 0o077:
        yield fail(name, f"{seen}: others can reach it; the daemon refuses that", f"chmod 600 {path}")
    elif os.access(path, os.R_OK) and len(path.read_bytes().strip()) < least_bytes:
        advice = f"head -c 32 /dev/urandom | base64 > {path}"
        yield fail(name, f"{setting}: {path} is too short, {least_bytes} bytes are needed", advice)
    else:
        yield ok(name, seen)


def _file(settings: DaemonSettings, setting: str) -> Path | None:
    """Return the path in a setting; None if no file is set, for which a daemon reports "None"."""
    path = settings.path(setting)
    return None if path is None or str(path) == "None" else path


def gpu_tiers(settings: DaemonSettings) -> list[str]:
    """Return the names of the GPU tiers in `settings`."""
    return settings.tiers("gpu", mark="from_nvme")


def library() -> Iterator[Finding]:
    try:
        is_there = find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # not even its namespace
        is_there = False
    if is_there:
        yield ok("cuda-bindings", "installed where kvctl runs")
    else:
        advice = f"{pip_install('gpu')}, in the daemon's environment"
        yield fail("cuda-bindings", "not installed where kvctl runs", advice)


def devices(around: Surroundings) -> Iterator[Finding]:
    """Check that the device files that the NVIDIA driver opens exist, as this process sees them. A systemd unit or a
    container may see others.
    """
    gpus = sorted(path.name for path in around.dev.glob("nvidia[0-9]*"))
    for name in (_CONTROL, _MEMORY, *(gpus or ["nvidia0"])):
        yield _device(around.dev / name)


def unit(around: Surroundings) -> Iterator[Finding]:
    """Check whether the sandbox of the systemd unit, if there is one, lets the daemon open NVIDIA's devices."""
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
