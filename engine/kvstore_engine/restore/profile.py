"""Where the costs of a model are kept for the next run: one small file per model, thread count and processor."""

import contextlib
import hashlib
import platform
from pathlib import Path


def profile_path(folder: Path, weights_digest: str, threads: int) -> Path:
    """The file of `weights_digest`, run by `threads` threads on this machine, in the cache folder `folder`."""
    machine = hashlib.blake2b(_processor().encode(), digest_size=4).hexdigest()
    return folder / "profiles" / f"{weights_digest[:16]}-{threads}t-{machine}.json"


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line
    return platform.processor() or platform.machine()
