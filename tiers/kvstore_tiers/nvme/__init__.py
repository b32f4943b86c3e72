"""The NVMe tier: preallocated slab files of one slot size each, records in front, an index that can be rebuilt."""

from __future__ import annotations

from kvstore_tiers.nvme.errors import DirectoryError, DirectoryInUse, DirectoryUnusable, FormatUnsupported
from kvstore_tiers.nvme.tier import NvmeTier

__all__ = ["DirectoryError", "DirectoryInUse", "DirectoryUnusable", "FormatUnsupported", "NvmeTier"]
