"""The kinds of tier, in the order of the tiers: the fastest first. A GPU may also stand before the kind "shared".

A new kind needs its file, its import and its entry in `KINDS`.
"""

from typing import Final

from kvstored.config.tiers.base import Cluster, MachineSizes, Start, TierSection
from kvstored.config.tiers.dram import MemorySection, SharedSection
from kvstored.config.tiers.gpu import GpuSection
from kvstored.config.tiers.nvme import NvmeSection
from kvstored.config.tiers.remote import RemoteSection

__all__ = [
    "KINDS",
    "Cluster",
    "GpuSection",
    "MachineSizes",
    "MemorySection",
    "NvmeSection",
    "RemoteSection",
    "SharedSection",
    "Start",
    "TierSection",
]

KINDS: Final[dict[str, type[TierSection]]] = {
    kind.KIND: kind for kind in (SharedSection, GpuSection, MemorySection, NvmeSection, RemoteSection)
}
