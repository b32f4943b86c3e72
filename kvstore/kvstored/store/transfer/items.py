"""The arguments and results of a lane: priorities, bounds, refusals, and its report; rules: see `lane`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Generic, TypeVar

Work = TypeVar("Work")


class Priority(IntEnum):
    DEMAND = 0  # a client waits for it
    PREFETCH = 1  # a guess that a client soon will
    DEMOTION = 2  # makes room, writes behind
    MAINTENANCE = 3  # scrubbing, moving, tidying


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one priority. `bytes_per_s`: None is unlimited; `burst_bytes` may be spent at once after a pause."""

    queued_items: int
    in_flight: int
    bytes_per_s: float | None = None
    burst_bytes: int = 64 << 20


def _default_limits() -> dict[Priority, Limits]:
    return {
        Priority.DEMAND: Limits(queued_items=8192, in_flight=8),
        Priority.PREFETCH: Limits(queued_items=2048, in_flight=1),
        Priority.DEMOTION: Limits(queued_items=8192, in_flight=4),
        Priority.MAINTENANCE: Limits(queued_items=1024, in_flight=1),
    }


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """Bounds of one lane. The priors describe the device until enough has been moved to know it. `spare_bytes_per_s`:
    for everything but demand together; or `spare_share`, of the device's rate while busy. 0 for both is no limit."""

    max_in_flight: int = 8
    limits: dict[Priority, Limits] = field(default_factory=_default_limits)
    quiet_s: float = 0.002
    quiet_max_s: float = 0.25
    prefetch_item_bytes: int = 4 << 20
    undated_s: float = 10.0
    aged_s: float = 1.0
    aged_share: float = 0.05
    prior_bytes_per_s: float = 1e9
    prior_latency_us: float = 200.0
    prior_bytes: int = 16 << 20  # how much the prior counts for
    spare_bytes_per_s: float = 0.0
    spare_share: float = 0.0
    spare_burst_bytes: int = 16 << 20

    @property
    def has_budget(self) -> bool:
        """For what is not demand."""
        return self.spare_share > 0 or self.spare_bytes_per_s > 0


class Refused(Enum):
    """Instead of a ticket: why an item is not queued."""

    QUEUE_FULL = "the queue of this priority is full"
    ITEM_TOO_LARGE = "larger than a prefetch item may be"
    CLOSED = "the lane is closed"


@dataclass(frozen=True, slots=True)
class Dispatch(Generic[Work]):
    """An item to start now; report `ticket` when it has ended."""

    ticket: int
    work: Work
    nbytes: int
    priority: Priority


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """A frozen report. Tuples are by Priority. `service_bytes_per_s` is the device's rate while busy;
    `bytes_per_s` what the lane moved lately.
    """

    name: str
    queued: tuple[int, ...]
    queued_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    moved_blocks: tuple[int, ...]
    moved_bytes: tuple[int, ...]
    refused: tuple[int, ...]
    cancelled: int
    failed: int
    bytes_per_s: float
    service_bytes_per_s: float
