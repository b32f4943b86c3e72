"""The way from the tiers' threads to the control loop: completions are queued, and wake the loop once for many.

A wake-up of the loop costs a system call and a fight for the GIL; a batch of 64 blocks should cost one, not 64.
Work for which no answer waits is queued too, and follows the answers without a turn of the loop for each piece.
Invariant: all that is queued runs exactly once, on the loop, in the order in which it came to its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

Ended = TypeVar("Ended")
LATER_S = 0.0005  # of later work at once: then others on the loop have their turn


class CompletionQueue:
    """A queue through which other threads have functions run on the event loop, in order. Call `to_loop` on the loop;
    any thread may call the function that it returns."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._woken = False
        self._idle = asyncio.Event()
        self.outstanding = 0
        self._later: deque[Callable[[], None]] = deque()
        self._is_later_due = self._is_later_held = False

    def to_loop(self, handler: Callable[[Ended], None]) -> Callable[[Ended], None]:
        """Return a function that any thread may call once, with one argument. The event loop then calls `handler` with
        that argument."""
        self.outstanding += 1
        loop_thread = get_ident()

        def post(outcome: Ended) -> None:
            self._ready.append((handler, outcome))
            if not self._woken:  # a race wakes the loop twice at worst, never not at all: see _drain
                self._woken = True
                self._wake(on_loop=get_ident() == loop_thread)

        return post

    def outcome_of(self, start: Callable[[Callable[[Ended], None]], object]) -> asyncio.Future[Ended]:
        """Call `start` with a completion function, which any thread may call once with a result. Return a future for
        that result. Raises the errors of `start`."""
        ended: asyncio.Future[Any] = self._loop.create_future()

        def settle(outcome: Any) -> None:
            if not ended.done():
                ended.set_result(outcome)

        completion = self.to_loop(settle)
        try:
            start(completion)
        except BaseException:
            ended.cancel()
            completion(None)  # nothing else will come
            raise
        return ended

    def later(self, work: Callable[[], None]) -> None:
        """Call `work`, for which no answer waits, in a later turn of the loop; after `hold_later`, in `do_later`."""
        self._later.append(work)
        if not (self._is_later_held or self._is_later_due):
            self._do_later_soon()

    def hold_later(self) -> None:
        """Keep later work back until `do_later` is called, in the present turn of the loop."""
        self._is_later_held = True

    def do_later(self) -> None:
        """Do the later work that waits, or, if it takes long, the rest of it in another turn."""
        self._is_later_due, self._is_later_held = False, True  # what the work adds needs no turn of its own
        ends_s = self._loop.time() + LATER_S if self._later else 0.0
        while self._later:
            try:
                self._later.popleft()()
            except Exception as error:
                self._loop.call_exception_handler({"message": "later work failed", "exception": error})
            if self._later and self._loop.time() >= ends_s:
                self._do_later_soon()
                break
        self._is_later_held = False

    def _do_later_soon(self) -> None:
        self._is_later_due = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon is past caring
            self._loop.call_soon(self.do_later)

    def _wake(self, *, on_loop: bool) -> None:
        call_soon = self._loop.call_soon if on_loop else self._loop.call_soon_threadsafe  # two system calls
        try:
            call_soon(self._drain)
        except RuntimeError:
            return  # the loop is closed: the daemon is past caring

    def _drain(self) -> None:
        self._woken = False  # before looking: what is posted from here on wakes us again
        try:
            while self._ready:
                handler, outcome = self._ready.popleft()
                self.outstanding -= 1
                handler(outcome)
        finally:
            if self._ready:  # a handler raised: that is its own end, not that of those behind it
                self._wake(on_loop=True)
            if not self.outstanding:
                self._idle.set()

    async def drained(self) -> None:
        """Wait until every function that `to_loop` returned has been called and handled."""
        while self.outstanding:
            self._idle.clear()
            await self._idle.wait()
