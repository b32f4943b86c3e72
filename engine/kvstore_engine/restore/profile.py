"""The files that keep a model's costs for the next run: one small file per model, thread count and processor."""

import contextlib
import hashlib
import platform
from pathlib import Path

from kvstore_engine.devices import CPU


def profile_path(folder: Path, weights_digest: str, threads: int, device: str = CPU, part: str = "") -> Path:
    """Return the path below the cache `folder` of the file that keeps the measured costs of one model with `threads`
    threads and `device` on this machine. `part` names a part of the model with costs of its own.
    """
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
