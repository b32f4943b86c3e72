"""A priority below all others for blocks that no likely request needs, in sliding-window and recurrent layer groups.

A request is likely to resume at the end of what was stored of a prompt, and at a block that several chains continue:
there another prompt has branched. A sliding window needs the last blocks before that boundary, a recurrent group the
one with the state; where one of them is absent, the others are of no use to it. All other blocks of these groups are
*spent*: they have a priority below all that users can give, leave a full tier first under any policy (`ranked`), and
stay while there is room. A block that a user gave a priority keeps it. Nothing is done for blocks of groups that need
all of a chain.

What is stored behind a gap continues the chain before it, if the put named that. Limit: a restarted daemon does not
know of gaps, and takes what is before one for the end of a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_proto.terms import PRIORITY_MIN
from kvstored.clock import Clock
from kvstored.store.blocks import Residency
from kvstored.store.blocks.rows import as_array
from kvstored.store.policies.ranked import Priorities

SPENT = PRIORITY_MIN - 1
_SLICE_ROWS = 256  # between two pauses


class Boundaries:
    """A component that gives the lowest priority to stored blocks that no likely request needs ("spent" blocks), and
    takes it back when a new branch of a chain needs them. It concerns layer groups with sliding windows and recurrent
    states, where a request needs few blocks."""

    def __init__(self, residency: Residency, priorities: Priorities, clock: Clock) -> None:
        self._residency, self._priorities, self._clock = residency, priorities, clock

    def stored(self, rows: Sequence[int], before: Sequence[bytes] = ()) -> None:
        """Note that the blocks `rows` were stored, and mark or unmark blocks of their chains. `before` has keys of
        blocks before the parent of the first one, in chain order, some of which may be stored. It takes time in
        proportion to `rows` and one window.
        """
        residency = self._residency
        windows, kinds, parents = residency.kind_window, residency.rows.kind, residency.rows.parent
        if not any(windows[kinds[row]] for row in rows):
            return
        self._bridge(parents[rows[0]], before)
        run = 0
        for at, row in enumerate(rows):
            run += 1
            is_last = at + 1 == len(rows) or parents[rows[at + 1]] != row
            if is_last and windows[kinds[row]]:
                self._settle(row, run)
            run = 0 if is_last else run

    def _bridge(self, parent: int, before: Sequence[bytes]) -> None:
        """Join a chain that begins behind a gap to what is stored before the gap: that ends no prompt."""
        residency = self._residency
        if parent < 0 or residency.rows.mask[parent] or residency.rows.parent[parent] >= 0:
            return
        found = (residency.find_any(residency.tenant_of(parent), key) for key in reversed(before))
        above = next((row for row in found if row >= 0), -1)
        if above >= 0:
            residency.continue_after(parent, above)

    def lost(self, above: int, is_end: bool) -> None:
        """Mark what was needed together with a block after row `above` that has left every tier. `is_end`: no row is
        left of it.
        """
        residency, now_ns = self._residency, self._clock.monotonic_ns()
        links, parents, mask = residency.rows.links, residency.rows.parent, residency.rows.mask
        window = residency.kind_window[residency.rows.kind[above]]
        if links[above] != (0 if is_end else 1):  # another chain goes on there
            return
        row, needed = above, window if is_end and self._is_whole(above, window) else 0
        for _ in range(window):
            if links[row] > 1:
                return
            if mask[row] and residency.priority(row) == (SPENT if needed > 0 else 0):
                self._priorities.set(row, 0 if needed > 0 else SPENT, now_ns)
            row = parents[row]
            if row < 0:
                return

    def _is_whole(self, row: int, window: int) -> bool:
        """Return whether all blocks are there with which a request resumes behind `row`."""
        rows = self._residency.rows
        for _ in range(window):
            if not rows.mask[row]:
                return False
            row = rows.parent[row]
            if row < 0:
                break
        return True

    def _settle(self, tip: int, run: int) -> None:
        """Mark what a chain that now ends with `tip`, the last of `run` new blocks, needs of itself."""
        residency, now_ns = self._residency, self._clock.monotonic_ns()
        links, parents, mask = residency.rows.links, residency.rows.parent, residency.rows.mask
        filling, window = residency.rows.filling, residency.kind_window[residency.rows.kind[tip]]
        row, needed = tip, window
        for _ in range(run + window + 1):  # above them, and a gap, nothing has changed
            if not mask[row] and not filling[row]:
                needed = 0
            elif links[row] > 1:
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
        kinds = as_array(residency.rows.kind)
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
        parent, links = np.frombuffer(columns.parent, np.int32), as_array(columns.links)
        kind, mask = as_array(columns.kind), np.frombuffer(columns.mask, np.uint8)
        windows = np.array(self._residency.kind_window, np.int64)
        is_end = (links != 1) & (mask != 0)
        needed = np.where(np.isin(kind, kinds) & is_end, windows[kind], 0)  # so many blocks, up from the row
        front = np.flatnonzero(needed > 1)
        while len(front):
            front = front[parent[front] >= 0]
            front = front[mask[parent[front]] != 0]
            above, left = parent[front], needed[front] - 1
            more = left > needed[above]
            np.maximum.at(needed, above[more], left[more])
            front = np.unique(above[more & (left > 1)])
        found: npt.NDArray[np.bool_] = needed == 0
        return found
