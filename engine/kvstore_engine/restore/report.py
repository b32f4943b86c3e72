"""What a request restored and stored: plain values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a request restored. `reason` explains why no more was restored.

    lookup_s: until the first answer; restore_s: the rest, promotion and copies. The two estimates are what was compared
    (see `plan`).
    """

    tokens: int = 0
    bytes: int = 0
    resident_blocks: int = 0
    lookup_s: float = 0.0
    restore_s: float = 0.0
    estimated_load_s: float = 0.0
    estimated_compute_s: float = 0.0
    reason: str = "no store"


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What a request stored, in blocks, by the statuses of a put.

    store_s: the time in puts, for which generation did not wait.
    """

    stored: int = 0
    present: int = 0
    no_room: int = 0
    over_quota: int = 0
    declined: int = 0
    throttled: int = 0
    failed: int = 0
    store_s: float = 0.0
    reason: str = ""
