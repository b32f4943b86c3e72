"""Tells the daemon how long answers were, beside the running engine: what it keeps for how long hangs on that.

Owns one thread and what it still has to tell. The scheduler knows that a request has ended a moment before its last
blocks are stored, and the daemon knows a chain by its last block; so each end is told a little later. Nothing here is
waited for, and what goes wrong costs a hint.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore_client.hooks.vllm.identity import KeySource, address
from kvstore_client.hooks.vllm.orders import Prefix

DELAY_S = 0.1
_MOST_WAITING = 1024  # ends; the oldest is forgotten for one more


class HintSession(KeySource, Protocol):
    """The part of a session that this half uses."""

    def hint(self, tokens: Any = None, *, keys: Any = None, answer_tokens: int = 0) -> int: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that has ended: its whole blocks, prompt and answer, and the tokens of its answer."""

    prefix: Prefix
    tokens: int


class Teller:
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
        self._waiting: deque[tuple[float, Answer]] = deque(maxlen=_MOST_WAITING)
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def ended(self, answer: Answer) -> None:
        """Returns at once."""
        with self._changed:
            self._waiting.append((self._clock() + self._delay_s, answer))
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="kvstore-vllm-tell", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Forget what is not told yet, and end the thread; what is being told has the session's deadline."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (answer := self._next()) is not None:
            for session in self._sessions:
                with suppress(Exception):  # a closed session, or a fault in telling: neither may end the thread
                    named = address(session, answer.prefix)
                    if named is not None:
                        session.hint(**named, answer_tokens=answer.tokens)

    def _next(self) -> Answer | None:
        """The next that is due; None at the end."""
        with self._changed:
            while not self._closing:
                wait_s = self._waiting[0][0] - self._clock() if self._waiting else None
                if wait_s is not None and wait_s <= 0:
                    return self._waiting.popleft()[1]
                self._changed.wait(wait_s)
        return None
