"""A policy is made anew in steps, beside the one that decides: after a start, once it is known when blocks were used.

A renewal has four stages: it copies the columns that give the order, a thread sorts them, the new policy adopts the
blocks a few at a time, and then adopts what came or was used meanwhile. The module owns which blocks the new policy
knows. Invariant: the new policy is notified of an event only for blocks that it knows. It never asks for a victim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstored.state.step_runner import StepRunner
from kvstored.store.blocks import Residency
from kvstored.store.blocks.rows import as_array
from kvstored.store.policies import EvictionPolicy, eviction_order
from kvstored.store.policies.base import Rows
from kvstored.tier_set import holding

_COLUMN_ROWS = 1 << 15  # copied in a step: 0.1 ms
_FIRST_ROWS, _LEAST_ROWS, _MOST_ROWS = 64, 16, 1 << 14  # adopted in a step
_STEP_S = 0.0004
_LAST_ROWS = 64  # adopted in the step in which the policy takes over
_PENDING, _KNOWN, _LATE = range(3)


class Renewal:
    """The making of a new policy for a tier, in steps, while the old one works: `policy`, which knows no block, takes
    over the blocks of its tier. Blocks that are stored or used meanwhile are given to it at the end."""

    def __init__(self, residency: Residency, policy: EvictionPolicy) -> None:
        self._residency, self._policy = residency, policy
        self._state = bytearray(residency.rows.capacity)
        self._late: set[int] = set()
        self._step_rows = _FIRST_ROWS

    async def run(self, steps: StepRunner) -> None:
        """Give the policy all blocks of its tier, one step at a time by `steps`. When this returns, the policy knows
        all blocks; the caller must at once let it listen to the tier's events, or drop it."""
        residency, policy = self._residency, self._policy
        residency.listen_beside(policy.tier, self)
        try:
            await self._adopt(await self._sorted(steps), _PENDING, steps)
            while len(self._late) > _LAST_ROWS:
                await self._adopt(self._take_late(), _LATE, steps)
            self._adopt_some(self._take_late(), _LATE)
        finally:
            residency.listen_beside(policy.tier, None)

    def _take_late(self) -> Rows:
        late = np.array(sorted(self._late), np.int64)
        self._late.clear()
        return late[eviction_order(*self._order_columns(late))]

    async def _sorted(self, steps: StepRunner) -> Rows:
        """Return the rows of the tier, the next victim first."""
        parts = []
        for first in range(0, max(1, self._residency.rows.capacity), _COLUMN_ROWS):
            here = self._rows_from(first)
            parts.append((here, *self._order_columns(here)))
            await steps.run_one(lambda: None)
        return await asyncio.to_thread(_sorted, parts)  # where numpy's long calls release the GIL

    def _rows_from(self, first: int) -> Rows:
        mask = np.frombuffer(self._residency.rows.mask, np.uint8)[first : first + _COLUMN_ROWS]
        return first + np.flatnonzero(holding(mask, self._policy.tier))

    def _order_columns(self, rows: Rows) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        columns = self._residency.rows
        return (
            np.frombuffer(columns.last_access_ns, np.uint64)[rows],
            as_array(columns.depth)[rows],
        )

    async def _adopt(self, order: Rows, state: int, steps: StepRunner) -> None:
        """Adopt the rows of `order` that are in `state`, as many in a step as take `_STEP_S`."""
        first = 0
        while first < len(order):
            part, before_s = order[first : first + self._step_rows], steps.busy_s
            first += len(part)
            await steps.run_one(partial(self._adopt_some, part, state))
            wanted = self._step_rows * _STEP_S / max(steps.busy_s - before_s, 1e-6)
            self._step_rows = int(min(max(wanted, self._step_rows / 4, _LEAST_ROWS), self._step_rows * 2, _MOST_ROWS))

    def _adopt_some(self, rows: Rows, state: int) -> None:
        states = np.frombuffer(self._state, np.uint8)
        mask = np.frombuffer(self._residency.rows.mask, np.uint8)
        rows = rows[(states[rows] == state) & holding(mask[rows], self._policy.tier)]
        if len(rows):
            states[rows] = _KNOWN
            self._policy.adopt(rows)

    # Events of the tier

    def inserted(self, rows: Sequence[int], now_ns: int) -> None:
        """Note that the blocks `rows` have come to the tier. The new policy adopts them at the end, after
        older ones.
        """
        last = max(rows)
        if last >= len(self._state):
            self._state.extend(bytes(max(last + 1, self._residency.rows.capacity) - len(self._state)))
        self._defer(rows)

    def accessed(self, rows: Sequence[int], now_ns: int) -> None:
        """Note that the blocks `rows` were used. The new policy adopts them at the end, since they were used last."""
        self._forget(rows[::-1])
        self._defer(rows)

    def removed(self, rows: Sequence[int]) -> None:
        self._forget(rows)

    def released(self, row: int) -> None:
        if self._state[row] == _KNOWN:
            self._policy.released(row)

    def _forget(self, rows: Sequence[int]) -> None:
        """Let the policy forget the ones among `rows` that it knows. The end of a chain is first in `rows`."""
        for row in rows:
            if self._state[row] == _KNOWN:
                self._policy.removed((row,))
            self._state[row] = _PENDING

    def _defer(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._state[row] = _LATE
        self._late.update(rows)


def _sorted(parts: list[tuple[Rows, npt.NDArray[np.uint64], npt.NDArray[np.uint32]]]) -> Rows:
    """Return the rows in `parts`, each with their last use and depth, the next victim first."""
    rows, last_access_ns, depth = (np.concatenate(column) for column in zip(*parts, strict=True))
    parts.clear()
    found: Rows = rows[eviction_order(last_access_ns, depth)]
    return found
