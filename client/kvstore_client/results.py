"""The results of a session: plain frozen records, and counts. Misses are values here, with a reason in words."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

UNKNOWN_TIER = "unknown"  # of a probe: only the daemon knows
TIER_NAMES = ("absent", "gpu", "host", "memory", "nvme", "remote")  # by kvstore.v1.TierCode
_NAME_OF_CODE = TIER_NAMES + TIER_NAMES[:1] * (256 - len(TIER_NAMES))
MISS_REASONS = (  # by kvstore.v1.MissReason
    "",
    "never_stored",
    "evicted",
    "expired",
    "quota",
    "other_fingerprint",
    "corrupt",
    "invalidated",
    "dropped",
    "read_failed",
    "forgotten",
    "no_room",
    "over_quota",
    "declined",
    "lossy_only",
)
REASON_NO_DAEMON = "no_daemon"  # degraded: the daemon was not asked
REASON_DEADLINE = "deadline"  # the daemon did not answer in time
REASON_VERIFY_FAILED = "verify_failed"  # the bytes in the arena are not those of the requested blocks
REASON_NO_ARENA = "arena_not_mapped"  # the daemon did not hand over the memory in time
REASON_ABSENT = "absent"  # of a probe: the lookup index says so, and does not know why
REASON_UNKNOWN = "unknown"  # of a probe: no index, or it is not certain
REASON_LATE = "late"  # stored, but in a slower tier, and not promoted before the deadline
MAY_COME = (REASON_LATE, "no_room", "over_quota")  # of a stored block: a later get may find it in DRAM
REASON_SHORT = "short"  # the prompt is shorter than one block
REASON_THROTTLED = "throttled"  # of a get: this client holds as many leases as it may
REASON_LIMIT = "limit"  # of a prefetch: the daemon queues no more now


def tier_names(codes: bytes) -> tuple[str, ...]:
    """Return the name of each tier in `codes`, the protocol's numbers. A number that this client does not know is
    "absent".
    """
    return tuple([_NAME_OF_CODE[code] for code in codes])


def miss_reason(code: int) -> str:
    return MISS_REASONS[code] if 0 <= code < len(MISS_REASONS) else ""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a lookup: the longest prefix that can be restored, `blocks` blocks or `tokens` tokens long.
    `reason` says why it is no longer, or is "" if every block that was asked for is stored.
    """

    blocks: int = 0
    tokens: int = 0
    tiers: tuple[str, ...] = ()  # of each block asked for, also those beyond `blocks`
    estimated_load_s: float = 0.0  # to have all `blocks` mapped, behind what is queued now
    reason: str = ""
    load_s: tuple[float, ...] = ()  # of each of the `blocks`, what it adds to that; empty where that is not known


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The last block boundary of a prompt at which every layer group of a model can resume: `blocks` is the number of
    blocks before it. `ended_by` is the number of the group that prevents a later boundary, and `reason` says why. They
    are None and "" if the boundary is the end of the prompt. If the daemon did not answer, or the prompt is shorter
    than a block ("short"), only `reason` is set. `LayerGroup.needed_blocks` says which blocks of a group must be loaded
    for the resume.
    """

    blocks: int = 0
    tokens: int = 0
    ended_by: int | None = None
    reason: str = ""
    estimated_load_s: float = 0.0  # to have all needed blocks of all groups mapped


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The outcome of a prefetch, in blocks: `resident_blocks` are in memory already, `scheduled_blocks` will be
    promoted. `reason` is "limit" if more blocks are stored but the budget or the daemon's queue was full. It says why
    if the daemon did not answer for all blocks, and is "" otherwise.
    """

    resident_blocks: int = 0
    scheduled_blocks: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Deleted:
    """The outcome of a deletion, as counts of blocks. `blocks` were deleted, with `payload_bytes` bytes, and `missing`
    were not stored. `leased` were kept because they are leased or being moved. `continued` were kept because stored
    blocks outside the request continue them, so that no stored chain gets a hole. `reason` says why the daemon did not
    answer for all blocks, or is "".
    """

    blocks: int = 0
    payload_bytes: int = 0
    leased: int = 0
    continued: int = 0
    missing: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of a session since it was opened. `hits` counts the lookups and gets that found at least one block, and
    `misses` the others.
    """

    state: str
    lookups: int = 0
    probes: int = 0
    probes_unknown: int = 0  # of which ended where only the daemon knows
    gets: int = 0
    puts: int = 0
    hits: int = 0
    misses: int = 0
    timeouts: int = 0
    verify_failures: int = 0
    reconnects: int = 0
    blocks_restored: int = 0
    blocks_stored: int = 0
    bytes_restored: int = 0
    bytes_stored: int = 0
    grpc_message_bytes: int = 0  # of the stream, gRPC's or direct, in both directions: keys, ids, offsets
    grpc_payload_bytes: int = 0  # in the fields of the wire that can carry opaque bytes
    last_error: str = ""


class ClientCounters:
    """A set of named counters of a session. Each call of `add` or `read` is atomic for all counters that it names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)
