"""Blocks whose write waits for the endurance budget, each in a task of its own.

Owns the writes that wait; the budget decides for how long. Nothing is pinned meanwhile, so the block may be evicted.
Invariant: a block waits once, however many callers ask, and each is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstored.store.endurance import Verdict
from kvstored.store.transfer.gate import WriteGate
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
MAX_THROTTLED = 4096  # puts that wait at once

Write = Callable[[int, list[int], bool], asyncio.Future[bool] | None]


class BudgetWait:
    """`write(token, path, insists)` begins to write a path that was paid for; None when the block has gone."""

    def __init__(self, gate: WriteGate, counters: Counters, write: Write) -> None:
        self._gate = gate
        self._counters = counters
        self._write = write
        self.pending: dict[int, asyncio.Future[bool]] = {}  # by token

    @property
    def has_room(self) -> bool:
        return len(self.pending) < MAX_THROTTLED

    def wait(self, token: int, verdict: Verdict, *, insists: bool) -> asyncio.Future[bool]:
        """Wait for the budget. `insists`: for what it will earn; else for an allotment under way alone."""
        if verdict is not Verdict.SAVING:
            self._counters.add("budget_throttled_blocks")
        task = asyncio.get_running_loop().create_task(self._when_paid(token, insists))
        self.pending[token] = task
        task.add_done_callback(lambda _: self._forget(token, task))
        return task

    async def _when_paid(self, token: int, insists: bool) -> bool:
        try:
            paid = await self._gate.pay_in_time(token, insists=insists)
        except Exception:  # a mistake of ours is no client's
            log.exception("waiting for the endurance budget failed")
            return False
        settled = self._write(token, paid, insists) if paid is not None else None
        self.pending.pop(token, None)
        return await asyncio.shield(settled) if settled is not None else False

    def _forget(self, token: int, task: asyncio.Task[bool]) -> None:
        if self.pending.get(token) is task:
            del self.pending[token]
