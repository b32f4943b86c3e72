"""The running of long work of the control thread in steps, with other tasks between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeVar

Found = TypeVar("Found")


class StepRunner:
    """A runner of long work in steps, with other tasks of the event loop between them. `busy_s` is the processor time
    in seconds that the steps have taken.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0

    async def run_all(self, steps: Generator[None, None, Found]) -> Found:
        """Run the generator `steps` to its end, and return its return value."""
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
        """Run the function `step` as one step, and return its result."""
        began_s = time.thread_time()
        found = step()
        self.busy_s += time.thread_time() - began_s
        await asyncio.sleep(0)
        return found
