"""The choice of the next block to prefetch from a predictor's guesses: pure, times and facts are arguments.

The module owns the plan: for each guessed chain, the blocks that are not mapped yet, and which of them were handed
out; and the budget of each link. It never looks at residency, a policy or a clock.

Rules
- A block is handed out once its chain is ripe: when loading it, and everything as urgent on its link, would end just
  before the request may come. Earlier takes room for longer, later is of no use.
- The first of the ripe ones is the one that saves the most waiting for each byte: probability x time saved / bytes.
- A link has at most `ahead_bytes` under way, so that later blocks can still be cancelled by forgetting them, and
  its budget, if it has one, is kept on the average.
- A plan replaces the one before: a block that is not in it any more is given up, even if it waits to be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstored.clock import NS_PER_S
from kvstored.store.transfer.rates import TokenBucket

MARGIN_S = 0.5  # the plan is looked at a few times a second
LEAD = 2.0  # times the time that loading takes by itself: prefetch has only what demand leaves of a link
ROOM_FOR_OTHERS = 2.0  # ... and as much again for what is as urgent
BURST_S = 1.0
HOUR_S = 3600.0


class UnmappedBlock(NamedTuple):
    """A block that is not in the mapped tier and may be prefetched: its `token` names it, and `source` is the tier that
    it is read from; its slot's size in bytes and the seconds that the read takes are known."""

    token: int
    nbytes: int
    source: int
    load_s: float


class PrefetchCandidate(NamedTuple):
    """A chain that will perhaps be requested, between `first_s` and about `due_s`. `key` is its last block; `blocks`
    are its blocks that are not mapped, in the order of use. After a prefetch they are kept for it until `until_s`."""

    tenant: int
    key: bytes
    probability: float
    first_s: float
    due_s: float
    until_s: float
    blocks: Sequence[UnmappedBlock]

    def uses_an_hour(self, now_s: float) -> float:
        """Return the expected uses for each hour that a block of this chain is held, if it is prefetched at `now_s`."""
        held_s = self.probability * (self.due_s - now_s) + (1 - self.probability) * (self.until_s - now_s)
        return self.probability * HOUR_S / max(1.0, held_s)

    @property
    def value(self) -> float:
        """The expected seconds of waiting that are saved for each byte that is prefetched."""
        nbytes = sum(block.nbytes for block in self.blocks)
        return self.probability * sum(block.load_s for block in self.blocks) / nbytes if nbytes else 0.0


@dataclass(slots=True)
class _Source:
    bucket: TokenBucket
    under_way_bytes: int = 0
    planned_s: float = 0.0  # what loading all that is planned from it takes


@dataclass(slots=True)
class _UnderWay:
    block: UnmappedBlock
    chain: tuple[int, bytes]
    is_given_up: bool = False


@dataclass(slots=True)
class _Entry:
    candidate: PrefetchCandidate
    value: float
    left: list[UnmappedBlock]  # the next one last
    load_s: float  # of those


class PrefetchQueue:
    """A plan of blocks to prefetch, which chooses the next one. Each link (way from one tier to another) may move
    `budget_bytes_per_s` (0: no limit), and at most `ahead_bytes` are under way on it."""

    def __init__(self, budget_bytes_per_s: int, ahead_bytes: int) -> None:
        self._budget_bytes_per_s = budget_bytes_per_s
        self._ahead_bytes = ahead_bytes
        self._sources: dict[int, _Source] = {}
        self._plan: list[_Entry] = []  # the most valuable first
        self._under_way: dict[int, _UnderWay] = {}  # by token
        self._by_tenant = Counter[int]()

    def __len__(self) -> int:
        """Return the number of blocks that are planned and not handed out."""
        return sum(len(entry.left) for entry in self._plan)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def under_way_of(self, tenant: int) -> int:
        return self._by_tenant[tenant]

    def plan(self, candidates: Iterable[PrefetchCandidate]) -> list[int]:
        """Replace the planned chains by `candidates`. Return the tokens of blocks under way whose chains are no longer
        wanted, each once; another caller may still wait for these promotions.
        """
        wanted: set[tuple[int, bytes]] = set()
        entries = []
        for source in self._sources.values():
            source.planned_s = 0.0
        for candidate in candidates:
            wanted.add((candidate.tenant, candidate.key))
            left = [block for block in reversed(candidate.blocks) if block.token not in self._under_way]
            if left:
                entries.append(_Entry(candidate, candidate.value, left, sum(block.load_s for block in left)))
                for block in left:
                    self._source(block.source).planned_s += block.load_s
        self._plan = sorted(entries, key=lambda entry: (-entry.value, entry.candidate.due_s))
        given_up = []
        for token, entry in self._under_way.items():
            if entry.chain not in wanted and not entry.is_given_up:
                entry.is_given_up = True
                given_up.append(token)
        return given_up

    def drop(self, tenant: int, key: bytes) -> None:
        """Remove the chain of `tenant` that ends with `key` from the plan."""
        kept = []
        for entry in self._plan:
            if (entry.candidate.tenant, entry.candidate.key) != (tenant, key):
                kept.append(entry)
                continue
            for block in entry.left:
                self._source(block.source).planned_s -= block.load_s
        self._plan = kept

    def next(self, now_s: float) -> tuple[PrefetchCandidate, UnmappedBlock] | None:
        """Return the chain and the block to prefetch now, or None if nothing is to be started. The block stays in the
        plan until `started`, `skip` or `drop`."""
        for entry in self._plan:
            block = entry.left[-1]
            source = self._source(block.source)
            lead_s = MARGIN_S + LEAD * min(ROOM_FOR_OTHERS * entry.load_s, source.planned_s)
            if now_s >= entry.candidate.first_s - lead_s and self._may_start(source, block, now_s):
                return entry.candidate, block
        return None

    def started(self, candidate: PrefetchCandidate, block: UnmappedBlock) -> None:
        """Note that the promotion of `block` for the chain `candidate` has started: it is under way until `ended`."""
        source = self._source(block.source)
        source.bucket.spend(block.nbytes)
        source.under_way_bytes += block.nbytes
        self._under_way[block.token] = _UnderWay(block, (candidate.tenant, candidate.key))
        self._by_tenant[candidate.tenant] += 1
        self.skip(block)

    def skip(self, block: UnmappedBlock) -> None:
        """Remove `block`, which `next` returned, from the plan: it need not be prefetched."""
        for at, entry in enumerate(self._plan):
            if entry.left[-1] is block:
                entry.left.pop()
                entry.load_s -= block.load_s
                self._source(block.source).planned_s -= block.load_s
                if not entry.left:
                    del self._plan[at]
                return

    def ended(self, token: int) -> None:
        entry = self._under_way.pop(token)
        block, (tenant, _) = entry.block, entry.chain
        self._by_tenant[tenant] -= 1
        self._source(block.source).under_way_bytes -= block.nbytes

    def _may_start(self, source: _Source, block: UnmappedBlock, now_s: float) -> bool:
        is_full = source.under_way_bytes and source.under_way_bytes + block.nbytes > self._ahead_bytes
        return not is_full and source.bucket.ready(round(now_s * NS_PER_S))

    def _source(self, position: int) -> _Source:
        source = self._sources.get(position)
        if source is None:
            rate = self._budget_bytes_per_s
            source = self._sources[position] = _Source(TokenBucket(rate or None, round(rate * BURST_S)))
        return source
