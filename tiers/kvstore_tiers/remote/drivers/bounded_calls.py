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
    """A running call of a library. `deadline` is the time of time.monotonic() at which it is given up."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.is_given_up = False

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


class BoundedCalls:
    """A runner of calls of one library with a time limit, each on a thread whose name begins with `name`."""

    def __init__(self, name: str, most_given_up: int) -> None:
        self._name = name
        self._most_given_up = most_given_up
        self._lock = threading.Condition()
        self._running = 0
        self._given_up = 0

    def run(self, function: Callable[[BoundedCall], _Result], timeout_s: float) -> _Result:
        """Run `function` on a thread, and return its result or raise its error. Raises GivenUp after `timeout_s`
        seconds.
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
        """Wait up to `timeout_s` seconds for all running calls, also given-up ones. Return True if none is running any
        more.
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
