"""A priority below all others for blocks that no likely request needs, in sliding-window and recurrent layer groups.

A request is likely to resume at the end of what was stored of a prompt, and at a block that several chains continue:
there another prompt has branched. A sliding window needs the last blocks before that boundary, a recurrent group the
one with the state. All other blocks of these groups are *spent*: they have a priority below all that users can give,
leave a full tier first under any policy (`ranked`), and stay while there is room. A block that a user gave a priority
keeps it. Nothing is done for blocks of groups that need all of a chain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_proto.terms import PRIORITY_MIN
from kvstored.clock import Clock
from kvstored.store.blocks import Residency
from kvstored.store.policies.ranked import Priorities

SPENT = PRIORITY_MIN - 1
_SLICE_ROWS = 256  # between two pauses


class Boundaries:
    """A component that gives the lowest priority to stored blocks that no likely request needs ("spent" blocks), and
    takes it back when a new branch of a chain needs them. It concerns layer groups with sliding windows and recurrent
    states, where a request needs few blocks."""

    def __init__(self, residency: Residency, priorities: Priorities, clock: Clock) -> None:
        self._residency, self._priorities, self._clock = residency, priorities, clock

    def stored(self, rows: Sequence[int]) -> None:
        """Note that the blocks `rows` were stored. It gives blocks of their chains the lowest priority or takes it
        back, in time proportional to `rows` and one window."""
        residency = self._residency
        windows, kinds, parents = residency.kind_window, residency.rows.kind, residency.rows.parent
        if not any(windows[kinds[row]] for row in rows):
            return
        run = 0
        for at, row in enumerate(rows):
            run += 1
            is_last = at + 1 == len(rows) or parents[rows[at + 1]] != row
            if is_last and windows[kinds[row]]:
                self._settle(row, run)
            run = 0 if is_last else run

    def _settle(self, tip: int, run: int) -> None:
        """Mark what a chain that now ends with `tip`, the last of `run` new blocks, needs of itself."""
        residency, now_ns = self._residency, self._clock.monotonic_ns()
        links, parents, mask = residency.rows.links, residency.rows.parent, residency.rows.mask
        window = residency.kind_window[residency.rows.kind[tip]]
        row, needed = tip, window
        for _ in range(run + window):  # above them nothing has changed
            if links[row] > 1:
                needed = window
            priority = residency.priority(row)
            if mask[row] and priority == (SPENT if needed > 0 else 0):
                self._priorities.set(row, 0 if needed > 0 else SPENT, now_ns)
            needed -= 1
            row = parents[row]
            if row < 0:
                return

    def learn_soon(self) -> None:
        """Start `learn` for fingerprints that were not known before. Its steps run in later turns of the running event
        loop.
        """
        self._go_on(self.learn())

    def _go_on(self, steps: Iterator[None]) -> None:
        if next(steps, steps) is None:
            asyncio.get_running_loop().call_soon(self._go_on, steps)

    def learn(self) -> Iterator[None]:
        """Read the window sizes of fingerprints that were not known before, and give the lowest priority to stored
        blocks of them that no likely request needs. The generator pauses between steps so that other tasks can run."""
        residency, now_ns = self._residency, self._clock.monotonic_ns()
        known = [residency.window_of(kind.fingerprint_id, kind.group) for kind in residency.kinds]
        new = [number for number, window in enumerate(known) if window != residency.kind_window[number]]
        if not new:
            return
        residency.kind_window[:] = known
        kinds = np.frombuffer(residency.rows.kind, np.uint32)
        here = np.flatnonzero(np.isin(kinds, new) & (np.frombuffer(residency.rows.mask, np.uint8) != 0))
        spent = self._spent(new)
        del kinds  # no view of a column is kept over a pause
        generations = np.frombuffer(residency.rows.generation, np.uint32)[here]
        are_spent = spent[here]
        yield
        for first in range(0, len(here), _SLICE_ROWS):
            part = slice(first, first + _SLICE_ROWS)
            current = np.frombuffer(residency.rows.generation, np.uint32)[here[part]] == generations[part]
            for row, is_current, is_spent in zip(here[part].tolist(), current, are_spent[part], strict=True):
                if not is_current or not residency.rows.mask[row]:
                    continue
                if is_spent and not residency.priority(row):
                    self._priorities.set(row, SPENT, now_ns)
                else:
                    residency.release(row)
            yield

    def _spent(self, kinds: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return by row whether no boundary of a chain of these kinds needs it."""
        columns = self._residency.rows
        parent, links = np.frombuffer(columns.parent, np.int32), np.frombuffer(columns.links, np.uint32)
        kind, mask = np.frombuffer(columns.kind, np.uint32), np.frombuffer(columns.mask, np.uint8)
        windows = np.array(self._residency.kind_window, np.int64)
        is_end = ((links == 0) & (mask != 0)) | (links > 1)
        needed = np.where(np.isin(kind, kinds) & is_end, windows[kind], 0)  # so many blocks, up from the row
        front = np.flatnonzero(needed > 1)
        while len(front):
            front = front[parent[front] >= 0]
            above, left = parent[front], needed[front] - 1
            more = left > needed[above]
            np.maximum.at(needed, above[more], left[more])
            front = np.unique(above[more & (left > 1)])
        found: npt.NDArray[np.bool_] = needed == 0
        return found
