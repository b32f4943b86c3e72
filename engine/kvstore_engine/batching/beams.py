"""The beams of a request: sequences that fork at each step, and the answers that result.

Owns what a search's decisions mean for blocks, the run queue and events. `beam_search` decides.

A beam with several continuations is forked: its children share all of its blocks by reference, and the first to write
into the last, partly filled block gets a copy of it. A beam without a continuation releases its blocks. So a request of
B beams holds its prompt once, and each common beginning of its answers once.
"""

from collections.abc import Callable
from collections.abc import Sequence as Series
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.answer import Answer, TextSource
from kvstore_engine.batching.beam_search import BeamSearch, Branch, Hypothesis, UnsoundLogits
from kvstore_engine.batching.events import Event, Finished, Reason, Token
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.request import Request
from kvstore_engine.batching.scheduler import Scheduler
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.storer import Storer

Floats = npt.NDArray[np.float32]


def search_of(request: Request, room: int, end_ids: frozenset[int]) -> BeamSearch | None:
    """The beam search that `request` asks for, or None. `room`: most tokens of an answer."""
    settings = request.settings
    if settings.beams is None:
        return None
    return BeamSearch(settings.beams, frozenset() if settings.ignore_end else end_ids, room, settings.logprobs or 0)


class Beams:
    """The searches of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        storer: Storer,
        tokenizer: TextSource,
        *,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._storer, self._tokenizer = scheduler, storer, tokenizer
        self._observer, self._clock = observer, clock

    def advance(self, unit: list[Sequence], rows: Floats) -> list[Event]:
        """Go on by one token. `rows`: the beams' logits, float32 [beams, vocabulary]."""
        leader, search, now = unit[0], unit[0].search, self._clock()
        assert search is not None
        try:
            branches = search.advance(rows)
        except UnsoundLogits as error:
            return self.end(unit, "failed", str(error), is_sound=False)
        for beam in unit:
            beam.generated += 1
        accounts = leader.accounts
        accounts.first_s, accounts.last_s = now if accounts.first_s is None else accounts.first_s, now
        self._scheduler.statistics.tenants.charge(leader.request.tenant, output_tokens=len(unit))
        self._observer.token(leader.request.id, leader.index, now)
        if search.is_done:
            return self._answer(unit, search)
        self._branch(unit, branches)
        return []

    def end(self, unit: list[Sequence], reason: Reason, message: str = "", *, is_sound: bool = True) -> list[Event]:
        """End all answers of a request without a token."""
        now, leader = self._clock(), unit[0]
        self._leave(unit, is_sound=is_sound)
        usage = leader.usage(now)
        ends: list[Event] = []
        for index in range(leader.request.settings.n):
            self._observer.finished(leader.request.id, index, reason, usage, now)
            ends.append(Finished(leader.request.id, index, reason, usage, message))
        return ends

    def _branch(self, unit: list[Sequence], branches: Series[Branch]) -> None:
        """`unit` becomes the beams of `branches`, in that order."""
        space, running = self._scheduler.space, self._scheduler.run_queue.running
        heirs: dict[int, int] = {}  # the first child of a parent keeps its blocks
        for number, branch in enumerate(branches):
            heirs.setdefault(branch.parent, number)
        spare = [beam for parent, beam in enumerate(unit) if parent not in heirs]
        for beam in spare:
            space.release(beam.held)
            beam.block_table = None
        beams = []
        for number, branch in enumerate(branches):
            beam = parent = unit[branch.parent]
            if heirs[branch.parent] != number:
                beam = spare.pop() if spare else self._another(parent)
                beam.block_table = space.fork(parent.held)
                beam.tokens[: parent.length] = parent.tokens[: parent.length]
                beam.length, beam.computed, beam.furthest = parent.length, parent.computed, parent.furthest
            beams.append(beam)
        for beam in spare:
            running.remove(beam)
        for beam, branch in zip(beams, branches, strict=True):
            beam.tokens[beam.length] = branch.last.token
            beam.length += 1
        beams[0].offered_blocks = unit[0].offered_blocks  # the leader stores the prompt's blocks
        unit[:] = beams

    def _another(self, parent: Sequence) -> Sequence:
        """One more running beam, without blocks. The beams of a unit share one account."""
        beam = replace(parent, tokens=np.empty_like(parent.tokens), block_table=None)
        self._scheduler.run_queue.run(beam)
        return beam

    def _answer(self, unit: list[Sequence], search: BeamSearch) -> list[Event]:
        """The search is done: the events of its answers."""
        now, leader = self._clock(), unit[0]
        self._scheduler.statistics.ended(leader, now)
        self._scheduler.preemption.ended(leader)
        self._leave(unit)
        events: list[Event] = []
        for index in range(leader.request.settings.n):
            found = search.hypotheses[index] if index < len(search.hypotheses) else None
            events += self._events(leader, index, found, now)
        return events

    def _events(self, leader: Sequence, index: int, found: Hypothesis | None, now: float) -> list[Event]:
        """All events of answer `index`."""
        request, links = leader.request, found.links() if found is not None else []
        answer, reason, message = Answer(request.settings, index, self._tokenizer), _reason(leader, found), ""
        has_logprobs = request.settings.logprobs is not None
        events: list[Event] = []
        try:
            for link in links:
                text, _ = answer.push(link.token)
                logprob = link.logprob if has_logprobs else None
                events.append(Token(request.id, index, link.token, text, logprob, link.top))
        except Exception as error:  # from a tokenizer that does not know the token
            reason, message = "failed", f"token {link.token} cannot be shown: {error or type(error).__name__}"
        if found is None:
            message = "the search found fewer answers: the model leaves no more tokens to choose from"
        usage = replace(leader.usage(now), generated_tokens=len(links))
        if index:
            usage = replace(usage, local_tokens=usage.prompt_tokens, daemon_tokens=0, computed_tokens=0)
            usage = replace(usage, recomputed_tokens=0, preemptions=0, swaps=0)
        self._observer.finished(request.id, index, reason, usage, now)
        score = None if found is None else found.score
        return [*events, Finished(request.id, index, reason, usage, message, answer.finish(), score)]

    def _leave(self, unit: list[Sequence], *, is_sound: bool = True) -> None:
        leader = unit[0]
        if leader.block_table is not None and is_sound:
            self._storer.offer(leader)
        for sequence in unit:
            self._scheduler.run_queue.leave(sequence, is_sound=is_sound)


def _reason(leader: Sequence, found: Hypothesis | None) -> Reason:
    if found is None:
        return "failed"
    if found.reason == "length" and leader.generated < leader.request.settings.max_tokens:
        return "context"
    return found.reason
