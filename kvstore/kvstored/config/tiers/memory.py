"""Kind "memory": slower memory between the tier that clients map and the durable one, on a NUMA node or anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvstored.config.mistakes import need
from kvstored.config.section_fields import Table, section_of, size
from kvstored.config.tiers.base import Machine, Start, TierSection, container

if TYPE_CHECKING:
    from kvstore_tiers.host import HostTier

_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, kw_only=True)
class MemorySection(TierSection):
    """Volatile, and not mapped by clients. `numa_node` -1: wherever the system puts it."""

    KIND: ClassVar[str] = "memory"
    MOST: ClassVar[int] = 4
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "kind": "memory", "capacity": "0", "arena": "auto", "copy_threads": 1, "policy": "lfu-ttl", "ttl_s": 0,
        "numa_node": -1,
    }  # fmt: skip

    arena_bytes: int
    copy_threads: int
    numa_node: int

    @classmethod
    def read(cls, name: str, table: Table, machine: Machine) -> Self:
        capacity_bytes = size(name, table, "capacity", machine.memory_bytes)
        arena_bytes = container(name, table, "arena", capacity_bytes)
        known = {"name": name, "capacity_bytes": capacity_bytes, "arena_bytes": arena_bytes}
        return section_of(cls, name, table, known)

    def check(self, machine: Machine) -> None:
        name, node = self.name, self.numa_node
        need(self.capacity_bytes > 0, f'{name}.capacity is missing: write a size, for instance capacity = "8GiB"')
        self._need_memory(machine)
        self._need_one("arena", self.arena_bytes)
        self._need_threads("copy_threads", self.copy_threads)
        need(node >= -1, f"{name}.numa_node must be the number of a node, or -1, got {node}")
        need(
            node < 0 or (_NODES / f"node{node}").is_dir(),
            f"{name}.numa_node: this machine has no NUMA node {node} (see {_NODES})",
        )
        super().check(machine)

    def open(self, start: Start) -> HostTier:
        """Empty; it takes memory as it is filled."""
        from kvstore_tiers.host import HostTier

        return HostTier(
            self.capacity_bytes,
            arena_bytes=self.arena_bytes,
            copy_threads=self.copy_threads,
            name=self.name,
            numa_node=self.numa_node,
        )

    @property
    def place(self) -> str:
        return f"memory of NUMA node {self.numa_node}" if self.numa_node >= 0 else "memory"
