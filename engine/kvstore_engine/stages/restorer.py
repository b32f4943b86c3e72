"""Restores a prompt's prefix in all stages of a pipeline at once: each loads and computes its own layers.

Owns the loop: it gives chunks to the stages' threads to compute, takes what streams have brought, and copies it to
their pools. What to do next is decided by `kvstore_client.restore.stages`. Invariants: a chunk counts as loaded only if
its lease was still valid after it was copied; what a stage computes now is not copied over; no stream or work is left
behind. Chunks are computed in steps of one storage block, so the K/V have the bits of `Executor.prefill`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore_client.restore.learned import LearnedCosts
from kvstore_client.restore.pointers import State
from kvstore_client.restore.stages import Stages
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.plan import BLOCK_TOKENS
from kvstore_engine.restore.fetcher import Arrival, Fetcher, Stream
from kvstore_engine.restore.link import Link
from kvstore_engine.restore.session import KvSession, Tokens
from kvstore_engine.stages.pipeline import FloatArray, Pipeline
from kvstore_engine.stages.restoration import ABSENT, Found, StageRecord, StageSide, Step
from kvstore_engine.stages.stores import HIDDEN_BYTES, StageStore

_LOOKUP_DEADLINE_S, _STREAM_DEADLINE_S = 0.25, 30.0
_PATIENCE_S = 0.02  # until expectations are looked at again


@dataclass(frozen=True, slots=True)
class Restored:
    """`inputs`: for each stage the hidden states that were computed for it now, by chunk, if they were to be kept:
    float32 [BLOCK_TOKENS, width].
    """

    stages: tuple[StageRecord, ...]
    seconds: float
    inputs: tuple[dict[int, FloatArray], ...]


@dataclass(slots=True, eq=False)
class _Run:
    """One restoration. `held`: for each stage the inputs that it will compute from; `kept`: those that were computed,
    None if they are not kept.
    """

    tokens: Tokens
    table: npt.NDArray[np.int32]
    sides: list[StageSide]
    stages: Stages
    held: list[dict[int, FloatArray]]
    kept: list[dict[int, FloatArray]] | None
    steps: list[Step] = field(default_factory=list)


class StagedRestorer:
    """`stores`, `costs`: of each stage. One prompt at a time; the pipeline computes nothing else meanwhile.

    `loads_all`: what is stored is loaded, unless that stalls.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stores: Sequence[StageStore],
        costs: Sequence[LearnedCosts] | None = None,
        *,
        loads_all: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        count = len(pipeline.stages)
        self._costs = [LearnedCosts() for _ in range(count)] if costs is None else list(costs)
        if len(stores) != count or len(self._costs) != count:
            raise ValueError(f"{count} stages need as many stores and costs")
        self.pipeline, self._stores = pipeline, tuple(stores)
        self._loads_all, self._clock = loads_all, clock
        self._fetcher = Fetcher(clock, threads=2 * count)

    def prefill(
        self, tokens: Tokens, table: npt.NDArray[np.int32], *, keeps_inputs: bool = False
    ) -> tuple[FloatArray, Restored]:
        """The last token's logits, float32 [vocabulary], with the K/V of all `tokens` in the blocks of `table`."""
        restored = self.restore(tokens, table, keeps_inputs=keeps_inputs)
        tail = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        logits: FloatArray = self.pipeline.forward([SequenceSlice(tokens[tail:], tail, table)])[0]
        return logits, restored

    def restore(self, tokens: Tokens, table: npt.NDArray[np.int32], *, keeps_inputs: bool = False) -> Restored:
        """Bring the K/V of all whole storage blocks before the last token to the blocks of `table`, one way or other.

        `keeps_inputs`: to store them (`storing`); a chunk's hidden states have 4 bytes for each token and value.
        Raises what computing raised; nothing of the prefix counts then.
        """
        begun_s = self._clock()
        run = self._begin(tokens[: (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS], table)
        run.kept = [{} for _ in run.sides] if keeps_inputs else None
        try:
            while not run.stages.is_done:
                self._advance(run)
        finally:
            run.stages.cancel()
            self._end(run)
        records = tuple(side.record(begun_s) for side in run.sides)
        return Restored(records, self._clock() - begun_s, tuple(run.kept or ()))

    def close(self) -> None:
        """Stop the threads; pipeline and sessions stay open."""
        self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- beginning ---------------------------------------------------------------------------------------------

    def _begin(self, tokens: Tokens, table: npt.NDArray[np.int32]) -> _Run:
        pipeline = self.pipeline
        found = [stage.submit(partial(self._look_up, stage.number, tokens)) for stage in pipeline.stages]
        width = pipeline.stages[0].executor.model.config.width
        sides = [
            StageSide(
                stage.number,
                stage.layers,
                answer.result(),
                BLOCK_TOKENS,
                stage.pool.payload_bytes(BLOCK_TOKENS // stage.pool.block_tokens),
                HIDDEN_BYTES * width * BLOCK_TOKENS,
                self._costs[stage.number],
            )
            for stage, answer in zip(pipeline.stages, found, strict=True)
        ]
        for before, side in zip([None, *sides], sides, strict=False):
            side.make_plan(before, loads_all=self._loads_all)
        inputs = [["" if tier == ABSENT else tier for tier in side.found.inputs] for side in sides[1:]]
        stages = Stages([side.pointers for side in sides], inputs)
        held: list[dict[int, FloatArray]] = [{} for _ in sides]
        run = _Run(tokens, table, sides, stages, held, None)
        now = self._clock()
        for side in sides:
            side.stages, side.now_s, side.done_s = stages, now, now
            session = self._stores[side.number].kv
            if session is not None and side.stored and side.plan is not None and side.plan.axis != "compute":
                side.kv = self._stream(session, tokens, side.stored)
                side.link = Link(now, now)
        return run

    def _look_up(self, stage: int, tokens: Tokens) -> Found:
        store = self._stores[stage]
        return Found(_tiers(store.kv, tokens), _tiers(store.inputs if stage else None, tokens))

    def _stream(self, session: KvSession, tokens: Tokens, blocks: int, *, from_front: bool = False) -> Stream:
        return self._fetcher.stream(
            session,
            tokens[: blocks * BLOCK_TOKENS],
            max_blocks=blocks,
            deadline_s=_STREAM_DEADLINE_S,
            order="front" if from_front else "back",
        )

    # ---- going on ----------------------------------------------------------------------------------------------

    def _advance(self, run: _Run) -> None:
        """Take what is there, begin what can be begun, and wait for more."""
        now = self._clock()
        for side in run.sides:
            side.now_s = now
            self._take_kv(run, side)
            self._take_inputs(run, side)
        self._take_steps(run)
        for side in run.sides:
            self._begin_step(run, side)
            if (end := side.wanted_inputs()) > side.inputs_end:
                session = self._stores[side.number].inputs
                assert session is not None
                side.inputs, side.inputs_end = self._stream(session, run.tokens, end, from_front=True), end
        if not run.stages.is_done:
            streams = [stream for side in run.sides for stream in (side.kv, side.inputs) if stream is not None]
            self._fetcher.wait([*run.steps, *streams], _PATIENCE_S)

    def _begin_step(self, run: _Run, side: StageSide) -> None:
        if (chunk := run.stages.next_compute(side.number)) is None:
            return
        stage, first = self.pipeline.stages[side.number], chunk * BLOCK_TOKENS
        piece = SequenceSlice(run.tokens[first : first + BLOCK_TOKENS], first, run.table, "none")
        work = partial(stage.executor.forward, [piece], hidden=run.held[side.number].get(chunk))
        step = Step(side.number, chunk, self._clock(), stage.submit(work))
        run.steps.append(step)
        step.done.add_done_callback(lambda done: self._fetcher.notify())

    def _take_steps(self, run: _Run) -> None:
        for step in [each for each in run.steps if each.has_news]:
            run.steps.remove(step)
            side, result = run.sides[step.stage], step.done.result()
            seconds = self._clock() - step.begun_s
            side.compute_s += seconds
            pieces = [(BLOCK_TOKENS, step.chunk * BLOCK_TOKENS)]
            side.learned.observe_batch(pieces, seconds, beside_loading=side.kv is not None)
            before = run.stages.forwarded
            is_lacking = run.stages.computed(step.stage, step.chunk)
            side.forwarded += run.stages.forwarded - before
            run.held[step.stage].pop(step.chunk, None)
            if step.stage + 1 < len(run.sides):
                if run.kept is not None:
                    run.kept[step.stage + 1][step.chunk] = result
                if is_lacking:
                    run.held[step.stage + 1][step.chunk] = result
            self._note_done(side)

    def _take_kv(self, run: _Run, side: StageSide) -> None:
        stream = side.kv
        if stream is None:
            return
        is_over = stream.done  # before the rest is taken
        for arrival in self._fetcher.take(stream):
            self._copy_kv(run, side, arrival)
        if is_over or side.pointers.is_done:
            self._fetcher.drop(stream)
            side.kv = None
            side.learn_link()
            side.lose_kv()
        self._note_done(side)

    def _copy_kv(self, run: _Run, side: StageSide, arrival: Arrival) -> None:
        pool, lease = self.pipeline.stages[side.number].pool, arrival.lease
        per_block = BLOCK_TOKENS // pool.block_tokens
        for at in range(len(lease)):
            chunk = arrival.first + at
            side.note_chunk(side.found.kv[chunk], arrival.at_s)
            if run.stages.computing(side.number) == chunk:
                continue
            if side.pointers.state(chunk) is not State.PRESENT:
                pool.scatter_block(
                    np.asarray(lease.payload(at)), run.table[chunk * per_block : (chunk + 1) * per_block]
                )
                if not lease.valid:
                    side.pointers.lose(chunk)
                    side.lost += 1
                    continue
            side.pointers.loaded_chunk(chunk)
        if side.link is not None:
            side.link.last_s = arrival.at_s
        lease.__exit__(None, None, None)

    def _take_inputs(self, run: _Run, side: StageSide) -> None:
        stream = side.inputs
        if stream is None:
            return
        is_over = stream.done
        for arrival in self._fetcher.take(stream):
            lease = arrival.lease
            for at in range(len(lease)):
                chunk = arrival.first + at
                states = np.array(lease.payload(at)).view(np.float32).reshape(BLOCK_TOKENS, -1)
                if chunk < side.pointers.head and run.stages.wanted(side.number) != chunk:
                    continue
                if lease.valid and run.stages.loaded_input(side.number, chunk):
                    run.held[side.number][chunk] = states
                    side.inputs_loaded += 1
            lease.__exit__(None, None, None)
        if is_over or side.pointers.is_done:
            self._fetcher.drop(stream)
            side.inputs = None
            for chunk in range(side.inputs_end):
                run.stages.lose_input(side.number, chunk)

    def _note_done(self, side: StageSide) -> None:
        if not side.pointers.is_done:
            side.done_s = self._clock()

    def _end(self, run: _Run) -> None:
        wait([step.done for step in run.steps])  # none may write to the pool any more
        for side in run.sides:
            for stream in (side.kv, side.inputs):
                if stream is not None:
                    self._fetcher.drop(stream)
            if side.kv is not None:
                side.learn_link()


def _tiers(session: KvSession | None, tokens: Tokens) -> tuple[str, ...]:
    """Where each block of `tokens` is; a store that cannot be reached has none."""
    chunks = len(tokens) // BLOCK_TOKENS
    tiers: tuple[str, ...] = ()
    if chunks and session is not None and session.state == "connected":
        try:
            tiers = session.lookup(tokens, deadline_s=_LOOKUP_DEADLINE_S).tiers
        except Exception:  # what cannot be looked up is computed
            tiers = ()
    return (tiers + (ABSENT,) * chunks)[:chunks]
