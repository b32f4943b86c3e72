"""Report to the daemon, beside the running engine, how long answers were and when their chains are expected again: the
daemon keeps a chain accordingly.

The module owns one thread and the queue of reports. The scheduler knows that a request has ended before its last blocks
are stored, and the daemon knows a chain by its last block. So each end is reported a little later, and again while
blocks of it are missing. No request waits for this, and after a failure only a hint is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from kvstore_client.session import Session
from kvstore_connectors.vllm.identity import address
from kvstore_connectors.vllm.kv_hints import HintedChain, KvHints
from kvstore_connectors.vllm.orders import RequestPrefix

DELAY_S = 0.1  # before the first time, and twice as long before each further one
_TIMES = 6
_MOST_WAITING = 1024  # reports; further ones are dropped


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """A request of vLLM that has ended. `prefix` has the `blocks` whole blocks of its prompt and answer, `tokens` is
    the number of tokens of its answer, and `kv_hints` are the hints that its client gave, if any.
    """

    prefix: RequestPrefix
    blocks: int
    tokens: int
    kv_hints: Any = None


class _Due(NamedTuple):
    """A report that is due, ordered by time, then by `number`. `expected` counts from `ended_s`."""

    at_s: float
    number: int
    session: Session
    answer: EndedAnswer
    expected: HintedChain
    ended_s: float
    delay_s: float
    times_left: int


class AnswerReporter:
    """A thread that reports ended answers to the daemon, with the expectations that clients gave for them. `sessions`
    has one session for the shard of each rank. `say` is called with a warning about malformed hints. The first report
    waits `delay_s` seconds.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        *,
        say: Callable[[str], None],
        delay_s: float = DELAY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions = sessions
        self.kv_hints = KvHints(say)
        self._delay_s, self._clock = delay_s, clock
        self._waiting: list[_Due] = []  # a heap
        self._numbers = count()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def ended(self, answer: EndedAnswer) -> None:
        """Queue the report of `answer`, and return at once."""
        with self._changed:
            if self._closing or len(self._waiting) >= _MOST_WAITING:
                return
            expected, now = self.kv_hints.read(answer.kv_hints), self._clock()
            for session in self._sessions:
                number = next(self._numbers)
                due = _Due(now + self._delay_s, number, session, answer, expected, now, self._delay_s, _TIMES)
                heappush(self._waiting, due)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-vllm-answers", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Drop the waiting reports and end the thread. A report that is being sent may take until the session's
        deadline.
        """
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (due := self._next()) is not None:
            if not self._is_known(due) and due.times_left > 1:
                delay_s = 2 * due.delay_s
                again = due._replace(at_s=self._clock() + delay_s, delay_s=delay_s, times_left=due.times_left - 1)
                with self._changed:
                    if not self._closing:
                        heappush(self._waiting, again)

    def _is_known(self, due: _Due) -> bool:
        """Send a report; return whether the daemon had all of the blocks. Blocks are prefetched when it has them, or
        with the last try.
        """
        session, answer, expected = due.session, due.answer, due.expected
        past_s = self._clock() - due.ended_s
        try:
            named = address(session, answer.prefix)
            if named is None:
                return False
            due_in_s = _left_s(expected.due_in_s, past_s)
            is_known = answer.blocks <= session.hint(
                **named, answer_tokens=answer.tokens, next_step=expected.next_step, due_in_s=due_in_s
            )
            if expected.wants_prefetch and (is_known or due.times_left == 1):
                session.prefetch(**named, in_s=_left_s(expected.prefetch_in_s, past_s))
            return is_known
        except Exception:  # a closed session, or a bug here: neither may end the thread
            return True

    def _next(self) -> _Due | None:
        """Return the next report that is due; None at the end."""
        with self._changed:
            while not self._closing:
                wait_s = self._waiting[0].at_s - self._clock() if self._waiting else None
                if wait_s is not None and wait_s <= 0:
                    return heappop(self._waiting)
                self._changed.wait(wait_s)
        return None


def _left_s(seconds: float | None, past_s: float) -> float | None:
    return None if seconds is None else max(seconds - past_s, 0.0)
