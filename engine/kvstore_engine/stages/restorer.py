"""Restores a prompt's prefix in all stages of a pipeline at once: each loads and computes its own layers.

Owns the loop: it gives chunks to the stages' threads to compute, and takes what they and the streams have brought.
What to do next is decided by `kvstore_restore.stages`. Invariants: no stream or work is left behind; a chunk counts as
loaded only if its lease was still valid after it was copied; what a stage computes now is not copied over.
Chunks are computed in steps of one storage block, so the K/V have the bits of one executor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore_engine.executors.logits import FloatArray
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.plan import BLOCK_TOKENS
from kvstore_engine.pool import BlockPool
from kvstore_engine.restore.fetcher import ArrivedBlocks, BlockStream, Fetcher
from kvstore_engine.restore.progress import ABSENT
from kvstore_engine.restore.record import RestorationRecord
from kvstore_engine.restore.session import KvSession, Tokens
from kvstore_engine.stages.pipeline import Pipeline
from kvstore_engine.stages.restoration import ChunkStep, StageSide
from kvstore_engine.stages.stores import HIDDEN_BYTES, StageStore, look_up
from kvstore_restore.learned import MAPPED, LearnedCosts
from kvstore_restore.pointers import ChunkState
from kvstore_restore.stages import Stages

_log = logging.getLogger(__name__)
_STREAM_DEADLINE_S = 30.0
_PATIENCE_S = 0.02  # until expectations are looked at again


@dataclass(frozen=True, slots=True)
class StagedRestoration:
    """The result of restoring a prompt in all stages of a pipeline: a record for each stage, times in seconds, and the
    number of loaded bytes. `inputs` has for each stage the hidden states that should be stored, by chunk (storage
    block), float32 [BLOCK_TOKENS, width].
    """

    stages: tuple[RestorationRecord, ...]
    seconds: float
    lookup_s: float
    nbytes: int
    inputs: tuple[dict[int, FloatArray], ...]


@dataclass(slots=True, eq=False)
class RestorationRun:
    """The state of restoring one prompt in all stages of a pipeline at once. `table` has the prompt's pool blocks.
    `held` has for each stage the hidden states that it will compute from; `kept` has the hidden states to be stored
    (None: none).
    """

    tokens: Tokens
    table: npt.NDArray[np.int32]
    sides: list[StageSide]
    stages: Stages
    held: list[dict[int, FloatArray]]
    kept: list[dict[int, FloatArray]] | None
    steps: list[ChunkStep] = field(default_factory=list)

    def take_computed(self, stage: int, chunk: int, states: FloatArray, *, is_lacking: bool) -> None:
        """Take the hidden states `states` that the stage number `stage` has computed for chunk (storage block) number
        `chunk`. `is_lacking` says that the next stage needs them.
        """
        self.held[stage].pop(chunk, None)
        following = stage + 1
        if following == len(self.sides):
            return
        if is_lacking:
            self.held[following][chunk] = states
        if self.kept is not None and chunk >= self.sides[following].stored_inputs:
            self.kept[following][chunk] = states

    def continued_inputs(self) -> tuple[dict[int, FloatArray], ...]:
        """Return for each stage the hidden states that should be stored, by chunk (storage block): kept ones that
        follow the stored ones without a gap.
        """
        runs = []
        for side, kept in zip(self.sides, self.kept or (), strict=False):
            end = side.stored_inputs
            while end in kept:
                end += 1
            runs.append({chunk: kept[chunk] for chunk in range(side.stored_inputs, end)})
        return tuple(runs)

    def take_kv(self, side: StageSide, pool: BlockPool, arrival: ArrivedBlocks, clock: Callable[[], float]) -> None:
        """Copy those K/V of `arrival` that the stage `side` still needs into its `pool`, and end the lease on them.
        Raises ValueError for a wrong size.
        """
        lease, per_block = arrival.lease, BLOCK_TOKENS // pool.block_tokens
        side.note_arrival(arrival.first, side.found.kv[arrival.first : arrival.first + len(lease)], arrival.at_s)
        begin_s, mapped = clock(), 0
        for at in range(len(lease)):
            chunk = arrival.first + at
            if self.stages.computing(side.number) == chunk:
                continue
            if side.pointers.state(chunk) is not ChunkState.PRESENT:
                table = self.table[chunk * per_block : (chunk + 1) * per_block]
                pool.scatter_block(np.asarray(lease.payload(at)), table)
                if not lease.valid:
                    side.pointers.lose(chunk)
                    side.lost += 1
                    continue
                mapped += side.found.kv[chunk] == MAPPED
            side.pointers.loaded_chunk(chunk)
        side.learned.observe_load(MAPPED, mapped * side.chunk_bytes, clock() - begin_s)
        lease.__exit__(None, None, None)

    def take_states(self, side: StageSide, arrival: ArrivedBlocks) -> None:
        """Keep those hidden states of `arrival` that the stage `side` still needs, and end the lease on them. Raises
        ValueError for a wrong size.
        """
        lease = arrival.lease
        side.note_inputs(arrival.first, len(lease), arrival.at_s)
        for at in range(len(lease)):
            chunk = arrival.first + at
            if chunk < side.pointers.head and self.stages.wanted(side.number) != chunk:
                continue
            states = np.array(lease.payload(at)).view(np.float32).reshape(BLOCK_TOKENS, -1)
            if lease.valid and self.stages.loaded_input(side.number, chunk):
                self.held[side.number][chunk] = states
                side.inputs_loaded += 1
        lease.__exit__(None, None, None)


class StagedRestorer:
    """A restorer of prompts that loads and computes K/V in all stages of `pipeline` at once. `stores` and `costs` have
    an entry for each stage. With `loads_all` every stored chunk (storage block) is loaded, unless loading stalls. It
    restores one prompt at a time.
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
        first, *others = stores
        self.pipeline, self._stores = pipeline, (replace(first, inputs=None), *others)
        self._loads_all, self._clock = loads_all, clock
        self._fetcher = Fetcher(clock, threads=2 * count)

    def warm_up(self, table: npt.NDArray[np.int32]) -> None:
        """Compute one chunk (storage block) in all stages at once into the pool blocks `table`, to measure how long it
        takes.
        """
        work = [stage.submit(partial(self._timed, stage.number, table)) for stage in self.pipeline.stages]
        for costs, each in zip(self._costs, work, strict=True):
            costs.observe_batch([(BLOCK_TOKENS, 0)], each.result())

    def prefill(
        self, tokens: Tokens, table: npt.NDArray[np.int32], *, keeps_inputs: bool = False
    ) -> tuple[FloatArray, StagedRestoration]:
        """Load or compute the K/V of all `tokens` into the pool blocks `table`. Return the logits of the last token,
        float32 [vocabulary], and the result of the restoration. With `keeps_inputs` the result has hidden states for
        `store_prefix`.
        """
        restored = self.restore(tokens, table, keeps_inputs=keeps_inputs)
        tail = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        logits: FloatArray = self.pipeline.forward([SequenceSlice(tokens[tail:], tail, table)])[0]
        return logits, restored

    def restore(
        self, tokens: Tokens, table: npt.NDArray[np.int32], *, keeps_inputs: bool = False, request_id: str = ""
    ) -> StagedRestoration:
        """Load or compute the K/V of all whole storage blocks before the last token of `tokens` into the pool blocks
        `table`, and return the result. With `keeps_inputs` the result has hidden states for `store_prefix`.
        `request_id` is for the records. Raises the errors of computing.
        """
        begun_s = self._clock()
        run = self._begin(tokens[: (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS], table, begun_s)
        run.kept = [{} for _ in run.sides] if keeps_inputs else None
        planned_s = self._clock()
        try:
            while not run.stages.is_done:
                self._advance(run)
        finally:
            run.stages.cancel()
            self._end(run)
        ended_s = self._clock()
        return StagedRestoration(
            tuple(side.record(request_id, ended_s) for side in run.sides),
            ended_s - begun_s,
            planned_s - begun_s,
            sum(side.loaded_bytes for side in run.sides),
            run.continued_inputs(),
        )

    def close(self) -> None:
        """Stop the threads. The pipeline and the sessions stay open."""
        self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- beginning ---------------------------------------------------------------------------------------------

    def _begin(self, tokens: Tokens, table: npt.NDArray[np.int32], begun_s: float) -> RestorationRun:
        pipeline = self.pipeline
        found = [stage.submit(partial(look_up, self._stores[stage.number], tokens)) for stage in pipeline.stages]
        sides = [
            StageSide(
                chunk_tokens=BLOCK_TOKENS,
                chunk_bytes=stage.pool.payload_bytes(BLOCK_TOKENS // stage.pool.block_tokens),
                learned=self._costs[stage.number],
                begun_s=begun_s,
                number=stage.number,
                layers=stage.layers,
                found=answer.result(),
                input_bytes=HIDDEN_BYTES * self.pipeline.config.width * BLOCK_TOKENS,
            )
            for stage, answer in zip(pipeline.stages, found, strict=True)
        ]
        for before, side in zip([None, *sides], sides, strict=False):
            side.make_plan(before, loads_all=self._loads_all)
        inputs = [[tier != ABSENT for tier in side.found.inputs] for side in sides[1:]]
        stages = Stages([side.pointers for side in sides], inputs)
        held: list[dict[int, FloatArray]] = [{} for _ in sides]
        run = RestorationRun(tokens, table, sides, stages, held, None)
        now = self._clock()
        for side in sides:
            side.stages, side.now_s, side.planned_s = stages, now, now
            session = self._stores[side.number].kv
            if session is not None and side.stored and side.plan is not None and side.plan.axis != "compute":
                side.open(self._stream(session, tokens, side.stored), now)
        return run

    def _timed(self, number: int, table: npt.NDArray[np.int32]) -> float:
        piece = SequenceSlice(np.zeros(BLOCK_TOKENS, np.int32), 0, table, "none")
        states = np.zeros((BLOCK_TOKENS, self.pipeline.config.width), np.float32) if number else None
        begin_s = self._clock()
        self.pipeline.stages[number].executor.forward([piece], hidden=states)
        return self._clock() - begin_s

    def _stream(self, session: KvSession, tokens: Tokens, blocks: int, *, from_front: bool = False) -> BlockStream:
        return self._fetcher.stream(
            session,
            tokens[: blocks * BLOCK_TOKENS],
            max_blocks=blocks,
            deadline_s=_STREAM_DEADLINE_S,
            order="front" if from_front else "back",
        )

    # ---- going on ----------------------------------------------------------------------------------------------

    def _advance(self, run: RestorationRun) -> None:
        """Take in arrived chunks, begin possible work, and wait for more."""
        now = self._clock()
        for side in run.sides:
            side.now_s = now
            self._take_kv(run, side)
            self._take_inputs(run, side)
        self._take_steps(run)
        for side in run.sides:
            self._note_done(side)
            self._begin_step(run, side)
            if (end := side.wanted_inputs()) > side.inputs_end:
                session = self._stores[side.number].inputs
                assert session is not None
                side.inputs, side.inputs_end = self._stream(session, run.tokens, end, from_front=True), end
                side.inputs_at_s = now
        if not run.stages.is_done:
            streams = [stream for side in run.sides for stream in (side.stream, side.inputs) if stream is not None]
            self._fetcher.wait([*run.steps, *streams], _PATIENCE_S)

    def _begin_step(self, run: RestorationRun, side: StageSide) -> None:
        if (chunk := run.stages.next_compute(side.number)) is None:
            return
        stage, first = self.pipeline.stages[side.number], chunk * BLOCK_TOKENS
        piece = SequenceSlice(run.tokens[first : first + BLOCK_TOKENS], first, run.table, "none")
        work = partial(stage.executor.forward, [piece], hidden=run.held[side.number].get(chunk))
        step = ChunkStep(side.number, chunk, self._clock(), stage.submit(work))
        run.steps.append(step)
        step.done.add_done_callback(lambda done: self._fetcher.notify())

    def _take_steps(self, run: RestorationRun) -> None:
        for step in [each for each in run.steps if each.has_news]:
            run.steps.remove(step)
            side, result = run.sides[step.stage], step.done.result()
            first, now = step.chunk * BLOCK_TOKENS, self._clock()
            side.note_step(first, BLOCK_TOKENS, step.begun_s, now)
            is_beside = side.stream is not None
            side.learned.observe_batch([(BLOCK_TOKENS, first)], now - step.begun_s, beside_loading=is_beside)
            before = run.stages.forwarded
            is_lacking = run.stages.computed(step.stage, step.chunk)
            side.forwarded += run.stages.forwarded - before
            if step.chunk < side.inputs_end:  # its input was used, and is not asked for twice
                run.stages.lose_input(step.stage, step.chunk)
            run.take_computed(step.stage, step.chunk, result, is_lacking=is_lacking)

    def _take_kv(self, run: RestorationRun, side: StageSide) -> None:
        pool = self.pipeline.stages[side.number].pool
        if self._take(side, side.stream, "K/V", lambda arrival: run.take_kv(side, pool, arrival, self._clock)):
            side.learn_link()
            side.lose_kv()

    def _take_inputs(self, run: RestorationRun, side: StageSide) -> None:
        if self._take(side, side.inputs, "hidden states", lambda arrival: run.take_states(side, arrival)):
            side.inputs = None
            side.lose_inputs()

    def _take(
        self, side: StageSide, stream: BlockStream | None, what: str, use: Callable[[ArrivedBlocks], None]
    ) -> bool:
        """Pass the chunks that a stream has brought to `use`. Return whether the stream has ended."""
        if stream is None:
            return False
        is_over = stream.done  # before the rest is taken
        try:
            for arrival in self._fetcher.take(stream):
                use(arrival)
        except Exception as error:  # a payload of another size, for instance: the rest is computed
            _log.warning("stage %d loads no more %s: %s: %s", side.number, what, type(error).__name__, error)
            is_over = True
        if is_over or side.pointers.is_done:
            self._fetcher.drop(stream)
            return True
        return False

    def _note_done(self, side: StageSide) -> None:
        if side.done_s is None and side.pointers.is_done:
            side.done_s = self._clock()

    def _end(self, run: RestorationRun) -> None:
        wait([step.done for step in run.steps])  # none may write to the pool any more
        for side in run.sides:
            self._note_done(side)
            for stream in (side.stream, side.inputs):
                if stream is not None:
                    self._fetcher.drop(stream)
            side.learn_link()
