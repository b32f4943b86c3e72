"""One stage's part of a restoration under way: the stored chunks, the plan, and the chunks that have come.

The module owns the stage's plan and the record of its work; `restore.progress` has the expectations on which it
decides. It does not compute, copy or wait. A chunk is a storage block.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kvstore_engine.executors.logits import FloatArray
from kvstore_engine.restore.fetcher import BlockStream
from kvstore_engine.restore.progress import RestoreProgress
from kvstore_engine.restore.record import PLAN_REASONS, RestorationRecord
from kvstore_engine.stages.stores import StageLookup, leading
from kvstore_restore.learned import MAPPED
from kvstore_restore.plan import RestorePlan, StoredPrefix
from kvstore_restore.pointers import Pointers
from kvstore_restore.stages import Stages


@dataclass(slots=True, eq=False)
class ChunkStep:
    """A step of one pipeline stage that is under way: stage number `stage` computes chunk (storage block) number
    `chunk` since the time `begun_s`. `done` is the future of the chunk's hidden states.
    """

    stage: int
    chunk: int
    begun_s: float
    done: Future[FloatArray]

    @property
    def has_news(self) -> bool:
        return self.done.done()


@dataclass(slots=True, eq=False, kw_only=True)
class StageSide(RestoreProgress):
    """The progress of restoring one prompt in one stage of a pipeline. `stream` loads the K/V of the stage's layers;
    `inputs` loads the hidden states that the stage computes from, `input_bytes` bytes for each chunk (storage block).
    """

    number: int
    layers: range
    found: StageLookup
    input_bytes: int
    rest_s: float = 0.0  # predicted, of computing the chunks that are not stored
    stages: Stages | None = None
    inputs: BlockStream | None = None
    inputs_end: int = 0  # inputs have been asked for up to here
    inputs_at_s: float = 0.0  # the last one came, or they were asked for
    inputs_loaded: int = 0
    forwarded: int = 0
    done_s: float | None = None  # when all chunks were present

    @property
    def stored(self) -> int:
        """The number of leading chunks (storage blocks) whose K/V the daemon has."""
        return leading(self.found.kv)

    @property
    def stored_inputs(self) -> int:
        return leading(self.found.inputs)

    @property
    def loaded_bytes(self) -> int:
        """The bytes of K/V and hidden states that this stage has loaded so far."""
        return self.pointers.loaded * self.chunk_bytes + self.inputs_loaded * self.input_bytes

    def make_plan(self, before: StageSide | None, *, loads_all: bool = False) -> RestorePlan:
        """Decide which of the stored chunks (storage blocks) this stage loads and which it computes, and return the
        plan. `before` is the previous stage, with its plan. With `loads_all` all stored chunks are loaded.
        """
        self.tiers = self.found.kv
        for tier, seconds in self.found.load_s.items():
            if tier != MAPPED:  # which costs the daemon nothing, but is copied here
                self.learned.expect_load(tier, self.chunk_bytes, seconds)
        costs = self.learned.costs(*self.found.kv, *self.found.inputs, MAPPED)
        counted = Counter(self.found.inputs[: self.stored_inputs])
        input_tier = max(counted, key=lambda tier: counted[tier], default="")
        prefix = StoredPrefix(
            self.found.kv[: self.stored],
            self.chunk_tokens,
            self.chunk_bytes,
            input_bytes=self.input_bytes if input_tier else 0,
            input_tier=input_tier,
        )
        plan = self.decide(prefix, costs, loads_all=loads_all)
        self.rest_s = self._computing_s(range(self.stored, len(self.found.kv)))
        # Without stored states a stage can compute only what the one before computes as well.
        is_fed = before is None or before.plan is None or before.plan.axis == "compute" or self.stored_inputs > 0
        if plan.axis == "compute" and not is_fed and self.stored:
            plan = self.decide(prefix, costs, loads_all=True)
        self.pointers = Pointers(len(self.found.kv), overtakes=self._overtakes, loads=plan.axis != "compute")
        for chunk in range(self.stored, len(self.found.kv)):
            self.pointers.lose(chunk)
        return plan

    def wanted_inputs(self) -> int:
        """Return the number of chunks (storage blocks), from the prompt's start, up to which hidden states should be
        requested now; it is `inputs_end` if no more are needed.
        """
        assert self.stages is not None and self.plan is not None
        wanted = self.stages.wanted(self.number)
        if wanted is None or self.inputs is not None or not self.inputs_end <= wanted < self.stored_inputs:
            return self.inputs_end
        planned = self.plan.whole if not self.inputs_end and self.plan.axis == "tokens" else self.stored_inputs
        return min(self.stored_inputs, max(planned, wanted) + 2)

    def note_inputs(self, first: int, chunks: int, at_s: float) -> None:
        """Note that the hidden states of `chunks` chunks (storage blocks) from number `first` on arrived at the time
        `at_s` (seconds).
        """
        size = self.chunk_tokens
        self.note("states", first * size, chunks * size, self.inputs_at_s, at_s)
        self.inputs_at_s = at_s

    def lose_kv(self) -> None:
        """Note that no more K/V will be loaded for this stage, so that the chunks (storage blocks) that are left must
        be computed.
        """
        under_way = None if self.stages is None else self.stages.computing(self.number)
        self.lost += sum(chunk != under_way for chunk in self.pointers.stored())
        self.pointers.lose_all()

    def lose_inputs(self) -> None:
        """Note that the hidden states that this stage has requested will not arrive any more."""
        assert self.stages is not None
        for chunk in range(self.inputs_end):
            self.stages.lose_input(self.number, chunk)

    def record(self, request_id: str, ended_s: float) -> RestorationRecord:
        """Return the record of this stage's plan and work for the request `request_id`, until the time `ended_s`
        (seconds).
        """
        actual_s = None if self.done_s is None else self.done_s - self.planned_s
        record = self.recorded(request_id, ended_s, actual_s, self._reason())
        return replace(
            record,
            plan=record.plan if self.stored else "",
            predicted_s=record.predicted_s + self.rest_s,
            predicted_load_s=record.predicted_load_s + self.rest_s,
            predicted_compute_s=record.predicted_compute_s + self.rest_s,
            stage=self.number,
            layers=(self.layers.start, self.layers.stop),
            inputs=self.inputs_loaded,
            forwarded=self.forwarded,
        )

    def _reason(self) -> str:
        if self.lost:
            return f"{self.lost} of {self.stored} stored blocks could not be loaded"
        return PLAN_REASONS[self.plan.axis] if self.stored and self.plan is not None else "nothing resident"

    def _overtakes(self, chunk: int) -> bool:
        """Return whether computing up to `chunk`, from now on, is expected to end before its load, and can begin at
        all.
        """
        if self.stages is None or not self.stages.is_within_reach(self.number, chunk):
            return False
        return self.is_overtaken(chunk, self._computing_s(range(self.pointers.head, chunk + 1)))

    def _computing_s(self, chunks: range) -> float:
        """Return the predicted seconds to compute `chunks` alone, each in a step."""
        assert self.costs is not None
        cost, tokens = self.costs.compute, self.chunk_tokens
        return sum(cost.chunk_s(chunk * tokens, tokens) for chunk in chunks)
