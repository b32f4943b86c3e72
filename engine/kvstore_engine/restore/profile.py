"""Saves a cost model for the next run.

Owns one small JSON file per model, thread count and processor in the cache folder. A file that is missing, damaged or
from another version is ignored, as is one that cannot be written.
"""

import contextlib
import hashlib
import json
import os
import platform
from pathlib import Path

from kvstore_engine.restore.costs import CostModel

_VERSION = 2  # 1: before q8_0 matrices were interleaved, which made computing cheaper


class CostProfile:
    """The saved cost model of `weights_digest`, run by `threads` threads on this machine."""

    def __init__(self, folder: Path, weights_digest: str, threads: int) -> None:
        machine = hashlib.blake2b(_processor().encode(), digest_size=4).hexdigest()
        self.path = folder / "profiles" / f"{weights_digest[:16]}-{threads}t-{machine}.json"

    def load(self) -> CostModel:
        """The saved model, or a new one."""
        costs = CostModel()
        try:
            kept = json.loads(self.path.read_text())
            if kept["version"] == _VERSION:
                costs.compute.restore(**kept["compute"])
                costs.load.restore(**kept["load"])
        except (OSError, ValueError, KeyError, TypeError):
            return CostModel()
        return costs

    def save(self, costs: CostModel) -> None:
        """Save `costs` atomically; does nothing if the folder cannot be written."""
        kept = {"version": _VERSION, "compute": costs.compute.state(), "load": costs.load.state()}
        part = self.path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(kept))
            part.replace(self.path)


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line
    return platform.processor() or platform.machine()
