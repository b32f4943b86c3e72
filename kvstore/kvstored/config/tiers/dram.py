"""Kind "shared": DRAM in arenas that clients map. A put writes into this tier, and a get leases from it.

Kind "memory": slower memory between that tier and the durable one, on a NUMA node or anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvstore_console.units import human_bytes
from kvstored.config.mistakes import need, one_of
from kvstored.config.section_fields import Table, section_of, size
from kvstored.config.tiers.base import CodedSection, MachineSizes, Start, TierSection, coding_of, container
from kvstored.policy_names import WITH_WORTH

if TYPE_CHECKING:
    from kvstore_tiers.host import HostTier

WARM_RESTARTS = ("auto", "systemd", "holder", "off")
VERIFY_READS = ("off", "first", "always")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, kw_only=True)
class SharedSection(TierSection):
    """The settings of the tier in DRAM that clients map. Its blocks are lost when the daemon ends, unless the setting
    for warm restart keeps them."""

    KIND: ClassVar[str] = "shared"

    staging_bytes: int
    arena_bytes: int
    sealed: bool
    prefault: bool
    prefault_ahead_bytes: int
    copy_threads: int
    verify_reads: str
    min_free_bytes: int
    warm_restart: str
    warm_linger_s: float

    @classmethod
    def read(cls, name: str, table: Table, machine: MachineSizes) -> Self:
        capacity_bytes = size(name, table, "capacity", machine.memory_bytes)
        known = {
            "name": name,
            "capacity_bytes": capacity_bytes,
            "staging_bytes": min(size(name, table, "staging"), capacity_bytes // 4),
            "arena_bytes": container(name, table, "arena", capacity_bytes),
            "min_free_bytes": size(name, table, "min_free", machine.memory_bytes),
        }
        return section_of(cls, name, table, known)

    def check(self, machine: MachineSizes) -> None:
        name, memory = self.name, human_bytes(machine.memory_bytes)
        self._need_memory(machine)
        self._need_threads("copy_threads", self.copy_threads)
        need(
            self.min_free_bytes < machine.memory_bytes,
            f"{name}.min_free {human_bytes(self.min_free_bytes)} leaves nothing of this machine's memory, {memory}",
        )
        one_of(f"{name}.warm_restart", self.warm_restart, WARM_RESTARTS)
        need(
            math.isfinite(self.warm_linger_s) and self.warm_linger_s >= 0,
            f"{name}.warm_linger_s must be a number of seconds, got {self.warm_linger_s}",
        )
        one_of(f"{name}.verify_reads", self.verify_reads, VERIFY_READS)
        self._need_one("arena", self.arena_bytes, self.staging_bytes)
        need(self.staging_bytes >= 1 << 20, f"{name}.staging must be at least 1MiB")
        super().check(machine)
        self._need_amount("keep_worth", self.keep_worth, "uses an hour")
        need(
            not self.keep_worth or self.policy in WITH_WORTH,
            f"{name}.keep_worth means nothing to {name}.policy {self.policy}, which has no worth: set {name}.policy to "
            f"{', '.join(WITH_WORTH)}, or {name}.ttl_s instead",
        )

    def open(self, start: Start) -> HostTier:
        from kvstore_tiers.host import HostTier

        return HostTier(
            self.capacity_bytes,
            arena_bytes=self.arena_bytes,
            mode="sealed" if self.sealed else "owned",
            copy_threads=self.copy_threads,
            name=self.name,
            witness=start.witness,
            first_number=start.first_arena,
        )

    @property
    def place(self) -> str:
        return "memfd arenas"


@dataclass(frozen=True, kw_only=True)
class MemorySection(CodedSection):
    """The settings of a tier in memory that clients do not map, such as slower memory. `numa_node` is the NUMA node of
    the memory; -1 leaves the choice to the system."""

    KIND: ClassVar[str] = "memory"
    MOST: ClassVar[int] = 4
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "kind": "memory", "capacity": "0", "arena": "auto", "copy_threads": 1, "policy": "lfu-ttl", "ttl_s": 0,
        "numa_node": -1, "codec": "none", "codec_staging": "64MiB",
    }  # fmt: skip

    arena_bytes: int
    copy_threads: int
    numa_node: int

    @classmethod
    def read(cls, name: str, table: Table, machine: MachineSizes) -> Self:
        capacity_bytes = size(name, table, "capacity", machine.memory_bytes)
        arena_bytes = container(name, table, "arena", capacity_bytes)
        known = {"name": name, "capacity_bytes": capacity_bytes, "arena_bytes": arena_bytes}
        return section_of(cls, name, table, known)

    def check(self, machine: MachineSizes) -> None:
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
        """Open the tier, empty. It takes memory as it is filled."""
        from kvstore_tiers.host import HostTier, SlowerMemory

        return HostTier(
            self.capacity_bytes,
            arena_bytes=self.arena_bytes,
            copy_threads=self.copy_threads,
            name=self.name,
            slower=SlowerMemory(self.numa_node, coding_of(self.codec, self.codec_staging_bytes)),
        )

    @property
    def place(self) -> str:
        return f"memory of NUMA node {self.numa_node}" if self.numa_node >= 0 else "memory"
