"""The NVMe tier: preallocated slab files of one slot size each, records in front."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore_tiers.nvme.directory_files import DirectoryError, DirectoryInUse, DirectoryUnusable, FormatUnsupported

if TYPE_CHECKING:
    from kvstore_tiers.nvme.tier import NvmeTier

__all__ = ["DirectoryError", "DirectoryInUse", "DirectoryUnusable", "FormatUnsupported", "NvmeTier"]


def __getattr__(name: str) -> Any:
    """Import the tier only when it is asked for: the early scan begins before NumPy is loaded."""
    if name == "NvmeTier":
        from kvstore_tiers.nvme.tier import NvmeTier

        return NvmeTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
