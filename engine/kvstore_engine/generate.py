"""Answers one prompt in text: the batch engine with a single request.

The module tokenises the prompt, and owns the timings of an answer and their report. `batching` schedules, restores and
stores; for a model computed in stages, `stages.prompts` does. When `generate` returns, the answer's blocks are stored
or given up, and its pool blocks are free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.compute import Compute
from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.events import Finished
from kvstore_engine.batching.observer import FanOut, Observer, StepRecord
from kvstore_engine.batching.request import Request, RequestSettings
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.generation import Generation, Prompt, Timings
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.graph.plan import BLOCK_TOKENS
from kvstore_engine.restore.copies import PoolCopies
from kvstore_engine.restore.record import RestorationRecord, RestoreReport, StoreReport
from kvstore_engine.restore.session import KvSession
from kvstore_engine.tokenizer import Tokenizer
from kvstore_restore.learned import LearnedCosts

if TYPE_CHECKING:
    from kvstore_engine.stages.prompts import StagedPrompts

_log = logging.getLogger(__name__)
OnText = Callable[[str], None]
PREFILL_STEP_TOKENS = 512
_REQUEST = "prompt"
_BLOCK_RESULTS = ("stored", "present", "no_room", "over_quota", "declined", "throttled", "failed")
_CHEAP_STEP_S = 0.1
_WARM_UP_TOKENS = 64


class Generator:
    """A loaded model that answers one prompt after another. `context` is the most tokens of a prompt and its answer.
    `session` is a session with the daemon, or None; `copies` moves its blocks. `stages` replaces both if a pipeline
    computes the model in stages. `observer` gets the engine's events.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        executor: Compute,
        context: int,
        session: KvSession | None = None,
        copies: PoolCopies | None = None,
        costs: LearnedCosts | None = None,
        stages: StagedPrompts | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.executor, self.pool = executor, executor.pool
        self.context = context
        self.costs = costs or LearnedCosts()
        self._session, self._stages = session, stages
        self._watch = _Watch()
        self._observer = FanOut(self._watch) if observer is None else FanOut(self._watch, observer)
        self._engine = BatchEngine(
            executor,
            tokenizer,
            # Requests share blocks through the store alone, so that a report shows what the store provided; a request
            # shares those that its own stages restored.
            settings=EngineSettings(
                context=context,
                max_running=1,
                prefill_tokens=PREFILL_STEP_TOKENS,
                prefix_sharing=stages is not None,
                swap_bytes=0,
                compaction=False,
            ),
            sessions=(lambda tenant: session) if session is not None else None,
            copies=copies,
            costs=self.costs,
            observer=self._observer,
        )

    def warm_up(self) -> None:
        """Compute a few tokens, so that the first prompt does not wait for set-up. The measured times are used to
        predict the costs of computing.
        """
        self.tokenizer.encode("warm up", add_special=False)
        if self._session is not None:
            self._engine.restorer.fetcher.warm_up(self._session)
        most = min(PREFILL_STEP_TOKENS, self.executor.limits.max_tokens, self.context)
        pool, count = self.pool, -(-most // self.pool.block_tokens)
        blocks = pool.allocate(count)
        windows = pool.window.allocate(count) if pool.window is not None else []
        try:
            few = min(_WARM_UP_TOKENS, most)
            self._warm_up_step(few, blocks, windows)
            if self._warm_up_step(few, blocks, windows) < _CHEAP_STEP_S:
                self._warm_up_step(most, blocks, windows)  # touches all of the compute buffer
            self._warm_up_step(1, blocks, windows)
            if self._stages is not None and most >= BLOCK_TOKENS:
                self._stages.warm_up(np.array(blocks, np.int32))
        finally:
            pool.free(blocks)
            if pool.window is not None:
                pool.window.free(windows)

    def generate(
        self,
        prompt: Prompt,
        settings: RequestSettings,
        on_text: OnText | None = None,
        next_turn_in_s: float | None = None,
    ) -> Generation:
        """Answer `prompt` and return the answer with its figures. `on_text` gets the text as it is generated. With
        `next_turn_in_s` the daemon gets the hint that the conversation goes on in about this many seconds. Raises
        UsageError if the prompt is empty or too long, OperationError if the model fails.
        """
        begin_s = time.perf_counter()
        if settings.n != 1:
            raise UsageError("a prompt has one answer here: ask for n = 1")
        self._wake()
        ids = self.tokenizer.encode(prompt.text, add_special=not prompt.rendered, parse_special=prompt.rendered)
        tokenize_s = time.perf_counter() - begin_s
        engine, watch = self._engine, self._watch
        watch.begin(self._expected())
        counts = engine.storer.counts.copy()
        answer = _Answer(ids)
        engine.add(Request(_REQUEST, ids, settings))
        try:
            if self._stages is not None:
                self._restore(self._stages, ids, is_stored=settings.store)
            finished = self._run(answer, on_text)
            ended_s = time.perf_counter()
            if self._stages is not None and settings.store and finished.reason != "failed":
                watch.stored_by_stages = self._stages.store(engine.space, answer.all_tokens, len(answer.tokens))
        finally:
            engine.cancel(_REQUEST)  # when interrupted
            engine.drain()
            if self._stages is not None:
                self._stages.forget(engine.space, answer.all_tokens)
        if finished.reason == "failed":
            raise OperationError(f"the answer failed: {finished.message}")
        if next_turn_in_s is not None:
            self._announce(answer.all_tokens, next_turn_in_s)
        new = {name: engine.storer.counts[name] - counts[name] for name in _BLOCK_RESULTS}
        store = watch.stored_by_stages or StoreReport(**new, store_s=watch.store_s, reason=watch.store_reason)
        return self._generation(answer, finished, store, tokenize_s, time.perf_counter() - ended_s)

    def close(self) -> None:
        """Stop the engine's threads. The pool, the executor and the session stay open."""
        self._engine.close()

    def _wake(self) -> None:
        for store in (self._session, self._stages):
            if store is not None:
                store.wake()

    def _restore(self, stages: StagedPrompts, ids: npt.NDArray[np.int32], *, is_stored: bool) -> None:
        """Let the stages bring the prompt's K/V, for the request that waits."""
        restored = stages.restore(self._engine.space, ids, _REQUEST, is_stored=is_stored)
        self._watch.prefill_s += restored.computing_s
        if not restored.records[0].chunks:
            return
        for record in restored.records:
            self._observer.restoration(record)
        if restored.report.resident_blocks or stages.is_connected:
            self._observer.store_answered(_REQUEST, 0, restored.report, time.perf_counter())

    def _run(self, answer: _Answer, on_text: OnText | None) -> Finished:
        """Do steps until the answer has ended, and return its end."""
        finished: Finished | None = None
        while finished is None:
            for event in self._engine.step():
                if isinstance(event, Finished):
                    finished = event
                else:
                    answer.tokens.append(event.token)
                answer.texts.append(event.text)
                if event.text and on_text is not None:
                    on_text(event.text)
        return finished

    def _generation(
        self, answer: _Answer, finished: Finished, store: StoreReport, tokenize_s: float, flush_s: float
    ) -> Generation:
        watch, usage = self._watch, finished.usage
        return Generation(
            text="".join(answer.texts),
            tokens=answer.tokens,
            prompt_tokens=usage.prompt_tokens,
            stop=finished.reason,
            timings=Timings(
                tokenize_s=tokenize_s,
                lookup_s=watch.restore.lookup_s,
                restore_s=watch.restore.restore_s,
                prefill_s=watch.prefill_s,
                ttft_s=tokenize_s + usage.ttft_s,
                decode_s=usage.tpot_s * max(0, len(answer.tokens) - 1),
                tpot_s=usage.tpot_s,
                store_s=store.store_s,
                flush_s=flush_s,
            ),
            restore=watch.restore,
            store=store,
            restorations=tuple(watch.restorations),
        )

    def _announce(self, tokens: npt.NDArray[np.int32], due_in_s: float) -> None:
        if self._stages is not None:
            self._stages.announce(tokens, due_in_s)
        session = self._session
        if session is not None and session.state == "connected" and len(tokens) >= session.block_tokens:
            whole = tokens[: len(tokens) // session.block_tokens * session.block_tokens]
            try:
                session.hint(whole, due_in_s=due_in_s, next_step="end_of_turn")
            except Exception as error:  # the answer is there: a hint that is lost costs nothing of it
                _log.debug("the next turn was not announced: %s: %s", type(error).__name__, error)

    def _expected(self) -> RestoreReport:
        """Return the report of a prompt for which nothing is requested from the store."""
        if self._stages is not None:
            is_connected = self._stages.is_connected
        elif self._session is not None:
            is_connected = self._session.state == "connected"
        else:
            return RestoreReport()
        if not is_connected:
            return RestoreReport(reason="the store cannot be reached")
        return RestoreReport(reason="no full block before the prompt's last token")

    def _warm_up_step(self, count: int, blocks: list[int], windows: list[int]) -> float:
        begin_s = time.perf_counter()
        tables = np.array(blocks, np.int32), np.array(windows, np.int32)
        self.executor.step([SequenceSlice(np.zeros(count, np.int32), 0, tables[0], "last", tables[1])])
        seconds = time.perf_counter() - begin_s
        self.costs.observe_batch([(count, 0)], seconds)
        return seconds


class _Answer:
    """The part of an answer that has been generated so far."""

    def __init__(self, prompt: npt.NDArray[np.int32]) -> None:
        self._prompt = prompt
        self.tokens: list[int] = []
        self.texts: list[str] = []

    @property
    def all_tokens(self) -> npt.NDArray[np.int32]:
        """The prompt's tokens and the answer's."""
        return np.concatenate([self._prompt, np.array(self.tokens, np.int32)])


class _Watch(Observer):
    """An observer that collects the costs of one answer."""

    def __init__(self) -> None:
        self.begin(RestoreReport())

    def begin(self, restore: RestoreReport) -> None:
        self.restore = restore
        self.restorations: list[RestorationRecord] = []
        self.stored_by_stages: StoreReport | None = None
        self.prefill_s = 0.0
        self.store_s = 0.0
        self.store_reason = ""

    def restoration(self, record: RestorationRecord) -> None:
        self.restorations.append(record)

    def store_answered(self, request_id: str, index: int, report: RestoreReport, t: float) -> None:
        self.restore = report

    def stored(self, request_id: str, index: int, tokens: int, reason: str, begin_s: float, end_s: float) -> None:
        self.store_s += end_s - begin_s
        self.store_reason = self.store_reason or reason

    def step(self, record: StepRecord) -> None:
        if record.prefill_tokens:
            self.prefill_s += record.compute_s
