"""Work of the control thread in steps, between which others go on, and how much of that thread it has had."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeVar

Found = TypeVar("Found")


class Steps:
    """`busy_s`: of the thread's processor time, so far."""

    def __init__(self) -> None:
        self.busy_s = 0.0

    async def through(self, steps: Generator[None, None, Found]) -> Found:
        """Return what a generator of steps returns."""
        while True:
            began_s = time.thread_time()
            try:
                next(steps)
            except StopIteration as end:
                found: Found = end.value
                return found
            finally:
                self.busy_s += time.thread_time() - began_s
            await asyncio.sleep(0)

    async def once(self, step: Callable[[], Found]) -> Found:
        """Return what one step returns."""
        began_s = time.thread_time()
        found = step()
        self.busy_s += time.thread_time() - began_s
        await asyncio.sleep(0)
        return found
