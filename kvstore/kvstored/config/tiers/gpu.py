"""Kind "gpu": the memory of a CUDA device. A process of its own does the copies.

The tier stands behind the tier that clients map, as a place for blocks evicted there, or before it, with copies of
blocks that are used often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvstore_console.units import human_bytes
from kvstored.config.mistakes import ConfigError, need, one_of
from kvstored.config.section_fields import Table, section_of, size
from kvstored.config.tiers.base import AUTO, MachineSizes, Start, TierSection
from kvstored.policy_names import ADMISSIONS, SECOND_TOUCH

if TYPE_CHECKING:
    from kvstore_tiers.gpu import GpuTier

GRANULARITY_BYTES = 2 << 20  # what devices give out memory by
OFF = "off"
BOUNCE = "bounce"
FROM_NVME = (AUTO, "direct", BOUNCE, OFF)
LINK_SHARE = 0.25  # chosen, not measured: the rest of the link is for requests and for the engine's own copies


@dataclass(frozen=True, kw_only=True)
class GpuSection(TierSection):
    """The settings of a tier in a GPU's memory. `device` is the GPU's number, counted from 0 as by the CUDA driver.
    `admission` says which blocks get a copy in a tier that is before the host's tier.

    `rate_bytes` bounds copies that no request waits for, in bytes a second; None means `LINK_SHARE` of the link's
    observed speed, 0 no limit. `verify` has copied blocks checked on the device. `from_nvme` says how a tier before the
    host's gets blocks that only NVMe has. `register_host` lets the device copy DRAM without a copy in between."""

    KIND: ClassVar[str] = "gpu"
    MOST: ClassVar[int] = 8
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "kind": "gpu", "capacity": "0", "device": 0, "chunk": "32MiB", "bounce": "64MiB",
        "register_host": True, "verify": True, "before_host": False, "from_nvme": BOUNCE, "admission": SECOND_TOUCH,
        "rate": AUTO, "policy": "lfu-ttl", "ttl_s": 0,
    }  # fmt: skip

    admission: str
    rate_bytes: int | None
    device: int
    chunk_bytes: int
    bounce_bytes: int
    register_host: bool
    verify: bool
    before_host: bool
    from_nvme: str

    @classmethod
    def is_before_host(cls, table: Table) -> bool:
        return bool(table["before_host"])

    @classmethod
    def read(cls, name: str, table: Table, machine: MachineSizes) -> Self:
        sizes = {f"{key}_bytes": size(name, table, key) for key in ("capacity", "chunk", "bounce")}
        rate_bytes = None if table["rate"] == AUTO else size(name, table, "rate")
        return section_of(cls, name, table, {"name": name, "rate_bytes": rate_bytes, **sizes})

    def check(self, machine: MachineSizes) -> None:
        name, granularity = self.name, human_bytes(GRANULARITY_BYTES)
        need(self.capacity_bytes > 0, f'{name}.capacity is missing: write a size, for instance capacity = "8GiB"')
        need(self.device >= 0, f"{name}.device must be the number of a CUDA device, got {self.device}")
        need(
            self.chunk_bytes > 0 and self.chunk_bytes % GRANULARITY_BYTES == 0,
            f"{name}.chunk must be a multiple of {granularity}, got {human_bytes(self.chunk_bytes)}",
        )
        need(
            0 < self.bounce_bytes <= machine.memory_bytes // 4,
            f"{name}.bounce must be more than nothing, and at most a quarter of this machine's memory",
        )
        one_of(f"{name}.admission", self.admission, ADMISSIONS)
        one_of(f"{name}.from_nvme", self.from_nvme, FROM_NVME)
        need(
            self.before_host or self.from_nvme in (BOUNCE, OFF),
            f"{name}.from_nvme {self.from_nvme} means nothing to a tier behind DRAM: leave it out, or set "
            f"{name}.before_host = true",
        )
        self._need_one("chunk", self.chunk_bytes)
        super().check(machine)

    def open(self, start: Start) -> GpuTier:
        """Open the tier, empty, and wait until its worker process is ready. Raises ConfigError if there is no such
        device or no driver."""
        from kvstore_proto.arena import DEVICE_ARENAS
        from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings

        settings = GpuWorkerSettings(
            checks=self.verify, from_files=self.from_nvme if self.before_host else OFF, registers=self.register_host
        )
        try:
            return GpuTier(
                self.capacity_bytes,
                device=self.device,
                chunk_bytes=self.chunk_bytes,
                bounce_bytes=self.bounce_bytes,
                name=self.name,
                settings=settings,
                first_number=start.first_chunk or DEVICE_ARENAS,
                witness=start.witness,
            )
        except OSError as error:
            raise ConfigError(f"{self.name}: {error}") from None

    @property
    def place(self) -> str:
        return f"memory of CUDA device {self.device}"
