"""Turns the logits of a step into tokens, further answers and ends of answers.

The module owns a request from its first token on, and its events. It does not schedule: it hands sequences that begin
or end to the run queue.
"""

from collections.abc import Callable, Collection

from kvstore_engine.batching.answer import ChosenToken, Floats, choose, choose_one, log_probabilities
from kvstore_engine.batching.batch import Batch
from kvstore_engine.batching.events import Event, Finished, Reason, Token, Usage
from kvstore_engine.batching.intake import RequestIntake
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.scheduler import Scheduler
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.storer import Storer
from kvstore_engine.executors.logits import StepLogits


class OutputProcessor:
    """The part of the engine that turns the logits of a step into tokens and events, and ends answers that are
    complete.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        intake: RequestIntake,
        storer: Storer,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._intake, self._storer = scheduler, intake, storer
        self._observer, self._clock = observer, clock

    def rows_needed(self, batch: Batch) -> list[int]:
        """Return the numbers of the rows of logits that `apply` will read completely for the step of `batch`. Of the
        other rows it reads only the likeliest token.
        """
        outputs = (part.sequence for part in batch.parts if part.has_output)
        return [row for row, sequence in enumerate(outputs) if _needs_row(sequence)]

    def apply(self, batch: Batch, logits: StepLogits, whole: Collection[int]) -> list[Event]:
        """Count the tokens of `batch` as computed, choose the next token of each answer from its row of `logits`, and
        return the events. `whole` is the result of `rows_needed(batch)`.
        """
        events: list[Event] = []
        tenants = self._scheduler.statistics.tenants
        for part in batch.parts:
            sequence = part.sequence
            new = sequence.advance_to(part.end, "computed")
            if new:
                tenants.charge(sequence.request.tenant, prompt_tokens=new)
            if part.read_pages:
                sequence.selected_from = min(sequence.selected_from, part.begin)
            self._scheduler.space.seal(sequence.held, sequence.tokens, part.begin, min(part.end, sequence.exact))
        outputs = dict(enumerate(part.sequence for part in batch.parts if part.has_output))
        needed = list(whole)
        rows = dict(zip(needed, logits.rows(needed), strict=True)) if needed else {}
        choices = choose(logits, {row: sequence.answer for row, sequence in outputs.items()}, rows)
        now = self._clock()
        for row, sequence in outputs.items():
            events += self._continue(sequence, choices[row], rows.get(row), now)
        return events

    def _continue(self, sequence: Sequence, choice: ChosenToken, row: Floats | None, now: float) -> list[Event]:
        siblings: list[Sequence] = []
        refused: dict[int, str] = {}
        if row is not None and _forks(sequence):
            siblings, refused = self._intake.fork(sequence)
        events = self._take(sequence, choice, row, now)
        for sibling in siblings:
            assert row is not None  # they were forked with it
            events += self._take(sibling, choose_one(row, sibling.answer), row, now)
        return events + [self._never_begun(sequence, index, "failed", why) for index, why in refused.items()]

    def _take(self, sequence: Sequence, choice: ChosenToken, row: Floats | None, now: float) -> list[Event]:
        """Append the chosen token to `sequence`, and end the answer if it ends."""
        request, answer, token = sequence.request, sequence.answer, choice.token
        if choice.failure:
            return [self.finish(sequence, "failed", choice.failure, is_sound=not choice.is_unsound)]
        accounts = sequence.accounts
        accounts.first_s = now if accounts.first_s is None else accounts.first_s
        if token in answer.end_ids:
            return [self.finish(sequence, "end")]  # the end token is neither shown nor timed
        accounts.last_s = now
        try:
            text, is_stopped = answer.push(token)
        except Exception as error:  # from a constraint, for instance; the other answers go on
            return [self.finish(sequence, "failed", f"token {token} cannot follow: {error or type(error).__name__}")]
        sequence.generated += 1
        self._scheduler.statistics.tenants.charge(request.tenant, output_tokens=1)
        self._observer.token(request.id, sequence.index, now)
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if row is not None and request.settings.logprobs is not None:
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
        """End the answer `sequence` for `reason`; `message` explains a failure. If it is the first answer of its
        request, end the further answers that have not begun as well. Return the `Finished` events.
        """
        ends: list[Event] = [self.finish(sequence, reason, message)]
        if sequence.index == 0 and not sequence.is_forked:
            further = range(1, sequence.request.settings.n)
            ends += [self._never_begun(sequence, index, reason, message) for index in further]
        return ends

    def _never_begun(self, sequence: Sequence, index: int, reason: Reason, message: str) -> Finished:
        """Return the end of answer `index`, which would have begun with the first token of `sequence`."""
        now, name = self._clock(), sequence.request.id
        waited_s = now - sequence.arrived_s
        usage = Usage(prompt_tokens=sequence.prompt_tokens, queued_s=waited_s, total_s=waited_s)
        self._observer.finished(name, index, reason, usage, now)
        return Finished(name, index, reason, usage, message)

    def finish(self, sequence: Sequence, reason: Reason, message: str = "", *, is_sound: bool = True) -> Finished:
        """End the answer `sequence` for `reason`, release its blocks and return its `Finished` event; `message`
        explains a failure. With `is_sound` False its computed blocks are not shared with other sequences.
        """
        now = self._clock()
        scheduler, request = self._scheduler, sequence.request
        is_whole = reason in ("end", "length", "context", "stop")
        if is_whole:
            scheduler.statistics.ended(sequence, now)
            scheduler.preemption.ended(sequence)
        if sequence.block_table is not None and reason != "failed":  # what led to a failure must not be restored
            self._storer.offer(sequence, is_last=True)
            if is_whole:
                self._storer.hint_end(sequence, by_itself=reason in ("end", "stop"))
        scheduler.run_queue.leave(sequence, is_sound=is_sound)
        usage = sequence.usage(now)
        self._observer.finished(request.id, sequence.index, reason, usage, now)
        return Finished(request.id, sequence.index, reason, usage, message, sequence.answer.finish())


def _forks(sequence: Sequence) -> bool:
    """Return whether the first token of `sequence` begins the further answers of its request."""
    has_more = sequence.index == 0 and sequence.request.settings.n > 1
    return has_more and not sequence.generated and not sequence.is_forked


def _needs_row(sequence: Sequence) -> bool:
    """Return whether the next token needs the row of logits: for its choice, for its log probabilities, or for the
    answers beside it.
    """
    return not sequence.answer.is_plain or sequence.request.settings.logprobs is not None or _forks(sequence)
