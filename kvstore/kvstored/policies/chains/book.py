"""Who owns which rows, and what every use of a chain teaches.

A request owns all the rows it used. Where the known prefix of a later request ends at the last block of a chain, or at
the last but one (a last block is often partial), the request continues that chain: an event in the hazard tables.
Where it ends before, or at a block that many different blocks follow (a system prompt), the request is a chain of its
own, and the shared blocks are marked as shared: each such touch adds to what they are worth.

Owns owners, fan-outs, shared touches, the chains and their tables. Never decides what leaves. Invariants: the rows of
the tier that a chain owns lie on one path; `tail` is the deepest of those that may perhaps leave.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstored.policies.base import RequestContext
from kvstored.policies.chains.features import Features, features_of, with_answer
from kvstored.policies.chains.ghost import FAN_MAX, ChainGhost
from kvstored.policies.chains.gittins import bin_of, bins_of
from kvstored.policies.chains.hazards import HazardTables, Ladder
from kvstored.policies.chains.table import ChainTable
from kvstored.residency import ResidencyView

NS = 1e-9
NOBODY, UNKNOWN = -1, -2  # not owned: new; there before the policy was
_SHARED_FAN = 4  # a block that so many different blocks follow belongs to no session
SHARED_TAU_S = 300.0
_DECAY = 0.9995  # of the tables' counts, a request
_RENEW_MIN = 25  # requests
_RENEW_SHARE = 40  # the tables are renewed when a fortieth more requests have been seen
_GHOST_MIN = 4096
_GHOST_RATIO = 10
_SLOTS_SLACK = 1024
_TYPES_MAX = 7
_GAP_MAX = 64
_RUNNING_MAX = 4096
FAR_FROM_END = 4  # so many blocks from the end of its chain and more, blocks are used again alike
_ENDS = (0, 1, 2, FAR_FROM_END)  # distances from the end of a chain that share an estimate: 0, 1, 2 to 3, 4 and more


class ChainBook:
    """See the module."""

    def __init__(self, residency: ResidencyView, ladders: Sequence[Ladder], *, forgets: bool = True) -> None:
        self.residency = residency
        self.chains = ChainTable()
        self.tables = HazardTables(ladders)
        self._decay = _DECAY if forgets else 1.0
        self.owner = array("i")
        self.fan = bytearray()
        self.shared = array("d")  # touches by other chains, decayed
        self.shared_s = array("d")
        self.requests = 0
        self.returns = 0
        self.features: list[Features] = []  # by slot
        self.end_reuse = [0.05, 0.9, 0.95, 0.97]
        self._end_counts = [[value * 10.0, 10.0] for value in self.end_reuse]
        self._ghosts: list[ChainGhost] = []
        self._last_unused = -1
        self._types: dict[str, int] = {}
        self._running: dict[int, tuple[int, int]] = {}  # requests whose answer is awaited: chain, order
        self._renew_at = _RENEW_MIN
        self._collect_at = _SLOTS_SLACK

    def grow(self, rows: int) -> None:
        more = rows - len(self.owner)
        self.owner.extend([NOBODY] * more)
        self.fan.extend(bytes(more))
        self.shared.frombytes(bytes(8 * more))
        self.shared_s.frombytes(bytes(8 * more))

    def add_tenant(self) -> None:
        self._ghosts.append(ChainGhost(_GHOST_MIN))

    # Rows

    def met(self, rows: Sequence[int], tenant: int) -> None:
        """`rows` are new in the tier; the ghost may know them."""
        keys, owner, fan, recall = self.residency.rows.keys, self.owner, self.fan, self._ghosts[tenant].recall
        for row in rows:
            owner[row], fan[row] = recall(keys[row])  # type: ignore[arg-type]  # a row that has just come has its key

    def left(self, row: int, tenant: int, rows_here: int) -> int:
        """`row` leaves the tier; its chain, or -1."""
        chain = self.owner[row]
        if chain < 0:
            return -1
        self.owner[row] = NOBODY
        self.shared[row] = 0.0
        ghost = self._ghosts[tenant]
        key = self.residency.rows.keys[row]
        if key is not None:
            ghost.remember(key, chain, self.fan[row])
            if ghost.room <= 0:
                ghost.turn_over(max(_GHOST_MIN, _GHOST_RATIO * rows_here))
        tails = self.chains.tail
        if tails[chain] == row:
            tails[chain] = self._next_above(row, chain)
        return chain

    def _next_above(self, row: int, chain: int) -> int:
        """The chain's next row towards the head, across rows that are not in the tier; or -1."""
        parents, owner = self.residency.rows.parent, self.owner
        known = len(owner)
        row = parents[row]
        for _ in range(_GAP_MAX):
            if row < 0 or row >= known:
                return -1
            if owner[row] != NOBODY:
                return row if owner[row] == chain else -1
            row = parents[row]
        return -1

    def shared_rate(self, row: int, now_s: float) -> float:
        """Touches a second by others than the chain's own requests."""
        touches = self.shared[row]
        if not touches:
            return 0.0
        return touches * math.exp((self.shared_s[row] - now_s) / SHARED_TAU_S) / SHARED_TAU_S

    # Requests

    def used(
        self, rows: Sequence[int], tenant: int, order: int, now_s: float, context: RequestContext | None = None
    ) -> int:
        """One request used `rows` (head first); the chain that owns them now."""
        residency, chains = self.residency, self.chains
        at = np.array(rows, dtype=np.int64)
        owners = np.frombuffer(self.owner, np.int32)
        before = owners[at]
        count = len(rows)
        fresh = before < 0
        known = int(fresh.argmax())
        if known == 0 and not fresh[0]:
            known = count
        first = residency.rows.depth[rows[0]]
        pivot = rows[known - 1] if known else -1
        if pivot < 0 and first:
            pivot = residency.rows.parent[rows[0]]
            if pivot >= len(self.owner) or (pivot >= 0 and self.owner[pivot] < 0):
                pivot = -1
        chain = self.owner[pivot] if pivot >= 0 else -1
        reach = first + known  # how many blocks of the request's path are known
        length = first + count
        if chain >= 0 and not known and reach >= chains.length[chain]:
            return self._extend(chain, at, length, order, now_s)
        prev = -1
        if pivot >= 0:
            if (reach >= 2 or known == count) and self.fan[pivot] < _SHARED_FAN:
                prev = chain
            if known < count and self.fan[pivot] < FAN_MAX:
                self.fan[pivot] += 1
        if prev >= 0 and not (chains.live[prev] and reach >= chains.length[prev] - 1):
            prev = -1
        turn, gap_s, text = 1, 0.0, None
        if prev >= 0:
            turn, gap_s = chains.turn[prev] + 1, now_s - chains.used_s[prev]
            self._returned(prev, chains.length[prev] - reach, gap_s)
            if context is not None and chains.tokens[prev] >= 0:
                text = max(0, context.input_tokens - chains.tokens[prev])
        elif known:
            self._mark_shared(at[:known], now_s)
        if context is not None and prev < 0:
            text = context.input_tokens
        # Chains all of whose rows are taken over have none any more.
        if known:
            whole = before[:known]
            tails = chains.ints(chains.tail)
            ended = whole[tails[whole] == at[:known]]
            tails[ended] = -1
            del tails
        slot = prev if prev >= 0 and chains.tail[prev] < 0 else chains.take()
        owners[at] = slot
        del owners
        features = features_of(
            is_continued=prev >= 0, new_blocks=count - known, length=length, turn=turn, gap_s=gap_s,
            text_tokens=text,
            is_answer_awaited=context is not None and context.is_answered_later,
            type_number=self._types.setdefault(context.kind, min(len(self._types), _TYPES_MAX)) if context else 0,
        )  # fmt: skip
        self._set(slot, features, rows[-1], length, order, now_s)
        chains.turn[slot], chains.tenant[slot], chains.new_blocks[slot] = turn, tenant, count - known
        chains.tokens[slot] = -1 if context is None else context.input_tokens
        if context is not None and context.is_answered_later:
            self._running[context.number] = (slot, order)
            if len(self._running) > _RUNNING_MAX:
                del self._running[next(iter(self._running))]
        self._count_request(now_s)
        return slot

    def answered(self, number: int, output_tokens: int, now_s: float, hint: int = 0) -> int:
        """The request has ended; its chain, or -1 when that is another request's by now."""
        chain, order = self._running.pop(number, (-1, 0))
        chains = self.chains
        if chain < 0 or chains.order[chain] != order or not chains.live[chain]:
            return -1
        chains.tokens[chain] += output_tokens
        now_bin, reached = bin_of(now_s - chains.used_s[chain]), chains.bin[chain]
        if reached < now_bin:
            self.tables.passed(chains.cell[chain], reached, now_bin)
            chains.bin[chain] = now_bin
        self.features[chain] = features = with_answer(self.features[chain], output_tokens, hint)
        chains.cell[chain] = self.tables.cell(features)  # its rank follows with the next look at all
        return chain

    def _extend(self, chain: int, at: npt.NDArray[np.int64], length: int, order: int, now_s: float) -> int:
        """The same request goes on: what it missed, or its answer, has been stored."""
        chains = self.chains
        np.frombuffer(self.owner, np.int32)[at] = chain
        chains.new_blocks[chain] += len(at)
        kind, _, _, turn, answer, gap, text, hint, type_number = self.features[chain]
        fresh = features_of(
            is_continued=bool(kind), new_blocks=chains.new_blocks[chain], length=length, turn=1, gap_s=0.0,
            text_tokens=None, type_number=type_number,
        )  # fmt: skip
        features = fresh._replace(turn=turn, answer=answer, gap=gap, text=text, hint=hint)
        self._set(chain, features, int(at[-1]), length, order, now_s)
        return chain

    def _set(self, slot: int, features: Features, tail: int, length: int, order: int, now_s: float) -> None:
        chains = self.chains
        cell = self.tables.cell(features)
        while slot >= len(self.features):
            self.features.append(features)
        self.features[slot] = features
        chains.tail[slot], chains.length[slot], chains.cell[slot], chains.bin[slot] = tail, length, cell, 0
        chains.order[slot], chains.used_s[slot] = order, now_s
        chains.blocked[slot], chains.live[slot], chains.due_s[slot] = 0, 1, 0.0
        chains.base[slot] = self.tables.rank_of_new(cell, features)

    def _mark_shared(self, rows: npt.NDArray[np.int64], now_s: float) -> None:
        shared, since = np.frombuffer(self.shared, np.float64), np.frombuffer(self.shared_s, np.float64)
        shared[rows] = shared[rows] * np.exp((since[rows] - now_s) / SHARED_TAU_S) + 1.0
        since[rows] = now_s

    def came_unused(self, row: int, tenant: int, order: int) -> int:
        """`row` has come into the tier without being used (demoted, promoted): its chain, as of its last use."""
        residency, chains = self.residency, self.chains
        parent, depth = residency.rows.parent[row], residency.rows.depth[row]
        used_s = residency.rows.last_access_ns[row] * NS
        last, self._last_unused = self._last_unused, row
        if self.owner[row] >= 0:  # the ghost knew it
            chain = self.owner[row]
            if chains.tail[chain] < 0 or depth > residency.rows.depth[chains.tail[chain]]:
                chains.tail[chain] = row
                chains.blocked[chain] = 0
            return chain
        above = self.owner[parent] if 0 <= parent < len(self.owner) else NOBODY
        if above >= 0 and chains.length[above] == depth:
            chains.tail[above], chains.length[above], chains.blocked[above] = row, depth + 1, 0
            self.owner[row] = above
            return above
        if 0 <= last < len(self.owner) and residency.rows.parent[last] == row and self.owner[last] >= 0:
            self.owner[row] = chain = self.owner[last]  # the child came before its parent
            return chain
        slot = chains.take()
        features = features_of(
            is_continued=False, new_blocks=1, length=depth + 1, turn=1, gap_s=0.0, text_tokens=None,
            type_number=0,
        )  # fmt: skip
        self._set(slot, features, row, depth + 1, order, used_s)
        chains.turn[slot], chains.tenant[slot], chains.new_blocks[slot], chains.tokens[slot] = 1, tenant, 1, -1
        self.owner[row] = slot
        return slot

    # Learning

    def _returned(self, chain: int, missing: int, gap_s: float) -> None:
        """`chain` was continued, all but its last `missing` blocks."""
        chains = self.chains
        cell, reached, now_bin = chains.cell[chain], chains.bin[chain], bin_of(gap_s)
        if reached < now_bin:
            self.tables.passed(cell, reached, now_bin)
        self.tables.returned(cell, max(reached, now_bin))
        chains.live[chain] = 0
        self.returns += 1
        for number, counts in enumerate(self._end_counts):
            counts[1] += 1.0
            if _ENDS[number] >= missing:
                counts[0] += 1.0
            self.end_reuse[number] = counts[0] / counts[1]

    def _count_request(self, now_s: float) -> None:
        self.requests += 1
        if self.requests < self._renew_at:
            return
        step = max(_RENEW_MIN, self.requests // _RENEW_SHARE)
        self._renew_at = self.requests + step
        self._age(now_s)
        self.tables.renew(self._decay**step)
        if self.chains.in_use >= self._collect_at:
            self._collect()
            self._collect_at = 2 * self.chains.in_use + _SLOTS_SLACK

    def _age(self, now_s: float) -> None:
        """Count the age bins that live chains have passed since the last time."""
        chains = self.chains
        live = np.flatnonzero(chains.flags(chains.live))
        reached, cells = chains.ints(chains.bin), chains.ints(chains.cell)
        now_bins = bins_of(now_s - chains.floats(chains.used_s)[live])
        while True:
            behind = reached[live] < now_bins
            live, now_bins = live[behind], now_bins[behind]
            if not len(live):
                return
            self.tables.exposed(cells[live].astype(np.int64), reached[live].astype(np.int64))
            reached[live] += 1

    def _collect(self) -> None:
        """Free the chains that no block names, here or in a ghost."""
        named = np.zeros(self.chains.slots, dtype=bool)
        owners = np.frombuffer(self.owner, np.int32)
        named[owners[owners >= 0]] = True
        for ghost in self._ghosts:
            named[ghost.chains()] = True
        self.chains.keep_only(named)
