"""The rivals' own environments: `.venv-rivals-NAME` in the repository's root, made on first use.

Owns which versions are compared, and says what is downloaded before it is. Never touches the project's own `.venv`.
An environment is complete when its marker holds the list it was made from: another list makes it anew in place.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.report import progress

ROOT = Path(__file__).resolve().parents[2]
PYTORCH_CPU = "https://download.pytorch.org/whl/cpu"


class CannotSetUp(RuntimeError):
    """An environment could not be made; the message says what to do."""


@dataclass(frozen=True)
class Environment:
    """`steps` are the arguments of one `pip install` each."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    download: str

    @property
    def directory(self) -> Path:
        return ROOT / f".venv-rivals-{self.name}"

    def bin(self, command: str) -> Path:
        return self.directory / "bin" / command

    @property
    def is_complete(self) -> bool:
        marker = self.directory / ".installed"
        return marker.exists() and marker.read_text() == repr(self.steps)

    def ensure(self) -> None:
        """Make it if it is not there. Raises CannotSetUp."""
        if self.is_complete:
            return
        progress(f"{self.name}: installing into {self.directory}, from PyPI: {self.download}")
        python = _python()
        if not self.bin("python").exists():
            _run([python, "-m", "venv", str(self.directory)], self.name)
        for step in self.steps:
            _run([str(self.bin("python")), "-m", "pip", "install", "--quiet", "--retries", "1", *step], self.name)
        (self.directory / ".installed").write_text(repr(self.steps))


# Its metadata asks for CUDA packages that it does not need on CPUs, hence the list by hand.
LMCACHE = Environment(
    "lmcache",
    (
        ("--extra-index-url", PYTORCH_CPU, "torch==2.13.0+cpu"),
        ("--no-deps", "lmcache==0.5.6"),
        (
            "aiofile", "aiofiles", "blake3", "aiohttp", "cryptography", "fastapi", "httpx", "msgspec", "numpy<=2.2.6",
            "numba", "nvtx", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp",
            "opentelemetry-exporter-prometheus", "prometheus_client", "psutil", "py-cpuinfo", "pyyaml", "pyzmq",
            "grpcio", "protobuf<7", "safetensors", "sortedcontainers", "uvicorn", "httptools", "cachetools", "redis",
            "huggingface_hub",
        ),
    ),
    "LMCache 0.5.6, torch 2.13.0 for CPUs and what they need, about 500 MB (1.5 GB on disk)",
)  # fmt: skip
MOONCAKE = Environment(
    "mooncake",
    (("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy<=2.2.6"),),
    "Mooncake 0.3.13.post1 without CUDA and numpy, about 60 MB",
)
REDIS = Environment(
    "redis",
    (("redis==8.1.0", "hiredis==3.5.0", "numpy<=2.2.6"),),
    "redis-py 8.1.0 with the hiredis parser and numpy, about 20 MB",
)


def redis_server() -> Path:
    """The server's binary, which comes from the system and not from PyPI. Raises CannotSetUp."""
    found = shutil.which("redis-server")
    if found is None:
        raise CannotSetUp("redis-server is not installed: apt-get install redis-server")
    return Path(found)


def in_network_namespace(command: Sequence[str | Path]) -> Sequence[str | Path]:
    """`command` where it sees a loopback of its own and nothing else. Raises CannotSetUp."""
    script = 'ip link set lo up && exec "$@"'
    for start in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        wrapped = [*start, "--", "sh", "-c", script, "sh"]
        if _works([*wrapped, "true"]):
            return [*wrapped, *command]
    raise CannotSetUp(
        "no network namespace can be made, and Mooncake listens on 0.0.0.0: run as root, allow unprivileged user "
        "namespaces, or install iproute2 and util-linux if ip or unshare is missing"
    )


def with_tmpfs(command: Sequence[str | Path], directory: Path, nbytes: int) -> Sequence[str | Path]:
    """`command` where a tmpfs of `nbytes` is mounted on `directory`, which ends with it. Raises CannotSetUp."""
    script = 'mount -t tmpfs -o "size=$0" tmpfs "$1" && shift && exec "$@"'
    for start in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        wrapped = [*start, "--", "sh", "-c", script, str(nbytes), str(directory)]
        if _works([*wrapped, "true"]):
            return [*wrapped, *command]
    raise CannotSetUp("no file system can be mounted: run as root, or allow unprivileged user namespaces")


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _python() -> str:
    """LMCache and Mooncake have wheels for 3.11 and 3.12; ours is preferred if it is one of them."""
    if sys.version_info[:2] in ((3, 11), (3, 12)):
        return sys.executable
    for name in ("python3.12", "python3.11"):
        if found := shutil.which(name):
            return found
    raise CannotSetUp("the rivals need Python 3.11 or 3.12: apt-get install python3.11 python3.11-venv")


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-6:])
        raise CannotSetUp(f"{name}: {' '.join(command[:6])} ... failed:\n{tail}")
