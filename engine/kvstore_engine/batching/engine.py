"""The engine's loop: lets sequences in, computes a step of all that run, chooses their tokens, stores what is new.

Owns the order of a step and the requests under way. Scheduling, blocks, restoring and storing are parts of their own
that it drives. One thread drives it: nothing here is safe for two.
Invariants: an answer's tokens do not depend on when it was scheduled, but for the rounding of sums (see `planning`); a
step whose computing fails has no effect and can be taken again; a store that fails costs nothing but its savings.
"""

import time
from collections.abc import Callable

from kvstore_engine.batching.acceptance import check_request
from kvstore_engine.batching.answer import TextSource
from kvstore_engine.batching.assembly import EngineParts
from kvstore_engine.batching.batch_planner import Batch
from kvstore_engine.batching.compute import Compute
from kvstore_engine.batching.events import Event
from kvstore_engine.batching.guarding import guarded
from kvstore_engine.batching.observer import Observer, StepRecord
from kvstore_engine.batching.output_processor import OutputProcessor, SessionOf
from kvstore_engine.batching.request import Request
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.errors import UsageError
from kvstore_engine.pool import BlockPool
from kvstore_engine.restore import CostModel, RestoreReport
from kvstore_engine.worker.failure import StepFailed

_PATIENCE_S = 0.01  # for the daemon, beside running answers
_QUICK_ANSWER_S = 0.002
_ALONE_S = 1.0  # copying without a pause, while nobody is waiting for a token
_TIDY_STEPS = 8
_LEAST_HINT_S = 1.0  # of a wait, to the daemon
_IDLE_WAIT_S = 0.05  # for the daemon, with nothing else to do


class BatchEngine:
    """Answers requests over `pool` with `compute`; `sessions(tenant)` is the tenant's daemon session, if there is one.

    `context` is the most tokens of a prompt and its answer.
    """

    def __init__(
        self,
        compute: Compute,
        pool: BlockPool,
        tokenizer: TextSource,
        *,
        context: int | None = None,
        settings: EngineSettings | None = None,
        sessions: SessionOf | None = None,
        costs: CostModel | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.compute, self.pool, self.tokenizer = compute, pool, tokenizer
        self.settings = settings or EngineSettings()
        self.observer = guarded(observer) if observer is not None else Observer()
        self.costs = costs or CostModel()
        limits = compute.limits
        self.context = min(context or limits.max_context, limits.max_context, pool.blocks * pool.block_tokens)
        self._sessions = sessions
        self._clock = clock
        self._work = EngineParts(
            pool,
            limits,
            self.settings,
            costs=self.costs,
            observer=self.observer,
            clock=clock,
            found=self._found,
            admitted=self._admitted,
        )
        self._outputs = OutputProcessor(
            self._work, tokenizer, context=self.context, sessions=sessions, observer=self.observer, clock=clock
        )
        self._steps = 0
        self._pending: list[Event] = []
        self._new: list[Sequence] = []  # since the last step
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """`step` has something to do or to tell."""
        run_queue = self._work.run_queue
        return bool(self._pending or run_queue.waiting or run_queue.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place or for blocks."""
        return len(self._work.run_queue.waiting)

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._work.run_queue.running)

    @property
    def parts(self) -> EngineParts:
        """What the engine drives, for whoever reports on it."""
        return self._work

    def add(self, request: Request) -> None:
        """Take `request` in. UsageError if it can never be answered, Overloaded if too many wait already."""
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        run_queue, statistics = self._work.run_queue, self._work.statistics
        check_request(
            request,
            context=self.context,
            vocabulary=self.compute.limits.vocabulary,
            places=run_queue.places,
            space=self._work.space,
        )
        if request.id in self._outputs.under_way or any(event.request_id == request.id for event in self._pending):
            raise UsageError(f"a request {request.id!r} is under way already")
        ahead = run_queue.ahead(request.tenant)
        self._work.admission.check(ahead, 1, statistics.wait_s(ahead, run_queue.places))
        sequence = self._outputs.new_sequence(request, 0, self._clock())
        self._outputs.under_way.enter(sequence)
        run_queue.wait(sequence)
        self._new.append(sequence)
        self.observer.queued(request.id, sequence.arrived_s)

    def cancel(self, request_id: str) -> None:
        """End all answers of a request, wherever they are; the next `step` tells. Unknown ids are ignored."""
        for sequence in self._work.run_queue.of(request_id):
            self._pending += self._outputs.end_request(sequence, "cancelled")

    def step(self) -> list[Event]:
        """One step: let in, restore, compute, choose, store. Returns at once but for computing; while nothing can be
        computed because all wait for the daemon, it waits for that, a little.
        """
        work = self._work
        begin = self._clock()
        work.storer.settle(0.0)
        work.run_queue.admit()
        self._hint_waiting()
        self._restore()
        plan = work.planner.plan(work.run_queue.decoding(), work.run_queue.prompts())
        events, self._pending = self._pending, []
        if not plan.parts:
            self._idle(events)
            return events
        failure: StepFailed | None = None
        try:
            computing = self._clock()
            logits = self.compute.forward([part.slice(self.pool.block_tokens) for part in plan.parts])
            compute_s = self._clock() - computing
        except StepFailed as error:
            failure = error
        except BaseException:
            self._pending = events + self._pending
            raise
        finally:
            work.planner.release_borrowed(plan)
        if failure is not None:
            blamed = dict.fromkeys(plan.parts[index].sequence.unit[0] for index in failure.slices)
            return events + [end for one in blamed for end in self._outputs.end_request(one, "failed", str(failure))]
        self._learn(plan, compute_s)
        events += self._outputs.apply(plan, logits)
        self._store(plan)
        self._steps += 1
        if self._steps % _TIDY_STEPS == 0:
            self._tidy()
        if not self.has_work:
            work.host.trim()
        self._report(plan, begin, compute_s)
        return events

    def drain(self) -> None:
        """Answer what is under way, then wait until all that was offered is stored, or given up. Each put has a
        deadline.
        """
        while self.has_work:
            self.step()
        while self._work.storer.outstanding:
            self._work.storer.settle(0.0, everything=True)
            self._work.storer.wait(_IDLE_WAIT_S)

    def close(self) -> None:
        """Cancel what is under way and stop the threads. Compute object, pool and sessions are their makers'."""
        if not self._is_closed:
            self._is_closed = True
            for sequence in self._work.run_queue.leaders():
                self._outputs.end_request(sequence, "cancelled")
            self._work.close()

    def _admitted(self, sequence: Sequence, now: float) -> None:
        if sequence.accounts.admitted_s is None:
            sequence.accounts.admitted_s = now
        self.observer.admitted(sequence.request.id, sequence.index, now)

    def _found(self, sequence: Sequence, tokens: int) -> None:
        if tokens:
            self.observer.restored(sequence.request.id, sequence.index, "local", tokens, self._clock())

    def _hint_waiting(self) -> None:
        """The daemon might give up the blocks of those that have come and were not let in."""
        new, self._new = self._new, []
        run_queue = self._work.run_queue
        waiting = [sequence for sequence in new if sequence in run_queue.waiting] if run_queue.waiting else []
        for place, sequence in enumerate(waiting, len(run_queue.waiting) - len(waiting) + 1):
            wait_s = self._work.statistics.wait_s(place, max(1, len(run_queue.running)))
            if wait_s >= _LEAST_HINT_S:
                self._work.storer.hint_due(sequence, wait_s)

    def _restore(self) -> None:
        """Ask the daemon for those that are about to compute a prompt, and go on with those that have asked."""
        if self._sessions is None:
            return
        work = self._work
        self._ask()
        if work.restorer.is_busy:
            is_decoding = any(sequence.is_decoding for sequence in work.run_queue.running)
            # A question for what lies in DRAM is answered in less than a millisecond: rather than in the next step.
            work.restorer.wait(_QUICK_ANSWER_S if is_decoding else 0.0, is_quick=True)
            beside_s = (self.settings.step_stretch - 1) * work.statistics.step_s
            for sequence, report in work.restorer.advance(beside_s if is_decoding else _ALONE_S):
                self._restored(sequence, report)
            self._ask()  # those that waited for blocks that have just come, for what follows them

    def _ask(self) -> None:
        work = self._work
        for sequence in work.run_queue.running:
            if sequence.asked_daemon or sequence.is_decoding:
                continue
            work.planner.skip_ready(sequence)
            if not work.planner.is_asked(sequence):
                sequence.asked_daemon = True
                work.restorer.begin(sequence)

    def _restored(self, sequence: Sequence, report: RestoreReport) -> None:
        request_id, now = sequence.request.id, self._clock()
        if report.tokens:
            self.observer.restored(request_id, sequence.index, "daemon", report.tokens, now)
        self.observer.store_answered(request_id, sequence.index, report, now)

    def _idle(self, events: list[Event]) -> None:
        """Nothing can be computed now: wait for what is under way, unless there is something to tell."""
        work = self._work
        work.storer.settle(0.0, everything=True)
        if not work.run_queue.running and not work.run_queue.waiting:
            work.host.trim()
            return
        if events:
            return
        if work.restorer.is_busy:
            work.restorer.wait(_IDLE_WAIT_S)
        elif work.storer.outstanding:
            work.storer.wait(_IDLE_WAIT_S)

    def _learn(self, plan: Batch, seconds: float) -> None:
        work = self._work
        self.costs.observe_batch([(part.end - part.begin, part.begin) for part in plan.parts], seconds)
        work.budget.observe(plan.decodes, plan.prefill_tokens, seconds)
        work.statistics.stepped(seconds, len(plan.decodes))

    def _store(self, plan: Batch) -> None:
        """Offer new blocks, from the step after their sequence's first token on: storing must not delay that."""
        work = self._work
        for part in plan.parts:
            sequence = part.sequence
            if sequence.block_table is not None and sequence.generated > 1 and sequence.leads:
                work.storer.offer(sequence)
        if self.has_work:
            work.storer.settle(_PATIENCE_S)
        else:
            work.storer.settle(0.0, everything=True)

    def _tidy(self) -> None:
        """Give back memory that swapped sequences have left, and move the blocks of the next to yield together, if
        being swapped as others were makes that pay.
        """
        self._work.host.look()
        sequence = self._work.run_queue.next_to_yield() if self.settings.compaction else None
        if sequence is not None and not sequence.is_restoring:
            self._work.compactor.compact(sequence.held, self._work.preemption.expected_transfers)

    def _report(self, plan: Batch, begin: float, compute_s: float) -> None:
        statistics = self._work.space.statistics()
        record = StepRecord(
            number=self._steps,
            begin_s=begin,
            end_s=self._clock(),
            compute_s=compute_s,
            running=self.running,
            waiting=self.waiting,
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=len(plan.decodes),
            budget_tokens=plan.budget_tokens,
            pool_blocks=statistics.blocks,
            used_blocks=statistics.used,
            cached_blocks=statistics.cached,
            parts=plan.record(),
        )
        self.observer.step(record)
