"""Compiled kernels, and what was measured of them, in the user's cache directory for the next process that needs them.

Owns the folder, and that a reader never sees half a file. Never decides what is kept, nor what a file is called.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from kvstore_proto.replaced_file import BESIDE, replaced_file

STALE_S = 3600.0  # no compilation takes so long: its process was killed


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/kvstored/kernels; what systemd gave a service; else in ~/.cache, where the user has a home."""
    root, of_service = os.environ.get("XDG_CACHE_HOME"), os.environ.get("CACHE_DIRECTORY")
    if not root and of_service:
        return Path(of_service) / "kernels"
    try:
        return Path(root or Path.home() / ".cache") / "kvstored" / "kernels"
    except RuntimeError:  # as of a container's user that no one knows
        return Path("/nonexistent")


def keep(target: Path, content: bytes) -> None:
    """Replace `target` by `content`. A full disk, or no such folder, costs the next start time."""
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(target.parent)
        with replaced_file(target, durable=False, is_shared=True) as file:
            file.write(content)


def sweep(folder: Path) -> None:
    """Remove what processes that were killed left half made."""
    for path in folder.glob(f"*{BESIDE}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < STALE_S:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
