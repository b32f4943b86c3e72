"""One sequence's restoration under way: the found blocks, the copied ones, and how far its sequence is computed.

The module owns the state that the restorer works on, and the effect of a load on its sequence; `restore.progress` has
the expectations on which it decides. It does not decide what to load. Blocks that are mapped are copied first; the plan
is about the others, whose chunk 0 is storage block `first`. Invariants: no byte is read outside a lease; a block that
is ready is never written, and becomes ready only once its lease was valid after the copy; if a load beside a step turns
out to be lost, the sequence is as it was before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.settings import Restoring
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.trie import TrieNode
from kvstore_engine.pool import PoolExhausted
from kvstore_engine.restore.copies import PoolCopies, PoolLoad
from kvstore_engine.restore.fetcher import ArrivedBlocks, Fetch
from kvstore_engine.restore.progress import RestoreProgress
from kvstore_engine.restore.record import PLAN_REASONS, RestorationRecord, RestoreReport
from kvstore_engine.restore.session import KvLease, KvSession, Tokens
from kvstore_restore.costs import ComputeCost, RestoreCosts
from kvstore_restore.plan import StoredPrefix
from kvstore_restore.pointers import ChunkState, Pointers


@dataclass(frozen=True, slots=True)
class Arriving:
    """A copy of the storage blocks with the numbers `portion` into the pool that runs while a step computes.
    `computed`, `furthest` and `new` are what is needed to undo its effects on the sequence: the former values of its
    two positions, and the number of prompt tokens counted as restored.
    """

    load: PoolLoad
    portion: range
    computed: int
    furthest: int
    new: int


@dataclass(slots=True, eq=False, kw_only=True)
class Restoration(RestoreProgress):
    """The state of restoring the stored K/V of one `sequence` from the daemon. `tokens` are the tokens of the storage
    blocks that may be restored. Methods that speak of chunks count the same storage blocks from number `first` on.
    """

    sequence: Sequence
    session: KvSession
    tokens: Tokens
    lookup: Fetch
    nodes: list[TrieNode]
    begin: int  # the first block that is wanted
    is_answered: bool = False
    is_meeting: bool = False  # it has a plan by which blocks are loaded
    resident: int = 0  # blocks
    next_mapped: int = 0  # the next block to copy of those that are mapped
    mapped_end: int = 0
    arriving: Arriving | None = None
    step_chunks: int = 1  # more are not computed in one step
    copied: set[int] = field(default_factory=set)  # blocks whose K/V are in place
    taken: list[ArrivedBlocks] = field(default_factory=list)  # arrived, and not copied yet
    failure: str = ""
    lookup_reason: str = ""
    resumes_at: int | None = None  # the block at which windowed layers can resume, and before which they cannot
    resumed: bool = False  # they have
    pace: float = 1.0  # how many times as long as alone computing takes, beside decodes

    @property
    def is_all_mapped(self) -> bool:
        """True if all blocks that the daemon has are mapped into this process, so that none must be loaded from a
        slower tier, and some of them are not copied into the pool yet.
        """
        return self.next_mapped < self.mapped_end >= min(self.resident, len(self.lookup.tiers))

    def make_plan(self, tiers: tuple[str, ...], restoring: Restoring, step_tokens: int) -> None:
        """Decide which storage blocks, from number `first` on, are loaded and which are computed. `tiers` has the name
        of each such block's tier. `restoring` "load" forces loading. `step_tokens` is the most prompt tokens in a step.
        """
        self.tiers, size = tiers, self.chunk_tokens
        known = self.learned.costs(*tiers)
        # A step of several chunks pays its fixed cost once.
        shared, pace = self.pace * size / max(size, step_tokens), self.pace
        compute = known.compute
        compute = ComputeCost(compute.fixed_s * shared, compute.token_s * pace, compute.attended_s * pace)
        self.step_chunks = -(-step_tokens // size) + 1
        prefix = StoredPrefix(tiers, size, self.chunk_bytes, first=self.first * size)
        costs = RestoreCosts(compute, known.links, known.contention)
        plan = self.decide(prefix, costs, loads_all=restoring == "load")
        self.planned_s = self.now_s
        if plan.axis != "compute":
            self.pointers, self.is_meeting = Pointers(len(tiers), overtakes=self._overtakes), True

    def computable(self) -> int:
        """Return the token position up to which the next step may compute the sequence. It equals the sequence's
        `computed` position if the step must wait.
        """
        computed = self.sequence.computed
        if self.arriving is not None:
            return self.sequence.length
        # The less is left, the shorter the steps: what is begun when the last chunk arrives is in vain.
        most = min(self.pointers.left // 4, self.step_chunks)
        chunks = self.pointers.computable(max(1, most))
        return max(computed, (self.first + chunks.stop) * self.chunk_tokens) if chunks else computed

    def note_computed(self) -> None:
        """Note that the storage blocks before the sequence's `computed` position have been computed, so that they need
        not be loaded.
        """
        pointers, computed = self.pointers, self.sequence.computed // self.chunk_tokens
        while not pointers.is_done and self.first + pointers.head + 1 <= computed:
            pointers.computed_chunk(pointers.head)

    def note_copied(self, blocks: Iterable[int]) -> None:
        """Note that the K/V of the storage blocks with the numbers `blocks` are in the pool."""
        for block in blocks:
            if not self.is_meeting or self.pointers.loaded_chunk(block - self.first):
                self.copied.add(block)

    def is_wanted(self, block: int) -> bool:
        """Return True if the storage block number `block`, which has arrived from the daemon, is still needed. If it
        was computed meanwhile, return False, and count it as loaded and computed.
        """
        if not self.is_meeting or block < self.first:
            return False
        if self.pointers.state(block - self.first) is ChunkState.PRESENT:
            self.pointers.loaded_chunk(block - self.first)
            return False
        return True

    def lose(self) -> None:
        """Give up the storage blocks that have not arrived from the daemon. They will be computed."""
        self.lost += len(self.pointers.stored())
        self.pointers.lose_all()

    def report(self, now_s: float) -> RestoreReport:
        """Return figures about the blocks that were restored until the time `now_s` (seconds)."""
        copied = len(self.copied) if self.resumes_at is None or self.resumed else 0
        load_s, compute_s = self.alone
        return RestoreReport(
            tokens=copied * self.chunk_tokens,
            bytes=copied * self.chunk_bytes,
            resident_blocks=self.resident,
            lookup_s=self.lookup.seconds,
            restore_s=max(0.0, now_s - self.begun_s - self.lookup.seconds - self.compute_s) if copied else 0.0,
            estimated_load_s=load_s,
            estimated_compute_s=compute_s,
            reason=self._reason(),
        )

    def record(self, now_s: float) -> RestorationRecord:
        """Return the record of the plan and of its result until the time `now_s` (seconds), for observers."""
        is_whole = self.is_meeting and not self.pointers.left
        request_id = self.sequence.request.id
        record = self.recorded(request_id, now_s, now_s - self.planned_s if is_whole else None, self._reason())
        mapped = self.next_mapped - self.begin if self.is_answered else 0
        return replace(record, index=self.sequence.index, first_token=self.begin * self.chunk_tokens, mapped=mapped)

    def _overtakes(self, chunk: int) -> bool:
        """Return whether computing up to the end of `chunk`, from now on, is expected to end before the links have
        loaded it.
        """
        assert self.costs is not None
        computed = self.sequence.computed
        tokens = (self.first + chunk + 1) * self.chunk_tokens - computed
        return self.is_overtaken(chunk, self.costs.compute.chunk_s(computed, tokens))

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


class Filler:
    """A copier of leased storage blocks from the daemon's memory into the pool blocks of sequences, which `space`
    allocates. It uses `copies`, before a step or while a step computes. It is for one thread.
    """

    def __init__(self, space: BlockSpace, copies: PoolCopies) -> None:
        self._space, self._copies = space, copies
        self.steps_wait = copies.waits_by_layer  # for what they read: `begin` may be used

    def fill(self, restoration: Restoration, lease: KvLease, base: int, portion: range) -> bool:
        """Copy the storage blocks with the numbers `portion` of a sequence's prefix into its pool blocks. The first
        block of `lease` has the number `base`. Return False if the lease ended before the copies did; then none of the
        blocks counts as restored.
        """
        if not self._load(restoration, lease, base, portion).finish():
            return False
        self._note(restoration, portion)
        self.pass_copied(restoration)
        return True

    def begin(self, restoration: Restoration, lease: KvLease) -> None:
        """Start to copy all mapped storage blocks of `restoration` into the pool while a step computes. `lease` is the
        lease on them. Their tokens count as restored at once, but `end` must confirm the copies before the step's
        results are used.
        """
        sequence, portion = restoration.sequence, range(restoration.next_mapped, restoration.mapped_end)
        computed, furthest = sequence.computed, sequence.furthest
        load = self._load(restoration, lease, 0, portion)
        new = sequence.advance_to(max(computed, portion.stop * restoration.chunk_tokens), "daemon")
        restoration.next_mapped = portion.stop
        restoration.arriving = Arriving(load, portion, computed, furthest, new)

    def end(self, restoration: Restoration) -> bool:
        """Wait for the copies that `begin` started for `restoration`. Return True if all blocks were copied. Otherwise
        return False; the sequence is then as it was before `begin`.
        """
        arriving, restoration.arriving = restoration.arriving, None
        assert arriving is not None
        sequence = restoration.sequence
        if not arriving.load.finish():
            restoration.next_mapped = arriving.portion.start
            sequence.retreat_to(arriving.computed, arriving.furthest, arriving.new)
            return False
        self._note(restoration, arriving.portion)
        self._space.seal(
            sequence.held, sequence.tokens, arriving.computed, arriving.portion.stop * restoration.chunk_tokens
        )
        return True

    def pass_copied(self, restoration: Restoration) -> None:
        """Count the tokens of copied blocks that directly follow the computed tokens of the sequence of `restoration`
        as computed.
        """
        sequence, size = restoration.sequence, restoration.chunk_tokens
        begin = end = sequence.computed
        while end // size in restoration.copied:
            end = (end // size + 1) * size
        if end == begin:
            return
        if (at := restoration.resumes_at) is not None and (end // size < at or not self._fill_window(restoration, end)):
            return
        sequence.advance_to(end, "daemon")
        self._space.seal(sequence.held, sequence.tokens, begin, end)

    def _fill_window(self, restoration: Restoration, position: int) -> bool:
        """Copy the blocks with which windowed layers go on at `position`. Return whether they are there."""
        windows, lookup, table = self._space.windows, restoration.lookup, restoration.sequence.held
        assert windows is not None
        if lookup.window is None:
            return False
        per_block, pool = restoration.chunk_tokens // self._space.block_tokens, windows.pool
        try:
            new = windows.prepare_restored(table, position)
        except PoolExhausted:
            return False
        is_valid = False
        try:
            for block in sorted({index // per_block for index in new}):
                own = [index for index in new if index // per_block == block]
                payload = np.asarray(lookup.window.payload(block - lookup.window_first))
                pool.scatter_part(payload, own[0] % per_block, [new[index] for index in own])
            is_valid = lookup.window.valid
        finally:
            if not is_valid:
                windows.references.release(new.values())
        if is_valid:
            windows.add_restored(table, position, new)
            restoration.resumed = True
        return is_valid

    def _load(self, restoration: Restoration, lease: KvLease, base: int, portion: range) -> PoolLoad:
        sequence, pool = restoration.sequence, self._space.pool
        blocks, nodes = sequence.held.blocks, sequence.held.nodes
        per_block = restoration.chunk_tokens // self._space.block_tokens
        whole = []
        for index in portion:
            places = slice(index * per_block, (index + 1) * per_block)
            table = blocks[places]
            present = sum(node.ready for node in nodes[places])  # leading ones: others may have filled some meanwhile
            present = max(present, min(per_block, sequence.computed // self._space.block_tokens - index * per_block))
            if present <= 0:
                whole.append((index - base, table))
            elif present < per_block:
                pool.scatter_part(np.asarray(lease.payload(index - base)), present, table[present:])
        return self._copies.load(lease, whole)

    def _note(self, restoration: Restoration, portion: range) -> None:
        """Note that the blocks of `portion` are in place."""
        restoration.note_copied(portion)
        nodes, per_block = restoration.sequence.held.nodes, restoration.chunk_tokens // self._space.block_tokens
        for index in portion:
            last = (index + 1) * per_block - 1
            if last < len(nodes):
                nodes[last].stored = True
