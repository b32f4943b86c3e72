"""The owner of each row, and the lessons from every use of a chain.

A request owns all the rows it used. If the known prefix of a later request ends near the end of a chain, the request
continues that chain: an event in the hazard tables. Near is within the last two blocks or the last twentieth: a last
block is often partial, and the next question about a document leaves the last one's few blocks out. If it ends before,
or at a block that many different blocks follow (a system prompt), the request is a chain of its own, and the shared
blocks are marked as shared: each such touch adds to their worth.

The module owns owners, fan-outs, shared touches, the chains and their tables. It does not decide what is evicted.
Invariants: the rows of the tier that a chain owns are on one path; `tail` is the deepest of the rows that may be free
to be evicted."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

from kvstore_predictor.ages import Floats, Ints, leaning
from kvstore_predictor.features import Features, begun, continued, grown, with_answer, with_hint
from kvstore_predictor.ladders import Ladder
from kvstored.store.blocks import ResidencyView
from kvstored.store.blocks.runs import fill
from kvstored.store.policies.base import ChainHint, RequestContext
from kvstored.store.policies.chains.ghost import (
    FAN_BITS,
    FAN_MAX,
    GHOST_MIN,
    NOTHING,
    SHARD_MASK,
    ChainGhost,
    Path,
    ghost_limit,
    is_near_end,
    next_above,
    path_of,
)
from kvstored.store.policies.chains.learning import ChainLearner, Collector, Upkeep
from kvstored.store.policies.chains.table import ChainTable, SharedTouches

NS = 1e-9
UNOWNED, UNKNOWN = -1, -2  # not owned: new; there before the policy was
_BRANCH_MIN = 2  # blocks of others
_SHARED_FAN = FAN_MAX  # a block that so many different blocks follow belongs to no session
_TYPES_MAX = 7
_GAP_MIN_S = 0.5
_RUNNING_MAX = 4096


class ChainBook:
    """A record of the chains of one tier for the policy chain-hazard: which chain owns each row, how often blocks are
    shared, and what was learned."""

    def __init__(self, residency: ResidencyView, ladders: Sequence[Ladder], *, forgets: bool = True) -> None:
        self.residency = residency
        self.chains = ChainTable()
        self.learning = ChainLearner(self.chains, ladders, forgets=forgets)
        self.tables = self.learning.tables
        self.end_reuse = self.learning.end_reuse
        self.owner = array("i")
        self.fan = bytearray()
        self.touches = SharedTouches()
        self.shared, self.shared_s = self.touches.count, self.touches.as_of_s
        self.features: list[Features] = []  # by slot
        self.ghosts: list[ChainGhost] = []
        collector = Collector(self.chains, self.owner, self.ghosts)
        self._forgotten = collector.forgotten
        self.upkeep = Upkeep(self.learning, collector)
        self._last_unused = -1
        self._most_rows = 0
        self._types: dict[str, int] = {}
        self._uses_types = self.tables.takes("type")
        self._running: dict[int, tuple[int, int]] = {}  # requests whose answer is awaited: chain, order
        self.left_blocks = 0  # so many have left the tier
        self._promised: dict[int, int] = {}  # chains of which blocks are missing that may be stored next: their order

    def grow(self, rows: int) -> None:
        more = rows - len(self.owner)
        self.owner.frombytes(b"\xff" * (4 * more))  # UNOWNED
        self.fan.extend(bytes(more))
        self.touches.grow(more)

    def numbers(self) -> list[float]:
        """Return the numbers that a restart needs, apart from the chains themselves."""
        return [self.touches.began_s, self.touches.span_s, self._most_rows]

    def restore(self, numbers: Sequence[float], later_s: float, rows_here: int) -> None:
        """Continue from the saved `numbers`, adding `later_s` seconds to saved times; `rows_here` blocks are in the
        tier. Raises ValueError for another count of numbers."""
        began_s, self.touches.span_s, most_rows = numbers
        self.touches.began_s = began_s + later_s
        self._widen(max(int(most_rows), rows_here))

    def _widen(self, rows: int) -> None:
        self._most_rows = rows
        for ghost in self.ghosts:
            ghost.limit = ghost_limit(rows)

    def add_tenant(self) -> None:
        self.ghosts.append(ChainGhost(ghost_limit(self._most_rows), self._forgotten))

    # Rows

    def met(self, rows: Sequence[int], tenant: int) -> None:
        """Note that the blocks `rows` of `tenant` are new in the tier, and give them the owner that is remembered of
        them. What follows a forgotten block counts as forgotten, except in a small ghost, where chance says which is.
        """
        columns, ghost, unknown = self.residency.rows, self.ghosts[tenant], -1
        keys, parents, touched, is_small = columns.keys, columns.parent, ghost.touched, ghost.limit <= 2 * GHOST_MIN
        for row in rows:
            if unknown >= 0 and parents[row] == unknown and not is_small:
                unknown = row
                continue
            packed = NOTHING if (key := keys[row]) is None else ghost.packed(key)
            unknown = row if packed < 0 else -1
            if packed >= 0:
                self.owner[row], self.fan[row] = packed >> FAN_BITS, packed & FAN_MAX
                if touched and key in touched:
                    self.shared[row], self.shared_s[row] = touched.pop(key)

    def left(self, rows: Sequence[int], chain: int, tenant: int, rows_here: int) -> None:
        """Note that the blocks `rows` of `chain`, the deepest first, have left the tier; `rows_here` remain."""
        self.left_blocks += len(rows)
        owner, shared, fan, columns = self.owner, self.shared, self.fan, self.residency.rows
        keys = columns.keys
        ghost = self.ghosts[tenant]
        ghost.remember_run([keys[row] for row in rows], chain, [fan[row] for row in rows])
        for row in rows:
            owner[row] = UNOWNED
            fan[row] = 0
            if shared[row]:
                key = keys[row]
                if key is not None:
                    ghost.remember_touches(key, shared[row], self.shared_s[row])
                shared[row] = 0.0
        if rows_here > self._most_rows:
            self._widen(rows_here)
        tails = self.chains.tail
        if tails[chain] == rows[0]:
            row = rows[-1]
            above = columns.parent[row]
            is_ours = 0 <= above < len(owner) and owner[above] == chain
            tails[chain] = above if is_ours else next_above(row, chain, columns, owner)

    def left_last(self, row: int, chain: int, tenant: int, rows_here: int) -> int:
        """Note that the block at `row`, the last of `chain` and not shared, has left the tier. Return the chain's new
        last row, or -1."""
        if rows_here > self._most_rows:
            self.left((row,), chain, tenant, rows_here)
            return self.chains.tail[chain]
        self.left_blocks += 1
        owner, columns = self.owner, self.residency.rows
        owner[row] = UNOWNED
        key = columns.keys[row]
        if key is not None:
            self.ghosts[tenant].remember(key, chain, self.fan[row])
        self.fan[row] = 0
        above = columns.parent[row]
        if not (0 <= above < len(owner) and owner[above] == chain):
            above = next_above(row, chain, columns, owner)
        self.chains.tail[chain] = above
        return above

    # Requests

    def used(
        self,
        rows: Sequence[int],
        tenant: int,
        order: int,
        now_s: float,
        context: RequestContext | None = None,
        missing: Sequence[bytes] = (),
        parent: int = -1,
    ) -> int:
        """Note that one request used the blocks `rows`, in chain order. Return the number of the chain that owns them
        now. It also owns the blocks `missing` after them, as if they had been stored and evicted. Without `rows`,
        `missing` continue the row `parent`."""
        chains, here = self.chains, len(rows)
        self.touches.widen_span(now_s)
        path = path_of(rows, missing, parent, self.residency.rows, self.owner, self.fan, self.ghosts[tenant])
        known, count = path.known, len(path.before)
        reach, length = path.first + known, path.first + count
        if path.chain >= 0 and not known and reach >= chains.length[path.chain]:
            return self._extend(path.chain, rows, length, order, now_s, missing, tenant)
        prev = self._continued(path)
        turn, gap_s, pace, text = 1, 0.0, 0.0, None if context is None else context.input_tokens
        if prev >= 0:
            turn, gap_s, pace, text = self._return_of(prev, reach, now_s, text)
        elif known:
            self.touches.add(rows[:known], now_s)
        # Chains all of whose rows are taken over have none any more.
        if known:
            whole, tails = rows[:known], chains.tail
            last = whole[-1] if whole else -1
            for chain in set(path.before[: min(known, here)]):
                tail = tails[chain]
                if tail == last or tail in whole:  # as a rule the last, or none
                    tails[chain] = -1
        slot = prev if prev >= 0 and chains.tail[prev] < 0 else chains.take()
        if path.before[:here].count(slot) < here:  # else a chain that is used again, whole
            fill(self.owner, rows, slot)
        if missing:
            self.ghosts[tenant].remember_run(missing, slot, path.fans)
        kind = 0
        if context is not None and self._uses_types:
            kind = self._types.setdefault(context.kind, min(len(self._types), _TYPES_MAX))
        if prev >= 0:
            features = continued(count - known, length, turn, gap_s, math.exp(pace), text, kind)
        else:
            features = begun(count - known, length, text, kind, is_branch=reach >= _BRANCH_MIN)
        self._set(slot, features, rows[-1] if here else -1, length, order, now_s)
        if missing:
            self._promise(slot, order)
        chains.turn[slot], chains.tenant[slot], chains.new_blocks[slot] = turn, tenant, count - known
        chains.pace[slot] = pace
        chains.tokens[slot], chains.answer[slot] = -1 if context is None else context.input_tokens, 0
        if context is not None and context.is_answered_later:
            self._running[context.number] = (slot, order)
            if len(self._running) > _RUNNING_MAX:
                del self._running[next(iter(self._running))]
        self.learning.requests += 1
        return slot

    def _return_of(
        self, prev: int, reach: int, now_s: float, prompt_tokens: int | None
    ) -> tuple[int, float, float, int | None]:
        """Note that a request continues chain `prev`; return its turn, the gap before it, the pace of the session (a
        logarithm), and the tokens that the user added, as far as known."""
        chains = self.chains
        turn, gap_s = chains.turn[prev] + 1, now_s - chains.used_s[prev]
        pace = math.log(max(gap_s, _GAP_MIN_S))
        if turn > 2:  # half of it is the last gap's
            pace = 0.5 * (pace + chains.pace[prev])
        self.learning.continued(prev, chains.length[prev] - reach, gap_s)
        chains.live[prev], chains.due_s[prev] = 0, 0.0  # what is left of it is another chain's, or awaits no request
        if prompt_tokens is None or chains.tokens[prev] < 0:
            return turn, gap_s, pace, None
        return turn, gap_s, pace, max(0, prompt_tokens - chains.tokens[prev])

    def _continued(self, path: Path) -> int:
        """Return the chain that the request continues, or -1; count the requests that follow the last known block."""
        known, count, chain, chains = path.known, len(path.before), path.chain, self.chains
        if chain < 0:
            return -1
        reach = path.first + known
        if known < count and path.fan < FAN_MAX:
            here = count - len(path.fans)
            if known > here:
                path.fans[known - here - 1] = path.fan + 1
            else:
                self.fan[path.pivot] += 1
        is_own = (reach >= 2 or known == count) and path.fan < _SHARED_FAN
        return chain if is_own and chains.live[chain] and is_near_end(reach, chains.length[chain]) else -1

    def answered(self, number: int, output_tokens: int, now_s: float, hint: ChainHint | None = None) -> int:
        """Note that the request `number` has ended. Return its chain, or -1 if another one has used the chain since."""
        chain, order = self._running.pop(number, (-1, 0))
        chains = self.chains
        if chain < 0 or chains.order[chain] != order or not chains.live[chain]:
            return -1
        self.ended(chain, output_tokens, now_s, hint)
        return chain

    def ended(self, chain: int, output_tokens: int, now_s: float, hint: ChainHint | None) -> None:
        """Note that the last request of `chain` ended with `output_tokens` tokens (0: unknown) and the
        engine's `hint`."""
        chains = self.chains
        if output_tokens and chains.tokens[chain] >= 0:
            chains.tokens[chain] += output_tokens - chains.answer[chain]  # a second report is not a second answer
            chains.answer[chain] = output_tokens
        self.learning.grew_older(chain, now_s)
        features = self.features[chain]
        if output_tokens:
            features = with_answer(features, output_tokens)
        if hint is not None:
            features = with_hint(features, hint)
        self.features[chain] = features
        chains.cell[chain] = self.tables.cell(features)  # its rank follows with the next draw,
        if hint is not None and chains.live[chain]:  # but an engine's hint counts at once
            chains.base[chain] = self.standings(np.array([chain]), now_s)[0]

    def ranks(self, chains: Ints, now_s: float) -> Floats:
        """Return the rank (expected uses a second) of each of `chains`; it means nothing if no request is expected."""
        table = self.chains
        return self.tables.ranks(table.ints(table.cell)[chains], now_s - table.floats(table.used_s)[chains])

    def standings(self, chains: Ints, now_s: float) -> Floats:
        """Return the ranks of `chains`, mixed with the order of their last use where the ranks say little."""
        found, lean = self.ranks(chains, now_s), self.tables.lean
        return found * leaning(now_s - self.chains.floats(self.chains.used_s)[chains], lean) if lean else found

    def due(self, chain: int, row: int, due_s: float, now_s: float) -> None:
        """Note that a queued request will use `chain` at `due_s`, down to the block at `row` (-1: to its end). If that
        request shares only the beginning, it does not replace the chain's own due time."""
        chains = self.chains
        depths, tail = self.residency.rows.depth, chains.tail[chain]
        depth = depths[row] if row >= 0 else chains.length[chain] - 1
        is_whole = tail < 0 or depth + 1 >= depths[tail]
        if is_whole or depth >= chains.due_depth[chain] or not chains.due_rank(chain, 0, now_s):
            chains.due_s[chain], chains.due_depth[chain] = due_s, depth

    def is_promised(self, chain: int) -> bool:
        """Return whether missing blocks that the last request of `chain` wanted may still be stored for it."""
        return chain >= 0 and self._promised.get(chain) == self.chains.order[chain]

    def promised_owner(self, key: bytes, tenant: int) -> int:
        """Return the chain of the missing block `key`, if it may still be stored after that chain's last request, or
        -1. It is written for speed, since it is called for each new block in a full tier."""
        shard = self.ghosts[tenant].shards[key[-1] & SHARD_MASK]
        packed = shard.young.get(key)
        if packed is None:
            packed = shard.old.get(key, NOTHING)
        chain = packed >> FAN_BITS
        return chain if chain >= 0 and self._promised.get(chain) == self.chains.order[chain] else -1

    def _promise(self, chain: int, order: int) -> None:
        self._promised.pop(chain, None)
        self._promised[chain] = order
        if len(self._promised) > _RUNNING_MAX:
            del self._promised[next(iter(self._promised))]

    def filled(self, rows: Sequence[int], chain: int) -> int:
        """Return how many leading blocks of `rows`, just stored, the last request of `chain` missed."""
        owner = self.owner
        owners = [owner[row] for row in rows]
        count = len(rows)
        if owners.count(chain) != count:
            count = next(at for at, each in enumerate(owners) if each != chain)
        tails, depth = self.chains.tail, self.residency.rows.depth
        last = rows[count - 1]
        if tails[chain] < 0 or depth[last] > depth[tails[chain]]:
            tails[chain] = last
            self.chains.blocked[chain] = 0
        if depth[last] + 1 >= self.chains.length[chain]:  # what is loaded later is another request's
            self._promised.pop(chain, None)
        return count

    def _extend(
        self, chain: int, rows: Sequence[int], length: int, order: int, now_s: float,
        missing: Sequence[bytes], tenant: int,
    ) -> int:  # fmt: skip
        """Extend the chain of a request that goes on: its missing blocks, or its answer, have been stored, or will
        be."""
        chains = self.chains
        fill(self.owner, rows, chain)
        if missing:
            self.ghosts[tenant].remember_run(missing, chain, bytes(len(missing)))
        chains.new_blocks[chain] += len(rows) + len(missing)
        features = grown(self.features[chain], chains.new_blocks[chain], length)
        self._set(chain, features, rows[-1] if rows else chains.tail[chain], length, order, now_s)
        if missing:
            self._promise(chain, order)
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
        chains.marks[slot] = 1
        chains.base[slot] = self.tables.rank_of_new(cell)

    def came_unused(self, row: int, tenant: int, order: int) -> int:
        """Return the chain of the block at `row`, which came to the tier without a use (demoted or promoted)."""
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
        above = self.owner[parent] if 0 <= parent < len(self.owner) else UNOWNED
        if above >= 0 and chains.length[above] == depth:
            chains.tail[above], chains.length[above], chains.blocked[above] = row, depth + 1, 0
            self.owner[row] = above
            chains.marks[above] = 1
            return above
        if 0 <= last < len(self.owner) and residency.rows.parent[last] == row and self.owner[last] >= 0:
            self.owner[row] = chain = self.owner[last]  # the child came before its parent
            chains.marks[chain] = 1
            return chain
        slot = chains.take()
        self._set(slot, begun(1, depth + 1, None), row, depth + 1, order, used_s)
        chains.turn[slot], chains.tenant[slot], chains.new_blocks[slot], chains.tokens[slot] = 1, tenant, 1, -1
        chains.pace[slot], chains.answer[slot] = 0.0, 0
        self.owner[row] = slot
        return slot
