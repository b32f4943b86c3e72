"""Generates text: restore, prefill, decode, store.

Owns the order of a request's steps and their timing. The parts it drives (tokenizer, pool, executor, store)
decide nothing about requests. One request at a time: this is the single-sequence engine. Invariants: a
request's pool blocks are freed only when nothing reads or writes them any more; a store that fails in any way
costs a request its savings and nothing else.
"""

import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstore_engine.errors import UsageError
from kvstore_engine.executor import Executor
from kvstore_engine.generation import Generation, GenerationSettings, Prompt, StopReason, Timings
from kvstore_engine.graph import SequenceSlice, chunk_plan
from kvstore_engine.pool import BlockPool
from kvstore_engine.restore import (
    BlockStore,
    CostModel,
    KvSession,
    RestoreReport,
    StoreReport,
    restore_prefix,
)
from kvstore_engine.sampler import Sampler
from kvstore_engine.tokenizer import Tokenizer

Int32Array = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
OnText = Callable[[str], None]
PREFILL_STEP_TOKENS = 512
_STORAGE_BLOCK_TOKENS = 64
_CHEAP_STEP_S = 0.1
_NO_LOGITS: Floats = np.empty((0, 0), np.float32)


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
        executor: Executor,
        context: int,
        session: KvSession | None = None,
        costs: CostModel | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.pool = pool
        self.executor = executor
        self.context = context
        self.costs = costs or CostModel()
        self._session = session
        self._store = BlockStore(session, pool) if session else None
        self._block_tokens = session.block_tokens if session else _STORAGE_BLOCK_TOKENS
        largest = min(PREFILL_STEP_TOKENS, executor.limits.max_tokens)
        self._step_tokens = largest // self._block_tokens * self._block_tokens
        if self._step_tokens == 0:
            raise ValueError(f"the executor's steps of {largest} tokens are smaller than a storage block")

    def warm_up(self) -> None:
        """Run a few tokens through the model, so that no request pays for page faults and first-time set-up.

        The steps are timed and seed the cost model.
        """
        self.tokenizer.encode("warm up", add_special=False)
        if self._session is not None:
            self._session.ping()
        blocks = self._allocate(min(self._step_tokens, self.context))
        try:
            block = min(self._block_tokens, self.context)
            self._warm_up_step(block, blocks)
            if self._warm_up_step(block, blocks) < _CHEAP_STEP_S and self._step_tokens <= self.context:
                self._warm_up_step(self._step_tokens, blocks)  # touches all of the compute buffer
            self._warm_up_step(1, blocks)
        finally:
            self.pool.free(blocks)

    def generate(self, prompt: Prompt, settings: GenerationSettings, on_text: OnText | None = None) -> Generation:
        """Answer `prompt`; `on_text` gets the text as it comes, never half a character.

        UsageError if the prompt is empty or does not fit the context.
        """
        answer = _Answer(self.tokenizer, on_text)
        if self._session is not None:
            self._session.wake()
        ids = self.tokenizer.encode(prompt.text, add_special=not prompt.rendered, parse_special=prompt.rendered)
        tokenize_s = answer.elapsed_s()
        self._check_fits(len(ids), settings)
        blocks = self._allocate(min(len(ids) + settings.max_tokens, self.context))
        table = np.array(blocks, np.int32)
        storing = self._store if settings.store else None
        try:
            restored = self._restore(ids, blocks)
            prefill_begin_s = answer.elapsed_s()
            logits = self._prefill(ids, restored.tokens, table)
            prefill_s = answer.elapsed_s() - prefill_begin_s
            if storing:
                storing.begin(blocks, restored.tokens)
            stop = self._decode(logits, ids, table, settings, answer)
            decoded_s = answer.elapsed_s()
            stored = storing.finish(len(answer.tokens)) if storing else StoreReport()
        finally:
            if storing:
                storing.finish()  # also when interrupted: the pool's blocks are about to go
            self.pool.free(blocks)
        decode_s = decoded_s - answer.first_s
        timings = Timings(
            tokenize_s=tokenize_s,
            lookup_s=restored.lookup_s,
            restore_s=restored.restore_s,
            prefill_s=prefill_s,
            ttft_s=answer.first_s,
            decode_s=decode_s,
            tpot_s=decode_s / (len(answer.tokens) - 1) if len(answer.tokens) > 1 else 0.0,
            store_s=stored.store_s,
            flush_s=answer.elapsed_s() - decoded_s,
        )
        return Generation(answer.text(), answer.tokens, len(ids), stop, timings, restored, stored)

    def close(self) -> None:
        """Stop the storing thread. Pool, executor and session belong to whoever made them."""
        if self._store:
            self._store.close()

    def _check_fits(self, prompt_tokens: int, settings: GenerationSettings) -> None:
        if prompt_tokens == 0:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if settings.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, got {settings.max_tokens}")
        if prompt_tokens >= self.context:
            most = self.executor.model.config.context_length
            hint = f"raise the context (this model allows {most}) or " if self.context < most else ""
            raise UsageError(
                f"the prompt has {prompt_tokens} tokens and the context holds {self.context}, "
                f"of which one is needed for the answer: {hint}shorten the prompt"
            )

    def _allocate(self, tokens: int) -> list[int]:
        return self.pool.allocate(-(-tokens // self.pool.block_tokens))

    def _warm_up_step(self, count: int, blocks: Sequence[int]) -> float:
        return self._timed_step(np.zeros(count, np.int32), 0, np.array(blocks, np.int32), "last")[1]

    def _timed_step(
        self, tokens: Int32Array, start: int, table: Int32Array, outputs: Literal["last", "none"]
    ) -> tuple[Floats, float]:
        begin = time.perf_counter()
        logits = self.executor.forward([SequenceSlice(tokens, start, table, outputs)])
        seconds = time.perf_counter() - begin
        self.costs.observe_step(len(tokens), start, seconds)
        return logits, seconds

    def _restore(self, ids: Int32Array, blocks: Sequence[int]) -> RestoreReport:
        """Restore what is worth it; any failure of the store leaves everything to be computed."""
        if self._session is None:
            return RestoreReport()
        try:
            return restore_prefix(
                self._session,
                ids,
                self.pool,
                blocks,
                block_bytes=self.pool.payload_bytes(self._block_tokens // self.pool.block_tokens),
                step_tokens=self._step_tokens,
                costs=self.costs,
            )
        except Exception as error:  # whatever the client does wrong, the prompt can still be computed
            return RestoreReport(reason=f"restoring failed: {type(error).__name__}: {error}")

    def _prefill(self, ids: Int32Array, start: int, table: Int32Array) -> Floats:
        """Compute positions [start, len(ids)); the last token's logits, float32 [vocabulary]."""
        logits = _NO_LOGITS
        for first, last in chunk_plan(start, len(ids), block=self._block_tokens, chunk=self._step_tokens):
            wanted: Literal["last", "none"] = "last" if last == len(ids) else "none"
            logits, _ = self._timed_step(ids[first:last], first, table, wanted)
        last_row: Floats = logits[-1]
        return last_row

    def _decode(
        self,
        logits: Floats,
        ids: Int32Array,
        table: Int32Array,
        settings: GenerationSettings,
        answer: "_Answer",
    ) -> StopReason:
        """Choose, hand out and compute token after token, from the prompt's last `logits` on."""
        sampler = Sampler(settings.sampling)
        ends = frozenset[int]() if settings.ignore_end else self.tokenizer.end_ids
        sequence = np.empty(self.context, np.int32)
        sequence[: len(ids)] = ids
        computed = len(ids)
        while True:
            token = sampler.choose(logits)
            answer.chosen()
            is_end = token in ends
            if not is_end:
                answer.add(token)
            if self._store and settings.store:
                # Not before the first token is out: storing must not cost time to first token.
                self._store.advance(sequence[:computed])
            if is_end:
                return "end"
            if len(answer.tokens) == settings.max_tokens:
                return "length"
            if computed == self.context:
                return "context"
            sequence[computed] = token
            piece = SequenceSlice(sequence[computed : computed + 1], computed, table, "last")
            logits = self.executor.forward([piece])[-1]
            computed += 1


class _Answer:
    """The growing answer and its clock, which starts when the prompt is in hand."""

    def __init__(self, tokenizer: Tokenizer, on_text: OnText | None) -> None:
        self._begin = time.perf_counter()
        self._stream = tokenizer.stream(continues=True)
        self._on_text = on_text
        self._parts: list[str] = []
        self.tokens: list[int] = []
        self.first_s = 0.0

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._begin

    def chosen(self) -> None:
        """A token has been chosen; the first one's time is what the user waited."""
        self.first_s = self.first_s or self.elapsed_s()

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self._hand_out(self._stream.push(token))

    def text(self) -> str:
        """All of it, with what an incomplete last character becomes."""
        self._hand_out(self._stream.finish())
        return "".join(self._parts)

    def _hand_out(self, text: str) -> None:
        if text:
            self._parts.append(text)
            if self._on_text:
                self._on_text(text)
