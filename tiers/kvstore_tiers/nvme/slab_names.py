"""What slab files are called: by their number, and by what they are. Imports only modules that are loaded already."""

from __future__ import annotations

from pathlib import Path


def slab_path(slabs: Path, number: int, suffix: str = "slab") -> Path:
    return slabs / f"{number:08d}.{suffix}"


def slab_numbers(slabs: Path, suffix: str = "slab") -> list[int]:
    """Numbers of the files with this suffix, ascending. Names that are none of ours are left alone: a 1.slab beside
    00000001.slab is not the same slab once more."""
    named = ((path, int(path.stem)) for path in slabs.glob(f"*.{suffix}") if path.stem.isdecimal())
    return sorted(number for path, number in named if path == slab_path(slabs, number, suffix))
