"""Answers one prompt in text: the batch engine with a single request.

Owns the tokenising of the prompt, the timings of an answer and their report. Scheduling, restoring and storing are
`batching`'s. When `generate` returns, the answer's blocks are stored or given up, and its pool blocks are free.
"""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvstore_client.restore.learned import LearnedCosts
from kvstore_engine.batching import (
    BatchEngine,
    EngineSettings,
    Finished,
    Observer,
    Request,
    RequestSettings,
    StepRecord,
)
from kvstore_engine.batching.compute import Compute
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.generation import Generation, Prompt, Timings
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.pool import BlockPool
from kvstore_engine.restore import KvSession, RestoreReport, StoreReport
from kvstore_engine.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
OnText = Callable[[str], None]
PREFILL_STEP_TOKENS = 512
_REQUEST = "prompt"
_BLOCK_RESULTS = ("stored", "present", "no_room", "over_quota", "declined", "throttled", "failed")
_CHEAP_STEP_S = 0.1
_WARM_UP_TOKENS = 64


class Generator:
    """A loaded model that answers one prompt after another.

    `session` is a kvstored session for this model's fingerprint, or None to compute everything. `context` is
    the largest sequence, prompt and answer together, and what `pool` must hold.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        pool: BlockPool,
        executor: Compute,
        context: int,
        session: KvSession | None = None,
        costs: LearnedCosts | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.pool = pool
        self.executor = executor
        self.context = context
        self.costs = costs or LearnedCosts()
        self._session = session
        self._watch = _Watch()
        self._engine = BatchEngine(
            executor,
            pool,
            tokenizer,
            # Requests share blocks through the store alone, so that a report shows what the store provided.
            settings=EngineSettings(
                context=context,
                max_running=1,
                prefill_tokens=PREFILL_STEP_TOKENS,
                prefix_sharing=False,
                swap_bytes=0,
                compaction=False,
            ),
            sessions=(lambda tenant: session) if session is not None else None,
            costs=self.costs,
            observer=self._watch,
        )

    def warm_up(self) -> None:
        """Compute a few tokens, so that no request pays for page faults and first-time set-up.

        The steps are timed and seed the cost model.
        """
        self.tokenizer.encode("warm up", add_special=False)
        if self._session is not None:
            self._session.ping()
        most = min(PREFILL_STEP_TOKENS, self.executor.limits.max_tokens, self.context)
        blocks = self.pool.allocate(-(-most // self.pool.block_tokens))
        try:
            few = min(_WARM_UP_TOKENS, most)
            self._warm_up_step(few, blocks)
            if self._warm_up_step(few, blocks) < _CHEAP_STEP_S:
                self._warm_up_step(most, blocks)  # touches all of the compute buffer
            self._warm_up_step(1, blocks)
        finally:
            self.pool.free(blocks)

    def generate(
        self,
        prompt: Prompt,
        settings: RequestSettings,
        on_text: OnText | None = None,
        next_turn_in_s: float | None = None,
    ) -> Generation:
        """Answer `prompt`; `on_text` receives the text as it is generated, never half a character.
        `next_turn_in_s`: the store learns that the turn has ended, and that the conversation goes on in about so long.

        UsageError if the prompt is empty or does not fit the context, and for more than one answer. OperationError if
        the model computes no answer.
        """
        begin_s = time.perf_counter()
        if settings.n != 1 or settings.beams is not None:
            raise UsageError("a prompt has one answer here: ask for n = 1, without a beam search")
        if self._session is not None:
            self._session.wake()
        ids = self.tokenizer.encode(prompt.text, add_special=not prompt.rendered, parse_special=prompt.rendered)
        tokenize_s = time.perf_counter() - begin_s
        engine, watch = self._engine, self._watch
        watch.begin(self._expected())
        counts = engine.storer.counts.copy()
        finished, tokens, text, ended_s = self._answer(Request(_REQUEST, ids, settings), on_text)
        if finished.reason == "failed":
            raise OperationError(f"the answer failed: {finished.message}")
        if next_turn_in_s is not None:
            self._announce([*ids, *tokens], next_turn_in_s)
        usage = finished.usage
        stored = {name: engine.storer.counts[name] - counts[name] for name in _BLOCK_RESULTS}
        return Generation(
            text=text,
            tokens=tokens,
            prompt_tokens=len(ids),
            stop=finished.reason,
            timings=Timings(
                tokenize_s=tokenize_s,
                lookup_s=watch.restore.lookup_s,
                restore_s=watch.restore.restore_s,
                prefill_s=watch.prefill_s,
                ttft_s=tokenize_s + usage.ttft_s,
                decode_s=usage.tpot_s * max(0, len(tokens) - 1),
                tpot_s=usage.tpot_s,
                store_s=watch.store_s,
                flush_s=time.perf_counter() - ended_s,
            ),
            restore=watch.restore,
            store=StoreReport(**stored, store_s=watch.store_s, reason=watch.store_reason),
        )

    def _answer(self, request: Request, on_text: OnText | None) -> tuple[Finished, list[int], str, float]:
        """How it ended, its tokens and text, and when it had ended; what it has to store is stored by then."""
        engine = self._engine
        tokens: list[int] = []
        texts: list[str] = []
        finished: Finished | None = None
        engine.add(request)
        try:
            while finished is None:
                for event in engine.step():
                    if isinstance(event, Finished):
                        finished = event
                    else:
                        tokens.append(event.token)
                    texts.append(event.text)
                    if event.text and on_text is not None:
                        on_text(event.text)
            ended_s = time.perf_counter()
        finally:
            engine.cancel(_REQUEST)  # when interrupted
            engine.drain()
        return finished, tokens, "".join(texts), ended_s

    def close(self) -> None:
        """Stop the engine's threads. Pool, executor and session stay open."""
        self._engine.close()

    def _announce(self, tokens: Sequence[int], due_in_s: float) -> None:
        session = self._session
        if session is not None and session.state == "connected" and len(tokens) >= session.block_tokens:
            whole = np.array(tokens[: len(tokens) // session.block_tokens * session.block_tokens], np.int32)
            try:
                session.hint(whole, due_in_s=due_in_s, next_step="end_of_turn")
            except Exception as error:  # the answer is there: a hint that is lost costs nothing of it
                _log.debug("the next turn was not announced: %s: %s", type(error).__name__, error)

    def _expected(self) -> RestoreReport:
        """The report of a prompt for which nothing is requested from the store."""
        if self._session is None:
            return RestoreReport()
        if self._session.state != "connected":
            return RestoreReport(reason="the store cannot be reached")
        return RestoreReport(reason="no full block before the prompt's last token")

    def _warm_up_step(self, count: int, blocks: list[int]) -> float:
        begin_s = time.perf_counter()
        self.executor.forward([SequenceSlice(np.zeros(count, np.int32), 0, np.array(blocks, np.int32), "last")])
        seconds = time.perf_counter() - begin_s
        self.costs.observe_batch([(count, 0)], seconds)
        return seconds


class _Watch(Observer):
    """Collects the costs of one answer."""

    def __init__(self) -> None:
        self.begin(RestoreReport())

    def begin(self, restore: RestoreReport) -> None:
        self.restore = restore
        self.prefill_s = 0.0
        self.store_s = 0.0
        self.store_reason = ""

    def store_answered(self, request_id: str, index: int, report: RestoreReport, t: float) -> None:
        self.restore = report

    def stored(self, request_id: str, index: int, tokens: int, reason: str, begin_s: float, end_s: float) -> None:
        self.store_s += end_s - begin_s
        self.store_reason = self.store_reason or reason

    def step(self, record: StepRecord) -> None:
        if record.prefill_tokens:
            self.prefill_s += record.compute_s
