"""The prompts of one generator whose model is computed in stages: restored before their first step, stored after their
answer.

The module owns the restorer, the lifetime of the stages' sessions, and the hidden states that wait to be stored. It
does not schedule: the engine's steps find restored blocks as a shared prefix. One prompt at a time. Invariant: no block
is written once it is ready.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.executors.logits import FloatArray
from kvstore_engine.graph.plan import BLOCK_TOKENS
from kvstore_engine.restore.record import RestorationRecord, RestoreReport, StoreReport
from kvstore_engine.restore.session import KvSession, Tokens
from kvstore_engine.stages.pipeline import Pipeline
from kvstore_engine.stages.restorer import StagedRestoration, StagedRestorer
from kvstore_engine.stages.stores import StageStore, stage_fingerprints, store_prefix
from kvstore_proto.arena import slot_bytes
from kvstore_proto.fingerprint import Fingerprint
from kvstore_restore.learned import LearnedCosts

_log = logging.getLogger(__name__)
_TENANT = ""  # requests of a generator have none
_STAGING_BLOCKS = 4  # of a session: the daemon copies some while the stage writes the next


@dataclass(frozen=True, slots=True)
class RestoredPrompt:
    """The result of restoring a prompt in a pipeline: one report for all stages, a record for each stage, and the
    seconds that stages computed.
    """

    report: RestoreReport
    records: tuple[RestorationRecord, ...]
    computing_s: float


class StagedPrompts:
    """A restorer and storer of prompts for a model that a pipeline computes in stages. `stores` and `costs` have an
    entry for each stage. With `keeps_inputs` it also stores the hidden states between stages. `check` is called after
    computing; if it returns False, the stages compute again.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stores: Sequence[StageStore],
        costs: Sequence[LearnedCosts] | None = None,
        *,
        keeps_inputs: bool = True,
        check: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pipeline, self._stores, self._clock = pipeline, tuple(stores), clock
        self._restorer = StagedRestorer(pipeline, stores, costs, clock=clock)
        self._keeps_inputs, self._check = keeps_inputs, check
        self._inputs: tuple[dict[int, FloatArray], ...] = ()

    @property
    def is_connected(self) -> bool:
        """True if a session with the daemon is connected in at least one stage."""
        return any(store.kv is not None and store.kv.state == "connected" for store in self._stores)

    def wake(self) -> None:
        """Notify all sessions with the daemon that a prompt is about to come."""
        for session in self._sessions():
            session.wake()

    def warm_up(self, table: npt.NDArray[np.int32]) -> None:
        """Ping the daemon, and compute one block of tokens into the pool blocks `table`, to measure the speed of the
        stages.
        """
        for session in self._sessions():
            session.ping()
        self._restorer.warm_up(table)

    def restore(self, space: BlockSpace, tokens: Tokens, request_id: str, *, is_stored: bool) -> RestoredPrompt:
        """Load or compute the K/V of all whole storage blocks before the last token of `tokens`, so that the next
        request with these tokens finds them in `space`. `is_stored` says that the caller will call `store`, for which
        hidden states are kept. `request_id` is for the records. Raises the errors of computing.
        """
        whole = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        table = space.claim(_TENANT, tokens[:whole])
        try:
            keeps = is_stored and self._keeps_inputs
            restored = self._restorer.restore(tokens, table.ids, keeps_inputs=keeps, request_id=request_id)
            while not self._check():
                restored = self._restorer.restore(tokens, table.ids, keeps_inputs=keeps, request_id=request_id)
            space.seal(table, tokens, 0, whole)
        finally:
            space.release(table)
        self._inputs = restored.inputs
        return _of(restored)

    def store(self, space: BlockSpace, tokens: Tokens, answer_tokens: int) -> StoreReport:
        """Store the blocks of `tokens`, a prompt and its answer of `answer_tokens` tokens, in the daemon, together with
        the hidden states that `restore` kept. Return the numbers of blocks by result.
        """
        begin_s = self._clock()
        table = space.claim(_TENANT, tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS])
        try:
            ready = space.ready_tokens(table, 0)
            stored = store_prefix(self._pipeline, self._stores, tokens[:ready], table.ids, self._inputs)
        finally:
            space.release(table)
        if answer_tokens:
            self._hint(tokens[:ready], answer_tokens=answer_tokens)
        counts = Counter(status for each in stored for status in (*each.kv, *each.inputs))
        failures = [f"stage {number}: {each.failure}" for number, each in enumerate(stored) if each.failure]
        reason = "; ".join(failures)
        return StoreReport(**counts, store_s=self._clock() - begin_s, reason=reason)

    def forget(self, space: BlockSpace, tokens: Tokens) -> None:
        """Drop the blocks of `tokens` from the pool and the hidden states that `restore` kept."""
        self._inputs = ()
        space.discard(space.claim(_TENANT, tokens[: len(tokens) // space.block_tokens * space.block_tokens]))

    def announce(self, tokens: Tokens, due_in_s: float) -> None:
        """Send the daemon a hint that the conversation of `tokens` goes on in about `due_in_s` seconds."""
        self._hint(tokens, due_in_s=due_in_s, next_step="end_of_turn")

    def close(self) -> None:
        """Stop the threads. The pipeline and the sessions stay open."""
        self._restorer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hint(self, tokens: Tokens, **hint: Any) -> None:
        whole = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS]
        for session in self._sessions():
            if len(whole) and session.state == "connected":
                try:
                    session.hint(whole, **hint)
                except Exception as error:  # the answer is there: a hint that is lost costs nothing of it
                    _log.debug("a hint was not sent: %s: %s", type(error).__name__, error)

    def _sessions(self) -> Iterator[KvSession]:
        for store in self._stores:
            yield from (each for each in (store.kv, store.inputs) if each is not None)


def _of(restored: StagedRestoration) -> RestoredPrompt:
    records = restored.stages
    working_s = restored.seconds - restored.lookup_s
    is_loaded = any(each.loaded for each in records)
    computing_s = min(working_s, max(each.compute_busy_s for each in records)) if is_loaded else working_s
    report = RestoreReport(
        tokens=min(each.loaded for each in records) * BLOCK_TOKENS,
        bytes=restored.nbytes,
        resident_blocks=min(each.stored for each in records),
        lookup_s=restored.lookup_s,
        restore_s=working_s - computing_s,
        estimated_load_s=max(each.predicted_load_s for each in records),
        estimated_compute_s=max(each.predicted_compute_s for each in records),
        reason=_reason(records),
    )
    return RestoredPrompt(report, records, computing_s)


def _reason(records: Sequence[RestorationRecord]) -> str:
    if lost := sum(each.lost for each in records):
        return f"{lost} stored blocks of stages could not be loaded"
    if not any(each.stored for each in records):
        return "nothing resident"
    return f"each stage by a plan of its own: {', '.join(each.plan or 'compute' for each in records)}"


Connect = Callable[[Fingerprint, int], KvSession]
"""A session for a fingerprint, with so many bytes of staging memory."""


@contextlib.contextmanager
def open_staged_prompts(
    pipeline: Pipeline,
    whole: Fingerprint,
    connect: Connect,
    profiles: Sequence[Path],
    *,
    keeps_inputs: bool = True,
    check: Callable[[], bool] = lambda: True,
) -> Iterator[StagedPrompts]:
    """Connect the stages of `pipeline` with the daemon for the time of a `with` block, and give the block an object
    that restores and stores prompts. `whole` is the fingerprint of the whole model. `connect` opens a session.
    `profiles` are the files with the measured costs of each stage. `keeps_inputs` and `check` are explained at
    `StagedPrompts`.
    """
    layers = [stage.layers for stage in pipeline.stages]
    with ExitStack() as stack:

        def opened(fingerprint: Fingerprint) -> KvSession:
            session = connect(fingerprint, _STAGING_BLOCKS * slot_bytes(fingerprint.payload_bytes()))
            stack.callback(session.close)
            return session

        stores = [
            StageStore(opened(kv), None if inputs is None else opened(inputs))
            for kv, inputs in stage_fingerprints(whole, layers, pipeline.config.width)
        ]
        costs = [LearnedCosts.load(path) for path in profiles]
        for each, path in zip(costs, profiles, strict=True):
            stack.callback(each.save, path)
        yield stack.enter_context(StagedPrompts(pipeline, stores, costs, keeps_inputs=keeps_inputs, check=check))
