"""One stage's part of a restoration under way: what is stored, what is planned, what has come.

Owns the expectations on which the stage decides. It never computes, copies or waits. A chunk is a storage block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvstore_client.restore.costs import RestoreCosts
from kvstore_client.restore.learned import LearnedCosts
from kvstore_client.restore.plan import Axis, Plan, Prefix, plan, plans_by_axis
from kvstore_client.restore.pointers import Pointers
from kvstore_client.restore.stages import Stages
from kvstore_engine.restore.fetcher import Stream
from kvstore_engine.restore.link import Link, left_s
from kvstore_engine.stages.pipeline import FloatArray

ABSENT = "absent"
MAPPED = "host"
_CAUTION = 1.2  # a step that was begun in error cannot be ended
_SLOW = 2  # a load takes so many times what was planned: computing is thought of again


@dataclass(frozen=True, slots=True)
class Found:
    """The tier of each chunk's K/V and of its input, "absent" where there is none; always so for the first stage's
    inputs.
    """

    kv: tuple[str, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a stage planned and did. Chunks by how they came; `lost` ones were stored, and could not be loaded.

    forwarded: chunks computed again, for the next stage's inputs alone.   inputs: hidden states that were loaded.
    predicted_s, actual_s: until all of the stage's chunks were present.
    """

    layers: range
    plan: Axis
    chunks: int
    stored: int
    loaded: int
    computed: int
    lost: int
    inputs: int
    forwarded: int
    predicted_s: float
    actual_s: float
    compute_s: float


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
    pointers: Pointers = field(default_factory=lambda: Pointers(()))
    stages: Stages | None = None
    kv: Stream | None = None
    inputs: Stream | None = None
    link: Link | None = None
    inputs_end: int = 0  # inputs have been asked for up to here
    inputs_loaded: int = 0
    forwarded: int = 0
    lost: int = 0
    now_s: float = 0.0
    done_s: float = 0.0
    compute_s: float = 0.0
    costs: RestoreCosts | None = None

    @property
    def stored(self) -> int:
        """Leading chunks whose K/V are stored."""
        return _leading(self.found.kv)

    @property
    def stored_inputs(self) -> int:
        return _leading(self.found.inputs)

    def make_plan(self, before: StageSide | None, *, loads_all: bool = False) -> None:
        """Decide how much to load of what is stored. `before`: the stage before, which has its plan. `loads_all`: all
        of it, if it comes.
        """
        tiers = self.found.kv[: self.stored]
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

    def note_chunk(self, tier: str, at_s: float) -> None:
        """A chunk's K/V have arrived."""
        if self.link is not None and tier != MAPPED:
            self.link.note(tier, at_s, self._load_s(tier))

    def learn_link(self) -> None:
        """From the stream that has ended."""
        if self.link is not None:
            beside = self.compute_s > (self.link.last_s - self.link.opened_s) / 2
            for tier, count in self.link.chunks.items():
                seconds = self.link.seconds[tier] / count
                self.learned.observe_load(tier, self.chunk_bytes, seconds, beside_computing=beside)
        self.link = None

    def lose_kv(self) -> None:
        """No more K/V come."""
        tiers = set(self.found.kv) - {ABSENT}
        self.lost += sum(len(self.pointers.stored(tier)) for tier in tiers)
        self.pointers.lose_all()

    def record(self, begun_s: float) -> StageRecord:
        assert self.plan is not None
        return StageRecord(
            layers=self.layers,
            plan=self.plan.axis,
            chunks=len(self.found.kv),
            stored=self.stored,
            loaded=self.pointers.loaded,
            computed=self.pointers.computed,
            lost=self.lost,
            inputs=self.inputs_loaded,
            forwarded=self.forwarded,
            predicted_s=self.plan.finish_s,
            actual_s=self.done_s - begun_s,
            compute_s=self.compute_s,
        )

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
        chunks = range(self.pointers.head, chunk + 1)
        computing_s = sum(self.costs.compute.chunk_s(at * self.chunk_tokens, self.chunk_tokens) for at in chunks)
        return computing_s * self.costs.contention.compute * _CAUTION <= waiting_s

    def _load_s(self, tier: str) -> float:
        assert self.costs is not None
        return self.costs.links[tier].load_s(self.chunk_bytes) * self.costs.contention.load


def _leading(tiers: Sequence[str]) -> int:
    return next((at for at, tier in enumerate(tiers) if tier == ABSENT), len(tiers))
