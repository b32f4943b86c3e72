"""One sequence's restoration under way: what was found, what is planned, which blocks are copied, and its record.

Owns the state that the restorer works on, and the expectations on which it decides. It never copies or waits. A chunk
is a storage block. Blocks that are mapped are copied first; `plan`, `prefix` and `pointers` are about the others, of
which chunk 0 is storage block `first`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.settings import Restoring
from kvstore_engine.blocks import TrieNode
from kvstore_engine.restore.copies import BlockLoad
from kvstore_engine.restore.fetcher import Arrival, Fetch, Stream
from kvstore_engine.restore.link import Link, left_s
from kvstore_engine.restore.record import PLAN_REASONS, WORK_ITEMS, RestorationRecord, Work
from kvstore_engine.restore.report import RestoreReport
from kvstore_engine.restore.session import KvSession, Tokens
from kvstore_restore.costs import ComputeCost, RestoreCosts
from kvstore_restore.plan import Plan, Prefix, plan, plans_by_axis
from kvstore_restore.pointers import Pointers, State

MAPPED = "host"  # the tier that is read in place
_CAUTION = 1.2  # a step that was begun in error cannot be ended
_SLOW = 2  # a load takes so many times what was planned: computing is thought of again


@dataclass(frozen=True, slots=True)
class Arriving:
    """The blocks `portion`, which come beside a step. Before, the sequence was computed up to `computed`, and at one
    time up to `furthest`; `new` prompt tokens were counted as restored since."""

    load: BlockLoad
    portion: range
    computed: int
    furthest: int
    new: int


@dataclass(slots=True, eq=False)
class Restoration:
    """`number` orders arrivals. `tokens`: the blocks that a restoration can be of use for."""

    sequence: Sequence
    session: KvSession
    tokens: Tokens
    chunk_bytes: int
    lookup: Fetch
    nodes: list[TrieNode]
    number: int
    begun_s: float
    is_answered: bool = False
    resident: int = 0  # blocks
    begin: int = 0  # the first block that is wanted
    next_mapped: int = 0  # the next block to copy of those that are mapped
    mapped_end: int = 0
    arriving: Arriving | None = None
    first: int = 0
    prefix: Prefix | None = None
    plan: Plan | None = None
    pointers: Pointers | None = None
    alone: tuple[float, float] = (0.0, 0.0)  # predicted seconds of loading alone, of computing alone
    costs: RestoreCosts | None = None
    step_chunks: int = 1  # more are not computed in one step
    stream: Stream | None = None
    link: Link | None = None
    copied: set[int] = field(default_factory=set)  # blocks whose K/V are in place
    taken: list[Arrival] = field(default_factory=list)  # arrived, and not copied yet
    lost: int = 0
    failure: str = ""
    lookup_reason: str = ""
    now_s: float = 0.0
    pace: float = 1.0  # how many times as long as alone computing takes, beside decodes
    ahead_s: float = 0.0  # until the links work for this request
    planned_s: float = 0.0
    compute_s: float = 0.0
    load_busy_s: float = 0.0
    work: list[Work] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return self.session.block_tokens

    @property
    def is_all_mapped(self) -> bool:
        """Once answered: some blocks are to be copied, and no others to be planned for."""
        return self.next_mapped < self.mapped_end >= min(self.resident, len(self.lookup.tiers))

    def make_plan(self, tiers: list[str], costs: RestoreCosts, restoring: Restoring, step_tokens: int) -> None:
        """Decide on the blocks from `first` on, which are in `tiers`."""
        self.prefix = prefix = Prefix(tiers, self.size, self.chunk_bytes, first=self.first * self.size)
        # A step of several chunks pays its fixed cost once.
        shared = self.size / max(self.size, step_tokens)
        known, pace = costs.compute, self.pace
        compute = ComputeCost(known.fixed_s * shared * pace, known.token_s * pace, known.attended_s * pace)
        self.step_chunks = -(-step_tokens // self.size) + 1
        self.costs = costs = RestoreCosts(compute, costs.links, costs.contention)
        plans = plans_by_axis(prefix, costs, layerwise=False)
        self.alone = plans["load"].finish_s, plans["compute"].finish_s
        self.plan = plans["load"] if restoring == "load" else plan(prefix, costs, layerwise=False)
        self.planned_s = self.now_s
        if self.plan.axis != "compute":
            self.pointers = Pointers(tiers, overtakes=self._overtakes)

    def computable(self) -> int:
        """Up to which position a step may compute now."""
        computed = self.sequence.computed
        if self.arriving is not None:
            return self.sequence.length
        if self.pointers is None:
            return computed
        # The less is left, the shorter the steps: what is begun when the last chunk arrives is in vain.
        most = min(self.pointers.left // 4, self.step_chunks)
        chunks = self.pointers.computable(max(1, most))
        return max(computed, (self.first + chunks.stop) * self.size) if chunks else computed

    def note_computed(self) -> None:
        """Chunks before the sequence's `computed` are present."""
        assert self.pointers is not None
        while not self.pointers.is_done and (self.first + self.pointers.head + 1) * self.size <= self.sequence.computed:
            self.pointers.computed_chunk(self.pointers.head)

    def note_copied(self, blocks: Iterable[int]) -> None:
        """The K/V of `blocks` are in place."""
        for block in blocks:
            if self.pointers is None or self.pointers.loaded_chunk(block - self.first):
                self.copied.add(block)

    def is_wanted(self, block: int) -> bool:
        """A chunk of `block` that has arrived would be of use; counts it as wasted if not."""
        if self.pointers is None or block < self.first:
            return False
        if self.pointers.state(block - self.first) is State.PRESENT:
            self.pointers.loaded_chunk(block - self.first)
            return False
        return True

    def to_load(self) -> list[int]:
        """Chunks that are wanted of the store and have not arrived, first ones first."""
        if self.pointers is None or self.prefix is None or self.pointers.is_done:
            return []
        return sorted(chunk for tier in set(self.prefix.tiers) for chunk in self.pointers.stored(tier))

    def note_arrival(self, arrival: Arrival, tiers: tuple[str, ...]) -> None:
        """A stream brought blocks; what was mapped when it was opened says nothing about its speed."""
        link, blocks = self.link, range(arrival.first, arrival.first + len(arrival.lease))
        assert link is not None
        for block in blocks:
            tier = tiers[block] if block < len(tiers) else MAPPED
            if tier != MAPPED:
                link.note(tier, arrival.at_s, self._load_s(tier))
        self._add(Work("load", arrival.first * self.size, len(blocks) * self.size, link.last_s, arrival.at_s))
        link.last_s = arrival.at_s

    def note_step(self, first: int, tokens: int, begin_s: float, seconds: float) -> None:
        """A step computed `tokens` tokens from `first` on."""
        if self.pointers is not None:
            self.compute_s += seconds
            self._add(Work("compute", first, tokens, begin_s, begin_s + seconds))

    def left_s(self, chunk: int = 0) -> float:
        """In how many seconds the links are expected to be done with `chunk` and all after it, once they work for this
        request; infinity where the stream stalls.
        """
        assert self.pointers is not None and self.prefix is not None
        by_tier = {
            tier: len(stored) for tier in set(self.prefix.tiers) if (stored := self.pointers.stored(tier, chunk))
        }
        return left_s(self.link, by_tier, self._load_s, self.now_s)

    def lose(self) -> None:
        """What has not arrived cannot be loaded."""
        if self.pointers is not None:
            self.lost += len(self.to_load())
            self.pointers.lose_all()

    def report(self, now_s: float) -> RestoreReport:
        copied = len(self.copied)
        load_s, compute_s = self.alone
        return RestoreReport(
            tokens=copied * self.size,
            bytes=copied * self.chunk_bytes,
            resident_blocks=self.resident,
            lookup_s=self.lookup.seconds,
            restore_s=max(0.0, now_s - self.begun_s - self.lookup.seconds - self.compute_s) if copied else 0.0,
            estimated_load_s=load_s,
            estimated_compute_s=compute_s,
            reason=self._reason(),
        )

    def record(self, now_s: float) -> RestorationRecord:
        pointers = self.pointers
        is_whole = pointers is not None and not pointers.left
        return RestorationRecord(
            request_id=self.sequence.request.id,
            index=self.sequence.index,
            at=time.time(),
            begun_s=self.begun_s,
            planned_s=self.planned_s or now_s,
            ended_s=now_s,
            plan="" if self.plan is None else self.plan.axis,
            reason=self._reason(),
            chunk_tokens=self.size,
            first_token=self.begin * self.size,
            mapped=self.next_mapped - self.begin if self.is_answered else 0,
            chunks=0 if self.prefix is None else len(self.prefix.tiers),
            tiers=dict(Counter(self.prefix.tiers)) if self.prefix is not None else {},
            predicted_s=0.0 if self.plan is None else self.plan.finish_s,
            predicted_load_s=self.alone[0],
            predicted_compute_s=self.alone[1],
            actual_s=now_s - self.planned_s if is_whole else None,
            loaded=0 if pointers is None else pointers.loaded,
            computed=0 if pointers is None else pointers.computed,
            lost=self.lost,
            wasted=0 if pointers is None else pointers.wasted,
            load_busy_s=self.load_busy_s,
            compute_busy_s=self.compute_s,
            work=tuple(self.work),
        )

    def _overtakes(self, chunk: int) -> bool:
        """Computing up to the end of `chunk`, from now on, is expected to be done before the links are."""
        assert self.costs is not None and self.plan is not None
        computed, left_s = self.sequence.computed, self.left_s(chunk)
        if self.stream is None:
            left_s += self.ahead_s
        elif self.plan.axis == "load" and left_s <= _SLOW * self.plan.finish_s:
            return False
        tokens = (self.first + chunk + 1) * self.size - computed
        computing_s = self.costs.compute.chunk_s(computed, tokens) * self.costs.contention.compute
        return computing_s * _CAUTION <= left_s

    def _load_s(self, tier: str) -> float:
        """Seconds in which a link brings a chunk, beside computing."""
        assert self.costs is not None
        return self.costs.links[tier].load_s(self.chunk_bytes) * self.costs.contention.load

    def _add(self, work: Work) -> None:
        if len(self.work) < WORK_ITEMS:
            self.work.append(work)

    def _reason(self) -> str:
        is_cut = self.next_mapped < self.mapped_end
        copied, missing = len(self.copied), self.resident - self.next_mapped if is_cut else self.lost
        if self.failure:
            return self.failure
        if self.session.state != "connected" and not copied:
            return "the store cannot be reached"
        if missing:
            return f"{copied} of {copied + missing} planned blocks could be restored"
        if self.plan is not None:
            return PLAN_REASONS[self.plan.axis]
        return PLAN_REASONS["load"] if copied else self.lookup_reason or "nothing resident"
