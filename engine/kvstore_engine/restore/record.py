"""Records of the predictions and results of each restoration, and of a request's restored and stored parts.

The module has plain values: the last records, and totals of all. Times are the engine's clock's, in seconds; `at` is
the time of day.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

RECORDS = 64  # that are kept
WORK_ITEMS = 512  # of one record; the rest of a longer one is left out

WorkKind = Literal["compute", "load", "states"]
PLAN_REASONS = {
    "load": "loading is estimated to be faster than computing",
    "compute": "computing is estimated to be faster than loading",
    "tokens": "loading and computing at once is estimated to be fastest",
}


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work of a restoration: `tokens` tokens from position `first` on were computed, or loaded and readable
    at `end_s`. The kind "states" means that hidden states for a pipeline stage were loaded.
    """

    kind: WorkKind
    first: int
    tokens: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RestorationRecord:
    """The record of restoring the K/V of one prompt. Chunks are storage blocks. The chunks in DRAM were copied first;
    `mapped` is their number. All other counts are about the other chunks, `chunks` in number, whose tiers are in
    `tiers`.

    plan: "load" or "compute" for all of these chunks, "tokens" for both at once; empty if DRAM had all chunks, or
    nothing was stored. predicted_s: the predicted time of the plan; predicted_load_s, predicted_compute_s: the
    predicted times of loading and of computing all. actual_s: the time from the plan until all were present; None if
    ordinary steps computed the last ones, or if it was cut short. loaded, computed, lost, wasted: the numbers of chunks
    by their way; a lost chunk could not be loaded and was computed, a wasted one was both loaded and computed.
    load_busy_s, compute_busy_s: the seconds in which the link, and steps, worked for this prompt.

    stage: None, or the number of the pipeline stage that the record is about; its layers are [first, end) of `layers`.
    For a stage, `chunks` counts all whole chunks of the prompt, also chunks in DRAM and chunks that were not stored,
    which `tiers` does not count. inputs: the number of chunks whose hidden states the stage loaded. forwarded: the
    number of chunks that the stage had already, and computed for the next stage's hidden states.
    """

    request_id: str
    index: int
    at: float
    begun_s: float
    planned_s: float
    ended_s: float
    plan: str
    reason: str
    chunk_tokens: int
    first_token: int
    mapped: int
    chunks: int
    tiers: Mapping[str, int]
    predicted_s: float
    predicted_load_s: float
    predicted_compute_s: float
    actual_s: float | None
    loaded: int
    computed: int
    lost: int
    wasted: int
    load_busy_s: float
    compute_busy_s: float
    work: tuple[Work, ...] = ()
    stage: int | None = None
    layers: tuple[int, int] | None = None
    inputs: int = 0
    forwarded: int = 0

    @property
    def stored(self) -> int:
        """The number of the restored prompt's chunks (storage blocks) that some tier had."""
        return sum(self.tiers.values())

    def as_json(self) -> dict[str, object]:
        """Return all fields as a dictionary for JSON. The times of the pieces of `work` are seconds after the plan was
        made.
        """
        kept = asdict(self)
        kept["work"] = [
            {**asdict(each), "begin_s": each.begin_s - self.planned_s, "end_s": each.end_s - self.planned_s}
            for each in self.work
        ]
        for name in ("load", "compute"):
            busy_s = kept[f"{name}_busy_s"]
            kept[f"{name}_idle_s"] = None if self.actual_s is None else max(0.0, self.actual_s - busy_s)
        del kept["begun_s"], kept["planned_s"], kept["ended_s"]
        kept["lookup_s"] = self.planned_s - self.begun_s
        return kept


@dataclass(slots=True)
class RestorationTotals:
    """The sums over all restorations of an engine since its start. `predicted_s` and `actual_s` are sums over the
    restorations that loaded something and were not cut short.
    """

    by_plan: dict[str, int] = field(default_factory=lambda: {"load": 0, "compute": 0, "tokens": 0, "mapped": 0})
    chunks: dict[str, int] = field(
        default_factory=lambda: {"mapped": 0, "loaded": 0, "computed": 0, "lost": 0, "wasted": 0}
    )
    predicted_s: float = 0.0
    actual_s: float = 0.0


class RestorationLog:
    """The last 64 records of an engine's restorations of prompts, and sums over all restorations."""

    def __init__(self) -> None:
        self._records: deque[RestorationRecord] = deque(maxlen=RECORDS)
        self.totals = RestorationTotals()

    def add(self, record: RestorationRecord) -> None:
        self._records.append(record)
        totals = self.totals
        totals.by_plan[record.plan or "mapped"] += 1
        for name in totals.chunks:
            totals.chunks[name] += getattr(record, name)
        if record.actual_s is not None:
            totals.predicted_s += record.predicted_s
            totals.actual_s += record.actual_s

    def last(self, count: int) -> list[RestorationRecord]:
        """Return the last `count` records, the latest first; at most 64 are kept."""
        return list(reversed(self._records))[: max(0, count)]


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Figures about the restoration of one prompt. `lookup_s` is the time until the daemon's first answer, `restore_s`
    the time after it. `estimated_load_s` and `estimated_compute_s` are the predicted times of loading and of computing,
    which were compared. `reason` says why not more was restored.
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
    """The result of storing the blocks of one request in the daemon: the number of blocks by status. `store_s` is the
    time in seconds that storing took; generation did not wait for it.
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
