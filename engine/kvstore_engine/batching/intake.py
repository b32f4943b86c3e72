"""Accepts requests, and makes the sequences that answer them.

The module owns the checks by which a request is refused, and the numbers of arrivals. It does not decide which sequence
runs: new sequences enter the run queue.
"""

from collections.abc import Callable

import numpy as np

from kvstore_engine.batching.answer import Answer, TextSource
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.request import Request
from kvstore_engine.batching.scheduler import Scheduler
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.errors import UsageError
from kvstore_engine.restore.session import KvSession

SessionOf = Callable[[str], KvSession | None]
_LEAST_RETRY_S = 1.0


class Overloaded(RuntimeError):
    """An error: a request was not accepted because too many wait. It may be accepted after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestIntake:
    """The entrance of the engine: it checks requests and makes a sequence (the state of one answer) for each. `context`
    is the most tokens of a prompt and its answer, and token ids must be below `vocabulary`. `sessions(tenant)` returns
    the tenant's session with the daemon, or None.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: TextSource,
        settings: EngineSettings,
        *,
        context: int,
        vocabulary: int,
        sessions: SessionOf | None,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._tokenizer, self._settings = scheduler, tokenizer, settings
        self._context, self._vocabulary, self._sessions = context, vocabulary, sessions
        self._observer, self._clock = observer, clock
        self._order = 0

    def accept(self, request: Request) -> Sequence:
        """Check `request`, put the sequence of its first answer into the queue of the scheduler, and return that
        sequence. Raises UsageError if the request can never be answered, Overloaded if too many requests wait.
        """
        self._check(request)
        self._check_load(request.tenant)
        self._order += 1
        sequence = self._sequence(request, 0, self._order, self._clock())
        self._scheduler.run_queue.enter(sequence)
        self._scheduler.run_queue.wait(sequence)
        self._observer.queued(request.id, sequence.arrived_s)
        return sequence

    def fork(self, sequence: Sequence) -> tuple[list[Sequence], dict[int, str]]:
        """Begin the further answers of a request with n > 1, when `sequence`, its first answer, chooses its first
        token. The answers share the blocks of the prompt. Return their sequences, and the reasons why answers could not
        begin, by the number of the answer.
        """
        run_queue = self._scheduler.run_queue
        sequence.is_forked = True
        siblings: list[Sequence] = []
        refused: dict[int, str] = {}
        for index in range(1, sequence.request.settings.n):
            try:
                sibling = self._sequence(sequence.request, index, sequence.order, sequence.arrived_s)
            except Exception as error:  # its constraint cannot be made; the other answers go on
                refused[index] = str(error)
                continue
            sibling.furthest, sibling.accounts.local = sibling.prompt_tokens, sibling.prompt_tokens
            sibling.is_requested, sibling.offered_blocks = True, sequence.offered_blocks
            siblings.append(sibling)
            run_queue.enter(sibling)
            if run_queue.free_places > 0:
                sibling.block_table = self._scheduler.space.fork(sequence.held)
                sibling.computed = sibling.length
                run_queue.run(sibling)
            else:
                run_queue.wait(sibling)
        return siblings, refused

    def _check(self, request: Request) -> None:
        count = len(request.tokens)
        if not count:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if count >= self._context:
            raise UsageError(
                f"the prompt has {count} tokens and the context holds {self._context}, of which one is needed for the "
                "answer: shorten the prompt or run with a larger context or pool"
            )
        if int(request.tokens.min()) < 0 or int(request.tokens.max()) >= self._vocabulary:
            raise UsageError(f"token ids must be in 0..{self._vocabulary - 1}")
        if self._scheduler.run_queue.of(request.id):
            raise UsageError(f"a request {request.id!r} is under way already")

    def _check_load(self, tenant: str) -> None:
        queue, most, most_s = self._scheduler.run_queue, self._settings.max_queued, self._settings.max_queue_s
        ahead = queue.ahead(tenant)
        if not ahead:
            return
        wait_s = self._scheduler.statistics.wait_s(ahead, queue.places)
        if ahead + 1 > most:
            # The queue drains evenly: after that share of the wait there is room for this one.
            retry_s = max(_LEAST_RETRY_S, wait_s * (ahead + 1 - most) / ahead)
            raise Overloaded(f"{ahead} requests are waiting, {most} may", retry_s)
        if wait_s > most_s:
            retry_s = max(_LEAST_RETRY_S, wait_s - most_s)
            raise Overloaded(f"the wait is expected to be {wait_s:.0f} s, over {most_s:.0f} s", retry_s)

    def _sequence(self, request: Request, index: int, order: int, arrived_s: float) -> Sequence:
        """Return the sequence for answer `index` of `request`. Raises UsageError if its constraint cannot be made."""
        count = len(request.tokens)
        tokens = np.empty(min(count + request.settings.max_tokens, self._context), np.int32)
        tokens[:count] = request.tokens
        return Sequence(
            request=request,
            index=index,
            order=order,
            arrived_s=arrived_s,
            answer=Answer(request.settings, index, self._tokenizer),
            tokens=tokens,
            length=count,
            prompt_tokens=count,
            session=self._sessions(request.tenant) if self._sessions is not None else None,
            level=float(request.priority),
        )
