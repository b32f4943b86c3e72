"""Calls of a library that knows no deadline: each runs in a thread, and is given up when its time is over.

A call that was given up runs on, as a library cannot be stopped; it sees `BoundedCall.is_given_up` and only ends. While
`most_given_up` of them are still running, further calls fail at once, so that a store that hangs does not fill the
process with threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

_Result = TypeVar("_Result")


class GivenUp(TimeoutError):
    """An error: a call of a library did not end in time, and is still running."""


class BoundedCall:
    """A call of a library that is running in a thread of its own. `deadline` is the time of time.monotonic() at which
    its caller gives it up; then `is_given_up` becomes true, while the call runs on.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.is_given_up = False

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


class BoundedCalls:
    """A runner of calls of a library that has no time limits of its own. Each call runs in a thread whose name begins
    with `name`. When `most_given_up` calls that took too long are still running, further calls fail at once.
    """

    def __init__(self, name: str, most_given_up: int) -> None:
        self._name = name
        self._most_given_up = most_given_up
        self._lock = threading.Condition()
        self._running = 0
        self._given_up = 0

    def run(self, function: Callable[[BoundedCall], _Result], timeout_s: float) -> _Result:
        """Run `function` in a thread, and return its result or raise its error. Raises GivenUp when it has not ended
        after `timeout_s` seconds, and TimeoutError if too many such calls are still running.
        """
        with self._lock:
            if self._given_up >= self._most_given_up:
                raise TimeoutError(f"{self._given_up} calls that were given up are still running")
            self._running += 1
        call, ended = BoundedCall(time.monotonic() + timeout_s), Future[_Result]()
        threading.Thread(target=self._run, args=(function, call, ended), name=self._name, daemon=True).start()
        wait([ended], timeout_s)
        with self._lock:
            if not ended.done():
                call.is_given_up = True
                self._given_up += 1
                raise GivenUp(f"no answer within {timeout_s:g} s")
        return ended.result()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until no call is running, not even one that was given up. Return True if none
        is running.
        """
        with self._lock:
            return self._lock.wait_for(lambda: not self._running, timeout_s)

    def _run(self, function: Callable[[BoundedCall], _Result], call: BoundedCall, ended: Future[_Result]) -> None:
        try:
            end: Callable[[], None] = partial(ended.set_result, function(call))
        except BaseException as error:  # raised again in the thread that waits for it
            end = partial(ended.set_exception, error)
        with self._lock:
            end()
            self._running -= 1
            self._given_up -= call.is_given_up
            self._lock.notify_all()
