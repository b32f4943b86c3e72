"""Kind "nvme": slabs on a file system, by direct I/O. Durable: its blocks outlive the daemon."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from kvstore_console.units import human_bytes
from kvstored.config.mistakes import need, need_within, one_of
from kvstored.config.section_fields import Table, section_of, size
from kvstored.config.tiers.base import CodedSection, MachineSizes, Start, coding_of, container
from kvstored.policy_names import ADMISSIONS

if TYPE_CHECKING:
    from kvstore_tiers.nvme.tier import NvmeTier

MIN_ENDURANCE_BYTES = 1 << 20
MAX_QUARANTINE_SLOTS = 65536


@dataclass(frozen=True, kw_only=True)
class NvmeSection(CodedSection):
    """The settings of the NVMe tier. `admission` and the fields `endurance_…` decide which blocks may be written there,
    so that the drive lasts."""

    KIND: ClassVar[str] = "nvme"
    CHOOSES_CODECS: ClassVar[bool] = True

    path: Path
    slab_bytes: int
    io_threads: int
    require_direct: bool
    admission: str
    quarantine_slots: int
    endurance_bytes_per_day: int
    endurance_wait_ms: int

    @classmethod
    def read(cls, name: str, table: Table, machine: MachineSizes) -> Self:
        path = Path(table["path"]).absolute() if table["path"] else machine.state_dir / name
        capacity_bytes = size(name, table, "capacity", _file_system_bytes(path))
        slab_bytes = container(name, table, "slab", capacity_bytes)
        known = {"name": name, "path": path, "capacity_bytes": capacity_bytes, "slab_bytes": slab_bytes}
        return section_of(cls, name, table, known)

    def check(self, machine: MachineSizes) -> None:
        name = self.name
        self._need_threads("io_threads", self.io_threads)
        need(self.endurance_wait_ms >= 0, f"{name}.endurance_wait_ms must not be negative")
        one_of(f"{name}.admission", self.admission, ADMISSIONS)
        need_within(f"{name}.quarantine_slots", self.quarantine_slots, 0, MAX_QUARANTINE_SLOTS)
        super().check(machine)
        if not self.enabled:
            return
        disk_bytes = _file_system_bytes(self.path)
        self._need_one("slab", self.slab_bytes)
        need(
            not 0 < self.endurance_bytes_per_day < MIN_ENDURANCE_BYTES,
            f"{name}.endurance_bytes_per_day must be 0 (no limit) or at least {human_bytes(MIN_ENDURANCE_BYTES)}",
        )
        need(
            not disk_bytes or self.capacity_bytes <= disk_bytes,
            f"{name}.capacity {human_bytes(self.capacity_bytes)} is more than the file system of {self.path} has, "
            f"{human_bytes(disk_bytes)}; lower it, or set {name}.path to another disk",
        )

    def open(self, start: Start) -> NvmeTier:
        from kvstore_tiers.nvme.tier import NvmeTier

        return NvmeTier.open(
            self.path,
            self.capacity_bytes,
            slab_bytes=self.slab_bytes,
            io_threads=self.io_threads,
            require_direct=self.require_direct,
            quarantine_slots=self.quarantine_slots,
            name=self.name,
            early_scan=start.early_scan,
            coding=coding_of(self.codec, self.codec_staging_bytes, encrypts=start.encrypts),
            keys=start.keys,
        )

    @property
    def place(self) -> str:
        return str(self.path)


def _file_system_bytes(path: Path) -> int:
    """Return the size of the file system; 0 if unknown."""
    for candidate in (path, *path.parents):
        try:
            stat = os.statvfs(candidate)
        except OSError:
            continue
        return stat.f_frsize * stat.f_blocks
    return 0
