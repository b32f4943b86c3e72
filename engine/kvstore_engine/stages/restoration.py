"""One stage's part of a restoration under way: what is stored, what is planned, what has come.

Owns the expectations on which the stage decides, and the record of what it did. It never computes, copies or waits. A
chunk is a storage block.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvstore_engine.executors.logits import FloatArray
from kvstore_engine.restore.fetcher import Stream
from kvstore_engine.restore.link import Link, left_s
from kvstore_engine.restore.record import PLAN_REASONS, WORK_ITEMS, RestorationRecord, Work, WorkKind
from kvstore_engine.stages.finding import ABSENT, Found, leading
from kvstore_restore.costs import RestoreCosts
from kvstore_restore.learned import LearnedCosts
from kvstore_restore.plan import Plan, Prefix, plan, plans_by_axis
from kvstore_restore.pointers import Pointers
from kvstore_restore.stages import Stages

MAPPED = "host"
_CAUTION = 1.2  # a step that was begun in error cannot be ended
_SLOW = 2  # a load takes so many times what was planned: computing is thought of again


@dataclass(slots=True, eq=False)
class Step:
    """A chunk that a stage computes."""

    stage: int
    chunk: int
    begun_s: float
    done: Future[FloatArray]

    @property
    def has_news(self) -> bool:
        return self.done.done()


@dataclass(slots=True, eq=False)
class StageSide:
    """`chunk_bytes`, `input_bytes`: a chunk's K/V of this stage, and its hidden states."""

    number: int
    layers: range
    found: Found
    chunk_tokens: int
    chunk_bytes: int
    input_bytes: int
    learned: LearnedCosts
    plan: Plan | None = None
    alone: tuple[float, float] = (0.0, 0.0)  # predicted seconds of loading alone, of computing alone
    rest_s: float = 0.0  # predicted, of computing the chunks that are not stored
    pointers: Pointers = field(default_factory=lambda: Pointers(()))
    stages: Stages | None = None
    kv: Stream | None = None
    inputs: Stream | None = None
    link: Link | None = None
    inputs_end: int = 0  # inputs have been asked for up to here
    inputs_at_s: float = 0.0  # the last one came, or they were asked for
    inputs_loaded: int = 0
    forwarded: int = 0
    lost: int = 0
    now_s: float = 0.0
    planned_s: float = 0.0
    done_s: float | None = None  # when all chunks were present
    load_busy_s: float = 0.0
    compute_s: float = 0.0
    costs: RestoreCosts | None = None
    work: list[Work] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """Leading chunks whose K/V are stored."""
        return leading(self.found.kv)

    @property
    def stored_inputs(self) -> int:
        return leading(self.found.inputs)

    @property
    def loaded_bytes(self) -> int:
        """Of K/V and of hidden states."""
        return self.pointers.loaded * self.chunk_bytes + self.inputs_loaded * self.input_bytes

    def make_plan(self, before: StageSide | None, *, loads_all: bool = False) -> None:
        """Decide how much to load of what is stored. `before`: the stage before, which has its plan. `loads_all`: all
        of it, if it comes.
        """
        tiers = self.found.kv[: self.stored]
        for tier, seconds in self.found.load_s.items():
            if tier != MAPPED:  # which costs the daemon nothing, but is copied here
                self.learned.expect_load(tier, self.chunk_bytes, seconds)
        self.costs = costs = self.learned.costs(*self.found.kv, *self.found.inputs, MAPPED)
        counted = Counter(self.found.inputs[: self.stored_inputs])
        input_tier = max(counted, key=lambda tier: counted[tier], default="")
        prefix = Prefix(
            tiers,
            self.chunk_tokens,
            self.chunk_bytes,
            input_bytes=self.input_bytes if input_tier else 0,
            input_tier=input_tier,
        )
        plans = plans_by_axis(prefix, costs, layerwise=False)
        self.plan = plan(prefix, costs, layerwise=False)
        self.alone = plans["load"].finish_s, plans["compute"].finish_s
        self.rest_s = self._computing_s(range(self.stored, len(self.found.kv)))
        # Without stored states a stage can compute only what the one before computes as well.
        is_fed = before is None or before.plan is None or before.plan.axis == "compute" or self.stored_inputs > 0
        if loads_all or (self.plan.axis == "compute" and not is_fed and self.stored):
            self.plan = plans["load"]
        self.pointers = Pointers(self.found.kv, overtakes=self._overtakes, loads=self.plan.axis != "compute")
        for chunk in range(self.stored, len(self.found.kv)):
            self.pointers.lose(chunk)

    def wanted_inputs(self) -> int:
        """Up to which chunk inputs are to be asked for now; `inputs_end`: no further."""
        assert self.stages is not None and self.plan is not None
        wanted = self.stages.wanted(self.number)
        if wanted is None or self.inputs is not None or not self.inputs_end <= wanted < self.stored_inputs:
            return self.inputs_end
        planned = self.plan.whole if not self.inputs_end and self.plan.axis == "tokens" else self.stored_inputs
        return min(self.stored_inputs, max(planned, wanted) + 2)

    def note_arrival(self, first: int, chunks: int, at_s: float) -> None:
        """The K/V of chunks first, first + 1, … have arrived; of what is mapped a stream shows no speed."""
        if self.link is None:
            return
        for tier in self.found.kv[first : first + chunks]:
            if tier != MAPPED:
                self.link.note(tier, at_s, self._load_s(tier))
        self._add("load", first, chunks, self.link.last_s, at_s)
        self.link.last_s = at_s

    def note_inputs(self, first: int, chunks: int, at_s: float) -> None:
        """Hidden states have arrived."""
        self._add("states", first, chunks, self.inputs_at_s, at_s)
        self.inputs_at_s = at_s

    def note_step(self, chunk: int, begin_s: float, end_s: float, *, beside_loading: bool) -> None:
        """A chunk has been computed."""
        self.compute_s += end_s - begin_s
        pieces = [(self.chunk_tokens, chunk * self.chunk_tokens)]
        self.learned.observe_batch(pieces, end_s - begin_s, beside_loading=beside_loading)
        self._add("compute", chunk, 1, begin_s, end_s)

    def learn_link(self) -> None:
        """From the stream that has ended."""
        if self.link is not None:
            seconds = self.link.last_s - self.link.opened_s
            self.load_busy_s += seconds
            beside = self.compute_s > seconds / 2
            for tier, count in self.link.chunks.items():
                each_s = self.link.seconds[tier] / count
                self.learned.observe_load(tier, self.chunk_bytes, each_s, beside_computing=beside)
        self.link = None

    def lose_kv(self) -> None:
        """No more K/V come. Those of a chunk that is being computed are not missed."""
        tiers = set(self.found.kv) - {ABSENT}
        under_way = None if self.stages is None else self.stages.computing(self.number)
        self.lost += sum(chunk != under_way for tier in tiers for chunk in self.pointers.stored(tier))
        self.pointers.lose_all()

    def record(self, request_id: str, begun_s: float, ended_s: float) -> RestorationRecord:
        """What the stage planned and did for a request, whose restoration took all of [begun_s, ended_s)."""
        assert self.plan is not None
        load_s, compute_s = self.alone
        return RestorationRecord(
            request_id=request_id,
            index=0,
            at=time.time(),
            begun_s=begun_s,
            planned_s=self.planned_s,
            ended_s=ended_s,
            plan=self.plan.axis if self.stored else "",
            reason=self._reason(self.plan),
            chunk_tokens=self.chunk_tokens,
            first_token=0,
            mapped=0,
            chunks=len(self.found.kv),
            tiers=dict(Counter(self.found.kv[: self.stored])),
            predicted_s=self.plan.finish_s + self.rest_s,
            predicted_load_s=load_s + self.rest_s,
            predicted_compute_s=compute_s + self.rest_s,
            actual_s=None if self.done_s is None else self.done_s - self.planned_s,
            loaded=self.pointers.loaded,
            computed=self.pointers.computed,
            lost=self.lost,
            wasted=self.pointers.wasted,
            load_busy_s=self.load_busy_s,
            compute_busy_s=self.compute_s,
            work=tuple(self.work),
            stage=self.number,
            layers=(self.layers.start, self.layers.stop),
            inputs=self.inputs_loaded,
            forwarded=self.forwarded,
        )

    def _reason(self, plan: Plan) -> str:
        if self.lost:
            return f"{self.lost} of {self.stored} stored blocks could not be loaded"
        return PLAN_REASONS[plan.axis] if self.stored else "nothing resident"

    def _overtakes(self, chunk: int) -> bool:
        """Computing up to `chunk`, from now on, is expected to be done before its load, and can be begun at all."""
        assert self.stages is not None and self.costs is not None and self.plan is not None
        if not self.stages.is_within_reach(self.number, chunk):
            return False
        counts = {tier: len(self.pointers.stored(tier, chunk)) for tier in set(self.found.kv) - {ABSENT}}
        waiting_s = left_s(
            self.link, {tier: count for tier, count in counts.items() if count}, self._load_s, self.now_s
        )
        if self.plan.axis == "load" and waiting_s <= _SLOW * self.plan.finish_s:
            return False
        computing_s = self._computing_s(range(self.pointers.head, chunk + 1))
        return computing_s * self.costs.contention.compute * _CAUTION <= waiting_s

    def _computing_s(self, chunks: range) -> float:
        """Seconds to compute `chunks` alone, each in a step."""
        assert self.costs is not None
        cost, tokens = self.costs.compute, self.chunk_tokens
        return sum(cost.chunk_s(chunk * tokens, tokens) for chunk in chunks)

    def _load_s(self, tier: str) -> float:
        assert self.costs is not None
        return self.costs.links[tier].load_s(self.chunk_bytes) * self.costs.contention.load

    def _add(self, kind: WorkKind, first: int, chunks: int, begin_s: float, end_s: float) -> None:
        if len(self.work) < WORK_ITEMS:
            size = self.chunk_tokens
            self.work.append(Work(kind, first * size, chunks * size, begin_s, end_s))
