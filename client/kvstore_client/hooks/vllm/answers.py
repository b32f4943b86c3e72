"""Reports to the daemon how long answers were, beside the running engine: how long it keeps a chain depends on that.

Owns one thread and the queue of reports. The scheduler knows that a request has ended before its last blocks are
stored, and the daemon knows a chain by its last block; so each end is reported a little later, and again while blocks
of it are missing. No request waits for this, and a failure costs a hint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple, Protocol

from kvstore_client.hooks.vllm.identity import KeySource, address
from kvstore_client.hooks.vllm.orders import Prefix

DELAY_S = 0.1  # before the first time, and twice as long before each further one
_TIMES = 6
_MOST_WAITING = 1024  # reports; further ones are dropped


class HintSession(KeySource, Protocol):
    """The part of a session that this half uses."""

    def hint(self, tokens: Any = None, *, keys: Any = None, answer_tokens: int = 0) -> int: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that has ended: its `blocks` whole ones, prompt and answer, and the tokens of its answer."""

    prefix: Prefix
    blocks: int
    tokens: int


class _Due(NamedTuple):
    """A report, in the order of time; `number` orders equal times."""

    at_s: float
    number: int
    session: HintSession
    answer: Answer
    delay_s: float
    times_left: int


class AnswerReporter:
    """`sessions`: one for each rank's shard, each a chain of its own to the daemon."""

    def __init__(
        self,
        sessions: Sequence[HintSession],
        *,
        delay_s: float = DELAY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions = sessions
        self._delay_s, self._clock = delay_s, clock
        self._waiting: list[_Due] = []  # a heap
        self._numbers = count()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def ended(self, answer: Answer) -> None:
        """Returns at once."""
        with self._changed:
            if self._closing or len(self._waiting) >= _MOST_WAITING:
                return
            for session in self._sessions:
                self._wait(session, answer, self._delay_s, _TIMES)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-vllm-answers", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Drop waiting reports and end the thread; a report that is being sent has the session's deadline."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _wait(self, session: HintSession, answer: Answer, delay_s: float, times: int) -> None:
        heappush(self._waiting, _Due(self._clock() + delay_s, next(self._numbers), session, answer, delay_s, times))

    def _run(self) -> None:
        while (due := self._next()) is not None:
            if not self._is_known(due.session, due.answer) and due.times_left > 1:
                with self._changed:
                    if not self._closing:
                        self._wait(due.session, due.answer, 2 * due.delay_s, due.times_left - 1)

    def _is_known(self, session: HintSession, answer: Answer) -> bool:
        """Report; whether the daemon had all of the blocks."""
        try:
            named = address(session, answer.prefix)
            return named is not None and session.hint(**named, answer_tokens=answer.tokens) >= answer.blocks
        except Exception:  # a closed session, or a bug here: neither may end the thread
            return True

    def _next(self) -> _Due | None:
        """The next that is due; None at the end."""
        with self._changed:
            while not self._closing:
                wait_s = self._waiting[0].at_s - self._clock() if self._waiting else None
                if wait_s is not None and wait_s <= 0:
                    return heappop(self._waiting)
                self._changed.wait(wait_s)
        return None
