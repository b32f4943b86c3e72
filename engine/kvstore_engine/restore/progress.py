"""One prefix on its way into one range of layers: the plan, the blocks that have come, and the expected time of the
rest.

The module owns the expectations by which loading and computing meet, and the record of the work, for a sequence of the
batch engine and for a pipeline's stage. It does not compute, copy or wait. A chunk is a storage block.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from kvstore_engine.restore.fetcher import BlockStream
from kvstore_engine.restore.record import WORK_ITEMS, RestorationRecord, Work, WorkKind
from kvstore_restore.costs import RestoreCosts
from kvstore_restore.learned import MAPPED, LearnedCosts
from kvstore_restore.plan import RestorePlan, StoredPrefix, plan, plans_by_axis
from kvstore_restore.pointers import Pointers

ABSENT = "absent"
_CAUTION = 1.2  # a step that was begun in error cannot be ended
_SLOW = 2  # a load takes so many times what was planned: computing is thought of again
_LEAST_STALL_S, _STALL_CHUNKS = 0.1, 4  # without an arrival
_FEW_CHUNKS = 2  # that the expectation counts for beside what a stream has shown


@dataclass(slots=True, eq=False)
class StreamTimes:
    """The measured times of a stream of chunks (storage blocks), in seconds: when it was opened, when the last chunk
    came, and for each tier the time from the opening to the tier's last chunk.
    """

    opened_s: float
    last_s: float
    expected_s: float = 0.0  # for what has come
    chunks: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False, kw_only=True)
class RestoreProgress:
    """The progress of restoring one prefix. Its chunks (storage blocks) are partly loaded and partly computed. `tiers`
    has the name of the tier of each chunk, from block number `first` on. `learned` predicts times and learns from the
    measured ones.
    """

    chunk_tokens: int
    chunk_bytes: int
    learned: LearnedCosts
    begun_s: float = 0.0
    first: int = 0
    tiers: tuple[str, ...] = ()
    plan: RestorePlan | None = None
    alone: tuple[float, float] = (0.0, 0.0)  # predicted seconds of loading alone, of computing alone
    pointers: Pointers = field(default_factory=lambda: Pointers(0))
    costs: RestoreCosts | None = None
    stream: BlockStream | None = None
    stream_times: StreamTimes | None = None
    lost: int = 0
    now_s: float = 0.0
    ahead_s: float = 0.0  # until the links work for this prefix
    planned_s: float = 0.0
    compute_s: float = 0.0
    load_busy_s: float = 0.0
    work: list[Work] = field(default_factory=list)

    def decide(self, prefix: StoredPrefix, costs: RestoreCosts, *, loads_all: bool = False) -> RestorePlan:
        """Choose by the predicted `costs` which chunks (storage blocks) of `prefix` to load and which to compute, and
        return that plan. With `loads_all` all chunks are loaded.
        """
        plans = plans_by_axis(prefix, costs)
        self.costs = costs
        self.alone = plans["load"].finish_s, plans["compute"].finish_s
        self.plan = plans["load"] if loads_all else plan(prefix, costs)
        return self.plan

    def open(self, stream: BlockStream, now_s: float) -> None:
        """Note that `stream` was opened at the time `now_s` (seconds) to load chunks (storage blocks)."""
        self.stream, self.stream_times = stream, StreamTimes(now_s, now_s)

    def note_arrival(self, first: int, tiers: tuple[str, ...], at_s: float) -> None:
        """Note that storage blocks arrived at the time `at_s` (seconds): one for each entry of `tiers`, which is the
        block's tier, from block number `first` on.
        """
        link = self.stream_times
        if link is None:
            return
        for tier in tiers:
            if tier != MAPPED:
                link.chunks[tier] += 1
                link.seconds[tier] = at_s - link.opened_s
                link.expected_s += self._load_s(tier)
        self.note("load", first * self.chunk_tokens, len(tiers) * self.chunk_tokens, link.last_s, at_s)
        link.last_s = at_s

    def note_step(self, first: int, tokens: int, begin_s: float, end_s: float) -> None:
        """Note that a step computed `tokens` tokens from position `first` on, from the time `begin_s` to `end_s`
        (seconds).
        """
        self.compute_s += end_s - begin_s
        self.note("compute", first, tokens, begin_s, end_s)

    def note(self, kind: WorkKind, first: int, tokens: int, begin_s: float, end_s: float) -> None:
        """Record a piece of work of the kind `kind`: `tokens` tokens from position `first` on, done from the time
        `begin_s` to `end_s` (seconds).
        """
        if len(self.work) < WORK_ITEMS:
            self.work.append(Work(kind, first, tokens, begin_s, end_s))

    def learn_link(self, end_s: float | None = None) -> None:
        """Learn how fast each tier loads from the stream of blocks, which ended at the time `end_s` (seconds), or with
        its last block if `end_s` is None.
        """
        link, self.stream, self.stream_times = self.stream_times, None, None
        if link is None:
            return
        self.load_busy_s += (link.last_s if end_s is None else end_s) - link.opened_s
        beside = self.compute_s > self.load_busy_s / 2
        for tier, count in link.chunks.items():
            seconds = link.seconds[tier] / count
            self.learned.observe_load(tier, self.chunk_bytes, seconds, beside_computing=beside)

    def left_s(self, chunk: int = 0) -> float:
        """Return the predicted seconds until chunk number `chunk` (a storage block) and all stored chunks after it are
        loaded; infinity if nothing arrives any more.
        """
        left, link = Counter(self.tiers[each] for each in self.pointers.stored(chunk)), self.stream_times
        seconds = max((count * self._load_s(tier) for tier, count in left.items()), default=0.0)
        if link is None or not left:
            return seconds
        one_s = max(map(self._load_s, left))
        few_s = _FEW_CHUNKS * one_s
        seconds *= (link.last_s - link.opened_s + few_s) / (link.expected_s + few_s) if few_s else 1.0
        silent_s = self.now_s - link.last_s
        if silent_s > max(_LEAST_STALL_S, _STALL_CHUNKS * one_s):
            return float("inf")
        return max(0.0, seconds - silent_s)

    def is_overtaken(self, chunk: int, computing_s: float) -> bool:
        """Return True if computing up to the end of chunk number `chunk` (a storage block), which takes `computing_s`
        seconds if nothing else runs, is expected to end before that chunk is loaded.
        """
        assert self.costs is not None and self.plan is not None
        left_s = self.left_s(chunk)
        if self.stream is None:
            left_s += self.ahead_s
        elif self.plan.axis == "load" and left_s <= _SLOW * self.plan.finish_s:
            return False
        return computing_s * self.costs.contention.compute * _CAUTION <= left_s

    def recorded(self, request_id: str, ended_s: float, actual_s: float | None, reason: str) -> RestorationRecord:
        """Return the record of this restoration's plan and result, for observers. `ended_s` is its end, and `actual_s`
        the time from the plan until all blocks were present, or None. `reason` says why not more was restored.
        """
        return RestorationRecord(
            request_id=request_id,
            index=0,
            at=time.time(),
            begun_s=self.begun_s,
            planned_s=self.planned_s or ended_s,
            ended_s=ended_s,
            plan="" if self.plan is None else self.plan.axis,
            reason=reason,
            chunk_tokens=self.chunk_tokens,
            first_token=0,
            mapped=0,
            chunks=len(self.tiers),
            tiers=dict(Counter(tier for tier in self.tiers if tier != ABSENT)),
            predicted_s=0.0 if self.plan is None else self.plan.finish_s,
            predicted_load_s=self.alone[0],
            predicted_compute_s=self.alone[1],
            actual_s=actual_s,
            loaded=self.pointers.loaded,
            computed=self.pointers.computed,
            lost=self.lost,
            wasted=self.pointers.wasted,
            load_busy_s=self.load_busy_s,
            compute_busy_s=self.compute_s,
            work=tuple(self.work),
        )

    def _load_s(self, tier: str) -> float:
        """Return the predicted seconds in which a link brings a chunk, beside computing."""
        assert self.costs is not None
        return self.costs.links[tier].load_s(self.chunk_bytes) * self.costs.contention.load
