"""asyncio in virtual time: the daemon's coroutines, timers and futures run unchanged, and waiting takes no real time.

The module owns a loop whose clock is a `ManualClock`: when nothing is ready it jumps to the next timer. It never reads
the operating system's clock, opens a socket or starts a thread. Invariants: time only grows, and only while nothing is
ready to run; a program does equal things in equal order each time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from kvstored.clock import NS_PER_S, ManualClock

Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")


class Stuck(RuntimeError):
    """A task waits, and no event is left that could end the wait: the simulated model has a mistake."""


class _TimeSelector(selectors.SelectSelector):
    """A selector that watches no file: a wait moves the clock on instead."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("everybody waits and nothing is left to happen")
        if timeout > 0:
            self._clock.advance(ns=max(1, round(timeout * NS_PER_S)))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which it reads from `clock`."""

    def __init__(self, clock: ManualClock) -> None:
        self._virtual = clock
        super().__init__(_TimeSelector(clock))
        self.broken: list[BaseException] = []  # what a callback raised: it would be lost otherwise
        self.set_exception_handler(self._note)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.broken.append(context.get("exception") or RuntimeError(context["message"]))

    def time(self) -> float:
        return self._virtual.monotonic_ns() / NS_PER_S

    def call_soon_threadsafe(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """Call `callback` soon. The loop has one thread, so no other thread has to be woken."""
        return self.call_soon(callback, *args, context=context)

    def now_ns(self) -> int:
        return self._virtual.monotonic_ns()

    def at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call `callback` with `args` when `clock` reads `when_ns` nanoseconds, or a nanosecond later. Return the
        handle by which to cancel that.
        """
        return self.call_at(when_ns / NS_PER_S, callback, *args)


def run_virtual(clock: ManualClock, main: Callable[[VirtualLoop], Coroutine[Any, Any, Answer]]) -> Answer:
    """Run `main` to its end in virtual time and return its answer. Raises what `main` raises, and Stuck."""
    loop = VirtualLoop(clock)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        answer = runner.run(main(loop))
    if loop.broken:
        raise loop.broken[0]
    return answer
