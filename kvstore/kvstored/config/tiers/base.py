"""The settings of a tier of any kind: the common settings, and the parts that a kind adds.

A kind is a file of this package: the keys of its tiers, their meaning, and the function that opens one. `KINDS` lists
them. A kind imports the code of its tiers only when it opens one: the configuration is read first of all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from kvstore_console.units import human_bytes
from kvstored.config.mistakes import need, need_within, one_of
from kvstored.config.section_fields import Table, size
from kvstored.policy_names import FOR_STUDIES, POLICIES

if TYPE_CHECKING:
    from kvstore_tiers.arena import ChunkWitness
    from kvstore_tiers.base import Coding, Tier
    from kvstore_tiers.nvme.data_keys import DataKeys
    from kvstore_tiers.nvme.early_scan import EarlyRecordScan

AUTO, AUTO_CONTAINERS = "auto", 32
MIN_CONTAINER_BYTES, MIN_AUTO_CONTAINER_BYTES = 1 << 20, 16 << 20
MAX_AUTO_CONTAINER_BYTES = {"arena": 64 << 20, "slab": 256 << 20}
MAX_THREADS = 64
NO_CODEC, AUTO_CODEC = "none", "auto"
MIN_STAGING_BYTES = 1 << 20


class MachineSizes(NamedTuple):
    """The sizes of this machine, in bytes, to which percentages and defaults of settings refer."""

    memory_bytes: int
    state_dir: Path


class Cluster(NamedTuple):
    """The parameters that a remote tier needs: the secret of the node or its cluster, and a function from a tenant's
    digest to its setting for remote tiers ("" if it has none)."""

    secret: bytes
    mode_of: Callable[[bytes], str]


@dataclass(frozen=True)
class Start:
    """The parameters for opening a tier. `witness` is notified of its memory, to keep it over a restart. `first_arena`
    and `first_chunk` are the first numbers for new arenas and for new chunks of device memory. `early_scan` is a scan
    of the NVMe directory that has begun. `keys` are the keys of encrypted blocks; with `encrypts` there may be any."""

    witness: ChunkWitness | None = None
    first_arena: int = 1
    first_chunk: int = 0  # the tier's own choice
    early_scan: EarlyRecordScan | None = None
    keys: DataKeys | None = None
    encrypts: bool = False
    cluster: Cluster | None = None


@dataclass(frozen=True, kw_only=True)
class TierSection(ABC):
    """The settings of one tier, of any kind. `policy`, `ttl_s` (seconds without a use) and `keep_worth` (least expected
    uses an hour) decide which blocks leave the tier, and when."""

    KIND: ClassVar[str]
    MOST: ClassVar[int] = 1  # tiers of this kind
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}  # of a kind that has no [[tier]] in reference.toml

    name: str
    capacity_bytes: int
    policy: str
    ttl_s: float
    keep_worth: float = 0.0
    enabled: bool = True

    @classmethod
    def is_before_host(cls, table: Table) -> bool:
        """Return whether a tier with the settings `table` comes before the one that clients map (it is faster)."""
        return False

    @classmethod
    @abstractmethod
    def read(cls, name: str, table: Table, machine: MachineSizes) -> Self:
        """Return the settings of the tier `name` made from `table`, which has every key of this kind of tier. `machine`
        has the sizes for percentages. Raises ConfigError."""

    def check(self, machine: MachineSizes) -> None:
        """Check these settings against the sizes of `machine`. Raises ConfigError for impossible values."""
        need(
            self.policy not in FOR_STUDIES,
            f"{self.name}.policy: {self.policy!r} is for studies (kvstored simulate --policy {self.policy}); "
            f"a daemon has {', '.join(POLICIES)}",
        )
        one_of(f"{self.name}.policy", self.policy, POLICIES)
        self._need_amount("ttl_s", self.ttl_s, "seconds")

    @abstractmethod
    def open(self, start: Start) -> Tier:
        """Open the tier with these settings and return it; the caller closes it. Raises the errors of the tier's
        class."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The directory, device or address where the tier's blocks are, as a text for listings."""

    def _need_amount(self, key: str, value: float, unit: str) -> None:
        need(
            math.isfinite(value) and value >= 0,
            f"{self.name}.{key} must be 0 (never) or a number of {unit}, got {value}",
        )

    def _need_memory(self, machine: MachineSizes) -> None:
        capacity, memory = human_bytes(self.capacity_bytes), human_bytes(machine.memory_bytes)
        need(
            self.capacity_bytes <= machine.memory_bytes,
            f"{self.name}.capacity {capacity} is more than this machine's memory, {memory}",
        )

    def _need_one(self, key: str, nbytes: int, staging_bytes: int = 0) -> None:
        """Raise ConfigError if an arena or slab does not fit."""
        less = f" less staging {human_bytes(staging_bytes)}" if staging_bytes else ""
        need(
            self.capacity_bytes - staging_bytes >= nbytes,
            f"{self.name}.capacity {human_bytes(self.capacity_bytes)}{less} does not hold one {key} of "
            f"{human_bytes(nbytes)}; lower {self.name}.{key}",
        )

    def _need_threads(self, key: str, threads: int) -> None:
        need_within(f"{self.name}.{key}", threads, 1, MAX_THREADS)


@dataclass(frozen=True, kw_only=True)
class CodedSection(TierSection):
    """The settings of a tier whose blocks may be compressed with `codec`. `codec_staging_bytes` of DRAM hold blocks
    while they are encoded or decoded.
    """

    CHOOSES_CODECS: ClassVar[bool] = False  # whether `codec` may be "auto"

    codec: str = NO_CODEC
    codec_staging_bytes: int = 0

    def check(self, machine: MachineSizes) -> None:
        from kvstore_tiers.codecs import codec_names, codec_of

        super().check(machine)
        offered = (*codec_names(), AUTO_CODEC) if self.CHOOSES_CODECS else codec_names()
        one_of(f"{self.name}.codec", self.codec, offered)
        codec = codec_of(self.codec)
        lacks = codec.lacks() if codec is not None else ""
        need(not lacks, f"{self.name}.codec: {self.codec!r} needs more packages: {lacks}")
        need(
            self.codec == NO_CODEC or self.codec_staging_bytes >= MIN_STAGING_BYTES,
            f"{self.name}.codec_staging must be at least {human_bytes(MIN_STAGING_BYTES)}",
        )


def coding_of(codec: str, staging_bytes: int, *, encrypts: bool = False) -> Coding:
    """Return the form that blocks have in a tier: the compression `codec`, with `staging_bytes` of memory for encoding
    and encrypting."""
    from kvstore_tiers.base import UNCODED, Coding

    return UNCODED if codec == NO_CODEC and not encrypts else Coding(codec, staging_bytes)


def container(name: str, table: Table, key: str, capacity_bytes: int) -> int:
    """Return the size in bytes of one arena or slab of the tier `name`: the value of `key` in `table`. For "auto" it is
    a small part of `capacity_bytes`, so that a block of a new size takes little of the tier. Raises ConfigError."""
    if table[key] != AUTO:
        nbytes = size(name, table, key)
        need(nbytes >= MIN_CONTAINER_BYTES, f"{name}.{key} must be at least 1MiB")
        return nbytes
    least_bytes = min(MIN_AUTO_CONTAINER_BYTES, capacity_bytes // 8)  # large blocks fill small containers badly
    chosen_bytes = max(least_bytes, min(MAX_AUTO_CONTAINER_BYTES[key], capacity_bytes // AUTO_CONTAINERS))
    return max(MIN_CONTAINER_BYTES, chosen_bytes // MIN_CONTAINER_BYTES * MIN_CONTAINER_BYTES)
