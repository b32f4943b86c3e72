"""The module runs long work of the control thread in steps, with other tasks between them, and measures the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeVar

Found = TypeVar("Found")


class StepRunner:
    """Runs long work of the control thread in steps, with other tasks between them. `busy_s`: seconds of the thread's
    processor time that the steps have taken so far.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0

    async def run_all(self, steps: Generator[None, None, Found]) -> Found:
        """Run all steps of the generator `steps`; return its return value."""
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

    async def run_one(self, step: Callable[[], Found]) -> Found:
        """Run the function `step` as one step; return its return value."""
        began_s = time.thread_time()
        found = step()
        self.busy_s += time.thread_time() - began_s
        await asyncio.sleep(0)
        return found
