"""The tiers of slower memory that the configuration names: opening them, and how listings name their place."""

from __future__ import annotations

from contextlib import AsyncExitStack

from kvstore_tiers.host import HostTier
from kvstored.config.schema import MemorySection


def open_memory(section: MemorySection, until: AsyncExitStack) -> HostTier:
    """An empty tier, which takes memory as it is filled. `until` closes it."""
    tier = HostTier(
        section.capacity_bytes,
        arena_bytes=section.arena_bytes,
        copy_threads=section.copy_threads,
        name=section.name,
        numa_node=section.numa_node,
    )
    until.callback(tier.close)
    return tier


def place_of(section: MemorySection) -> str:
    """Where its blocks are, for a listing."""
    return f"memory of NUMA node {section.numa_node}" if section.numa_node >= 0 else "memory"
