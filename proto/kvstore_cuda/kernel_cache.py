"""Compiled kernels, and measurements of them, in the user's cache directory for the next process that needs them.

The module owns the folder, and makes sure that a reader never sees half a file. The caller chooses names and contents.
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
    """Return the directory for compiled kernels: $XDG_CACHE_HOME/kvstored/kernels, or the cache directory that systemd
    gave a service, or ~/.cache/kvstored/kernels.
    """
    root, of_service = os.environ.get("XDG_CACHE_HOME"), os.environ.get("CACHE_DIRECTORY")
    if not root and of_service:
        return Path(of_service) / "kernels"
    try:
        return Path(root or Path.home() / ".cache") / "kvstored" / "kernels"
    except RuntimeError:  # as of a container's user that no one knows
        return Path("/nonexistent")


def keep(target: Path, content: bytes) -> None:
    """Write `content` to the file `target`, replacing an older file as a whole, for other processes to read. If the
    disk is full or the directory cannot be made, nothing is written.
    """
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(target.parent)
        with replaced_file(target, durable=False, is_shared=True) as file:
            file.write(content)


def sweep(folder: Path) -> None:
    """Remove the unfinished files in `folder` that killed processes left more than an hour ago."""
    for path in folder.glob(f"*{BESIDE}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < STALE_S:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
