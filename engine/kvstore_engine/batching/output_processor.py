"""Turns what a step has computed into tokens, further answers and ends.

Owns the requests' life from their first token on, and the events that tell of it, but for those of beams, which `beams`
owns. It never schedules: a sequence that ends, or whose siblings begin, is told to the run queue.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.answer import Answer, TextSource
from kvstore_engine.batching.assembly import EngineParts
from kvstore_engine.batching.batch_planner import Batch
from kvstore_engine.batching.beams import Beams, search_of
from kvstore_engine.batching.events import Event, Finished, Reason, Token, Usage
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.request import Request
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.token_choice import Choice, choose, log_probabilities
from kvstore_engine.batching.under_way import UnderWay
from kvstore_engine.restore import KvSession

Floats = npt.NDArray[np.float32]
SessionOf = Callable[[str], KvSession | None]


class OutputProcessor:
    """The answers of one engine."""

    def __init__(
        self,
        parts: EngineParts,
        tokenizer: TextSource,
        *,
        context: int,
        sessions: SessionOf | None,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._parts = parts
        self._tokenizer = tokenizer
        self._context = context
        self._sessions = sessions
        self._observer = observer
        self._clock = clock
        self._order = 0
        self.under_way = UnderWay(parts.statistics.tenants)
        self._beams = Beams(parts, tokenizer, self.under_way, observer=observer, clock=clock)

    def new_sequence(self, request: Request, index: int, arrived_s: float) -> Sequence:
        count = len(request.tokens)
        tokens = np.empty(min(count + request.settings.max_tokens, self._context), np.int32)
        tokens[:count] = request.tokens
        room = min(request.settings.max_tokens, self._context - count + 1)  # the last token is never computed
        self._order += 1
        return Sequence(
            request=request,
            index=index,
            order=self._order,
            arrived_s=arrived_s,
            answer=Answer(request.settings, index, self._tokenizer),
            tokens=tokens,
            length=count,
            prompt_tokens=count,
            session=self._sessions(request.tenant) if self._sessions is not None else None,
            level=float(request.priority),
            search=search_of(request, room, self._tokenizer.end_ids),
        )

    def apply(self, plan: Batch, logits: Floats) -> list[Event]:
        """Account for what was computed and choose the next tokens."""
        events: list[Event] = []
        tenants = self._parts.statistics.tenants
        for part in plan.parts:
            sequence = part.sequence
            new = sequence.reach(part.end, "computed")
            tenants.charge(sequence.request.tenant, prompt_tokens=new)
            self._parts.space.seal(sequence.held, sequence.tokens, part.begin, part.end)
        outputs = [part.sequence for part in plan.parts if part.has_output]
        beams = {sequence: row for row, sequence in enumerate(outputs) if sequence.search is not None}
        drawn = logits
        if beams:
            drawn = logits[[row for row, sequence in enumerate(outputs) if sequence not in beams]]
            outputs = [sequence for sequence in outputs if sequence not in beams]
        choices = choose(drawn, [sequence.answer for sequence in outputs]) if outputs else []
        now = self._clock()
        for sequence, choice, row in zip(outputs, choices, drawn, strict=True):
            events += self._continue(sequence, choice, row, now)
        for unit in [sequence.unit for sequence in beams if sequence.leads]:
            events += self._beams.advance(unit, logits[[beams[beam] for beam in unit]])
        return events

    def _continue(self, sequence: Sequence, choice: Choice, row: Floats, now: float) -> list[Event]:
        settings = sequence.request.settings
        siblings: list[Sequence] = []
        failed: list[Event] = []
        if not sequence.generated and sequence.index == 0 and settings.n > 1 and not sequence.is_forked:
            siblings, failed = self._fork(sequence)
        events = self._take(sequence, choice, row, now)
        for sibling in siblings:
            events += self._take(sibling, choose(row[None], [sibling.answer])[0], row, now)
        return events + failed

    def _fork(self, sequence: Sequence) -> tuple[list[Sequence], list[Event]]:
        """The further answers of a request with n > 1, at the end of its prompt: they share all of its blocks. And the
        ends of those that cannot begin.
        """
        sequence.is_forked = True
        siblings: list[Sequence] = []
        failed: list[Event] = []
        for index in range(1, sequence.request.settings.n):
            try:
                sibling = self.new_sequence(sequence.request, index, sequence.arrived_s)
            except Exception as error:  # its constraint cannot be made: that concerns no other answer
                failed.append(self._never_begun(sequence, index, "failed", str(error)))
                continue
            sibling.order = sequence.order
            sibling.furthest, sibling.accounts.local = sibling.prompt_tokens, sibling.prompt_tokens
            sibling.asked_daemon, sibling.offered_blocks = True, sequence.offered_blocks
            siblings.append(sibling)
            self.under_way.enter(sibling)
            if self._parts.run_queue.free_places > 0:
                sibling.block_table = self._parts.space.fork(sequence.held)
                sibling.computed = sibling.length
                self._parts.run_queue.run(sibling)
            else:
                self._parts.run_queue.wait(sibling)
        return siblings, failed

    def _take(self, sequence: Sequence, choice: Choice, row: Floats, now: float) -> list[Event]:
        """`choice` is the next token of `sequence`: tell, and end the answer where it ends."""
        request, answer, token = sequence.request, sequence.answer, choice.token
        if choice.failure:
            return [self.finish(sequence, "failed", choice.failure, is_sound=not choice.is_unsound)]
        accounts = sequence.accounts
        accounts.first_s = now if accounts.first_s is None else accounts.first_s
        if token in answer.end_ids:
            return [self.finish(sequence, "end")]  # not one of its tokens: the time per token ends before
        accounts.last_s = now
        try:
            text, is_stopped = answer.push(token)
        except Exception as error:  # of a constraint, say: it concerns no other answer
            return [self.finish(sequence, "failed", f"token {token} cannot follow: {error or type(error).__name__}")]
        sequence.generated += 1
        self._parts.statistics.tenants.charge(request.tenant, output_tokens=1)
        self._observer.token(request.id, sequence.index, now)
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if request.settings.logprobs is not None:
            logprob, top = log_probabilities(row, token, request.settings.logprobs)
        events: list[Event] = [Token(request.id, sequence.index, token, text, logprob, top)]
        if is_stopped:
            events.append(self.finish(sequence, "stop"))
        elif sequence.generated == request.settings.max_tokens:
            events.append(self.finish(sequence, "length"))
        elif sequence.length == len(sequence.tokens):
            events.append(self.finish(sequence, "context"))
        else:
            sequence.tokens[sequence.length] = token
            sequence.length += 1
        return events

    def end_request(self, sequence: Sequence, reason: Reason, message: str = "") -> list[Event]:
        """End `sequence`, and with it the other beams of its search, or the further answers of its request that it had
        not come to.
        """
        if sequence.search is not None:
            return self._beams.end(sequence.unit, reason, message)
        ends: list[Event] = [self.finish(sequence, reason, message)]
        if sequence.index == 0 and not sequence.is_forked:
            further = range(1, sequence.request.settings.n)
            ends += [self._never_begun(sequence, index, reason, message) for index in further]
        return ends

    def _never_begun(self, sequence: Sequence, index: int, reason: Reason, message: str) -> Finished:
        """The end of answer `index`, which was to begin where `sequence` has its first token."""
        now, name = self._clock(), sequence.request.id
        waited_s = now - sequence.arrived_s
        usage = Usage(prompt_tokens=sequence.prompt_tokens, queued_s=waited_s, total_s=waited_s)
        self._observer.finished(name, index, reason, usage, now)
        return Finished(name, index, reason, usage, message)

    def finish(self, sequence: Sequence, reason: Reason, message: str = "", *, is_sound: bool = True) -> Finished:
        """The end of `sequence`; not `is_sound`: what it has computed is not for others."""
        now = self._clock()
        work, request = self._parts, sequence.request
        is_whole = reason in ("end", "length", "context", "stop")
        if is_whole:
            work.statistics.ended(sequence, now)
            work.preemption.ended(sequence)
        if (
            sequence.block_table is not None and reason != "failed"
        ):  # what led to a failure is not for others to restore
            work.storer.offer(sequence)
            if is_whole:
                work.storer.hint_end(sequence)
        work.run_queue.leave(sequence, is_sound=is_sound)
        self.under_way.leave(sequence)
        usage = sequence.usage(now)
        self._observer.finished(request.id, sequence.index, reason, usage, now)
        return Finished(request.id, sequence.index, reason, usage, message, sequence.answer.finish())
