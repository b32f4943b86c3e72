"""The engine's loop: it admits sequences, computes a step of all that run, chooses their tokens, and stores new blocks.

The module owns the order of a step and the unfinished requests. One thread drives it: nothing here is safe for two.
Invariants: an answer's tokens do not depend on when it was scheduled, except for the rounding of sums
(`batch_planner`); a step whose computing fails has no effect and can be tried again; after a failure of the store only
its savings are lost.
"""

import time
from collections.abc import Callable

from kvstore_engine.batching.answer import TextSource
from kvstore_engine.batching.batch import Batch
from kvstore_engine.batching.compute import Compute
from kvstore_engine.batching.events import Event
from kvstore_engine.batching.intake import RequestIntake, SessionOf
from kvstore_engine.batching.observer import FanOut, Observer, StepRecord
from kvstore_engine.batching.output_processor import OutputProcessor
from kvstore_engine.batching.request import Request
from kvstore_engine.batching.restorer import Ended, Restorer
from kvstore_engine.batching.scheduler import Scheduler
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.batching.storer import Storer
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.errors import UsageError
from kvstore_engine.restore.copies import HostPoolCopies, PoolCopies
from kvstore_engine.restore.record import RestorationLog
from kvstore_engine.worker.remote import StepFailed
from kvstore_restore.learned import LearnedCosts

_PATIENCE_S = 0.01  # for the daemon, beside running answers
_QUICK_ANSWER_S = 0.002
_ALONE_S = 1.0  # copying without a pause, while no sequence decodes
_LEAST_HINT_S = 1.0  # a shorter wait is no hint to the daemon
_IDLE_WAIT_S = 0.05  # for the daemon, with nothing to compute


def _keep(events: list[Event]) -> None:
    """Publish nothing: the caller of `step` reads what it returns."""


class BatchEngine:
    """An inference engine that answers many requests at once, one step of `compute` after another. `sessions(tenant)`
    returns the tenant's session with the daemon, or None. `copies` moves blocks between sessions and the pool; by
    default the processor does. `context` is the most tokens that a prompt and its answer may have. One thread may use
    it.
    """

    def __init__(
        self,
        compute: Compute,
        tokenizer: TextSource,
        *,
        settings: EngineSettings | None = None,
        sessions: SessionOf | None = None,
        copies: PoolCopies | None = None,
        costs: LearnedCosts | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        pool = compute.pool
        self.compute, self.pool, self.tokenizer = compute, pool, tokenizer
        self.settings = settings or EngineSettings()
        self.observer = FanOut(observer) if observer is not None else Observer()
        self.costs = costs or LearnedCosts()
        limits = compute.limits
        context = self.settings.context or limits.max_context
        self.context = min(context, limits.max_context, pool.blocks * pool.block_tokens)
        self._sessions = sessions
        self._clock = clock
        self.space = BlockSpace(pool, sharing=self.settings.prefix_sharing)
        windows = self.space.windows
        if windows is not None:
            least = min(windows.blocks_for(self.settings.step_tokens(limits)), pool.blocks + 1)
            if windows.pool.blocks < least:
                raise ValueError(f"the pool has {windows.pool.blocks} blocks for windowed layers: {least} are needed")
        self._copies = copies = copies or HostPoolCopies(pool)
        # Copies by the device take no core from the step: it need not wait for them.
        self._patience_s = 0.0 if copies.waits_by_layer else _PATIENCE_S
        self.restorer = Restorer(
            self.space,
            copies,
            self.costs,
            restoring=self.settings.restoring,
            step_tokens=self.settings.step_tokens(limits),
            clock=clock,
        )
        self.restorations = RestorationLog()
        self.storer = Storer(self.space, copies, self.observer, clock)
        self.scheduler = Scheduler(
            self.space, self.restorer, limits, self.settings, costs=self.costs, observer=self.observer, clock=clock
        )
        self._intake = RequestIntake(
            self.scheduler,
            tokenizer,
            self.settings,
            context=self.context,
            vocabulary=limits.vocabulary,
            sessions=sessions,
            observer=self.observer,
            clock=clock,
        )
        self._outputs = OutputProcessor(self.scheduler, self._intake, self.storer, self.observer, clock)
        self._run_queue = self.scheduler.run_queue
        self._steps = 0
        self._pending: list[Event] = []
        self._new: list[Sequence] = []  # since the last step
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """True if a request is unfinished or an event was not returned yet, so that `step` must be called again."""
        return bool(self._pending) or self._run_queue.has_sequences

    @property
    def waiting(self) -> int:
        """The number of answers that wait to be given blocks of the pool, so that they can run."""
        return len(self._run_queue.waiting)

    @property
    def running(self) -> int:
        """The number of answers that hold blocks of the pool and are being computed."""
        return len(self._run_queue.running)

    def add(self, request: Request) -> None:
        """Accept `request`, which the next steps will answer. Raises UsageError if it can never be answered, and
        Overloaded if too many requests wait.
        """
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        if any(event.request_id == request.id for event in self._pending):
            raise UsageError(f"a request {request.id!r} is under way already")
        self._new.append(self._intake.accept(request))

    def cancel(self, request_id: str) -> None:
        """End all answers of the request `request_id`; the next `step` returns their `Finished` events. An unknown id
        is ignored.
        """
        for sequence in self._run_queue.of(request_id):
            self._pending += self._outputs.end_request(sequence, "cancelled")

    def step(self, publish: Callable[[list[Event]], None] = _keep) -> list[Event]:
        """Compute one step of all running sequences and return its events, such as new tokens and ended answers. The
        step also admits waiting sequences, restores blocks from the daemon and stores new ones. If nothing can be
        computed yet, it waits for the daemon for at most about 50 ms. `publish` gets the events as soon as the tokens
        are chosen: who shows them can begin while the rest of the step is done.
        """
        begin = self._clock()
        self.storer.settle(0.0)
        self._run_queue.admit()
        self._hint_waiting()
        self._restore()
        batch = self.scheduler.next_batch()
        events, self._pending = self._pending, []
        if not batch.parts:
            publish(events)
            self._idle(events)
            return events
        failure: StepFailed | None = None
        self._copies.decoding(bool(batch.decodes))
        try:
            computing, beside_loading = self._clock(), self.restorer.is_loading
            slices = [part.slice(self.pool.block_tokens) for part in batch.parts]
            whole = self._outputs.rows_needed(batch)
            logits = self.compute.step(slices, whole)
            compute_s = self._clock() - computing
        except StepFailed as error:
            failure = error
        except BaseException:
            self._pending = events + self._pending
            raise
        finally:
            self.scheduler.planner.release_borrowed(batch)
        if failure is not None:
            blamed = [batch.parts[index].sequence for index in failure.slices]
            events += [end for one in blamed for end in self._outputs.end_request(one, "failed", str(failure))]
            publish(events)
            return events
        is_sound, ended = self.restorer.settle()
        self._note_restored(ended)
        if not is_sound:  # it read blocks that have not come: the next one computes them
            publish(events)
            return events
        events += self._outputs.apply(batch, logits, whole)
        publish(events)
        if not ended:  # else it waited for copies too, and says little about computing
            self.scheduler.observe(batch, compute_s, beside_loading=beside_loading)
        self.restorer.stepped(batch, computing, compute_s)
        self._store(batch)
        self._steps += 1
        self.scheduler.tidy(self._steps)
        self._report(batch, begin, compute_s)
        return events

    def drain(self) -> None:
        """Run steps until every accepted request is answered, then wait until the daemon has stored or refused all
        blocks that were sent to it. The events of these steps are not returned.
        """
        while self.has_work:
            self.step()
        while self.storer.outstanding:
            self.storer.settle(0.0, everything=True)
            self.storer.wait(_IDLE_WAIT_S)

    def close(self) -> None:
        """Cancel all requests, wait until the daemon has stored the blocks that were sent to it, and stop the engine's
        threads. The pool and the sessions with the daemon stay open.
        """
        if not self._is_closed:
            self._is_closed = True
            self._copies.decoding(False)
            for sequence in self._run_queue.sequences:
                self._outputs.end_request(sequence, "cancelled")
            self.storer.close()
            self.restorer.close()

    def _hint_waiting(self) -> None:
        """Hint new requests that were not admitted to the daemon, which might evict their blocks."""
        new, self._new = self._new, []
        queue = self._run_queue
        waiting = [sequence for sequence in new if sequence in queue.waiting] if queue.waiting else []
        for place, sequence in enumerate(waiting, len(queue.waiting) - len(waiting) + 1):
            wait_s = self.scheduler.statistics.wait_s(place, max(1, len(queue.running)))
            if wait_s >= _LEAST_HINT_S:
                self.storer.hint_due(sequence, wait_s)

    def _restore(self) -> None:
        """Request stored blocks for prompts that are about to be computed, and continue restorations under way."""
        if self._sessions is None:
            return
        self._request_blocks()
        if self.restorer.is_busy:
            is_decoding = any(sequence.is_decoding for sequence in self._run_queue.running)
            # A request for what is in DRAM is answered in less than a millisecond: better now than in the next step.
            self.restorer.wait(_QUICK_ANSWER_S if is_decoding else 0.0, is_quick=True)
            beside_s = (self.settings.step_stretch - 1) * self.scheduler.statistics.step_s
            self._note_restored(self.restorer.advance(beside_s if is_decoding else _ALONE_S))
            self._request_blocks()  # sequences that waited for blocks just restored request those that follow

    def _note_restored(self, ended: list[Ended]) -> None:
        for sequence, report, record in ended:
            request_id, now = sequence.request.id, self._clock()
            self.restorations.add(record)
            self.observer.restoration(record)
            if report.tokens:
                self.observer.restored(request_id, sequence.index, "daemon", report.tokens, now)
            self.observer.store_answered(request_id, sequence.index, report, now)

    def _request_blocks(self) -> None:
        planner = self.scheduler.planner
        for sequence in self._run_queue.running:
            if sequence.is_requested or sequence.is_decoding:
                continue
            planner.skip_ready(sequence)
            if not planner.is_requested(sequence):
                sequence.is_requested = True
                self.restorer.begin(sequence)

    def _idle(self, events: list[Event]) -> None:
        """Wait for work under way, unless there are events to report: nothing can be computed now."""
        self._copies.decoding(False)
        self.storer.settle(0.0, everything=True)
        if not self._run_queue.has_sequences:
            self.scheduler.host.trim()
        elif not events:
            if self.restorer.is_busy:
                self.restorer.wait(_IDLE_WAIT_S)
            elif self.storer.outstanding:
                self.storer.wait(_IDLE_WAIT_S)

    def _store(self, batch: Batch) -> None:
        """Offer new blocks, from the step after a sequence's first token on, since storing must not delay that
        token.
        """
        for part in batch.parts:
            sequence = part.sequence
            if sequence.block_table is not None and (sequence.generated > 1 or self._may_lose(sequence)):
                self.storer.offer(sequence)
        if self.has_work:
            self.storer.settle(self._patience_s)
        else:
            self._copies.decoding(False)
            self.storer.settle(0.0, everything=True)

    def _may_lose(self, sequence: Sequence) -> bool:
        """Return whether blocks that have left a window must be stored while the prompt is computed, or never."""
        windows = self.space.windows
        return windows is not None and not sequence.generated and windows.may_lose(sequence.prompt_tokens)

    def _report(self, batch: Batch, begin: float, compute_s: float) -> None:
        statistics = self.space.statistics()
        record = StepRecord(
            number=self._steps,
            begin_s=begin,
            end_s=self._clock(),
            compute_s=compute_s,
            running=self.running,
            waiting=self.waiting,
            prefill_tokens=batch.prefill_tokens,
            decode_tokens=len(batch.decodes),
            budget_tokens=batch.budget_tokens,
            pool_blocks=statistics.blocks,
            used_blocks=statistics.used,
            cached_blocks=statistics.cached,
            parts=batch.record,
        )
        self.observer.step(record)
