"""Says where the costs of a model are kept for the next run: one small file per model, thread count and processor."""

import contextlib
import hashlib
import platform
from pathlib import Path

from kvstore_engine.devices import CPU


def profile_path(folder: Path, weights_digest: str, threads: int, device: str = CPU, part: str = "") -> Path:
    """The file of `weights_digest`, run by `threads` threads and `device` on this machine, in the cache folder
    `folder`. `part`: of the model, where it has costs of its own."""
    machine = hashlib.blake2b(_processor().encode(), digest_size=4).hexdigest()
    beside = "" if device == CPU else f"-{device.replace(':', '')}"
    beside += f"-{part}" if part else ""
    return folder / "profiles" / f"{weights_digest[:16]}-{threads}t-{machine}{beside}.json"


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line
    return platform.processor() or platform.machine()
