"""Whether a path that an operator gave is an NVMe tier's directory at all, before anything is said about its state."""

from __future__ import annotations

from pathlib import Path


def what_is_wrong(directory: Path) -> str | None:
    """One line, or None. A crash may have left either without the other: slabs, or the file that names the format."""
    if not directory.is_dir():
        return f"{directory} is not a directory"
    if (directory / "slabs").is_dir() or (directory / "format").exists():
        return None
    below = directory / "nvme"  # an operator who gives the state directory means this
    hint = f"; did you mean {below}?" if (below / "slabs").is_dir() else ""
    return f"{directory} is not the directory of an NVMe tier: it has no slabs{hint}"
