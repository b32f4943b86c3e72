"""Takes a running unit's blocks, in the way that costs least to undo, and gives it blocks again.

Owns the choice between swapping (copy out now, copy in later) and recomputing (drop, then share, restore or compute
again), by the cost models. It never chooses the victim. No token is lost either way.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Series
from typing import Literal

from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.blocks import (
    BlockSpace,
    HostPool,
    TransferCosts,
    TrieNode,
    count_runs,
    own_parts,
    swap_in,
    swap_out,
)
from kvstore_engine.pool import PoolExhausted
from kvstore_restore.learned import LearnedCosts

_MEMORY = 0.05


class Preemption:
    """Preempts sequences of one space, and resumes swapped ones."""

    def __init__(
        self,
        space: BlockSpace,
        host: HostPool,
        *,
        costs: LearnedCosts,
        step_tokens: int,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._space = space
        self._host = host
        self._costs = costs
        self.transfers = TransferCosts()
        self._step_tokens = step_tokens
        self._observer = observer
        self._clock = clock
        self._swaps_a_sequence = 0.0

    @property
    def expected_transfers(self) -> float:
        """How often a sequence's blocks will be copied from where they are now, judging by ended sequences: at most
        once, when it is swapped. Swapped in, they get new places, together where there is room.
        """
        return min(self._swaps_a_sequence, 1.0)

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended how often one is swapped."""
        self._swaps_a_sequence += _MEMORY * (sequence.accounts.swaps - self._swaps_a_sequence)

    def preempt(self, unit: Series[Sequence]) -> Literal["swap", "recompute"]:
        """The sequences of `unit` hold no blocks afterwards."""
        leader = unit[0]
        leader.accounts.preemptions += 1
        how: Literal["swap", "recompute"] = "recompute"
        if self._swap_pays(unit):
            how = "swap"
            self._swap_out(unit)
        else:
            for sequence in unit:
                self._space.release(sequence.held)
                sequence.computed = 0
        for sequence in unit:
            sequence.block_table = None
            sequence.is_requested = False
        self._observer.preempted(leader.request.id, leader.index, how, self._clock())
        return how

    def resume(self, unit: Series[Sequence]) -> None:
        """Give a new or preempted unit its blocks; a swapped one's are copied back. PoolExhausted: nothing changed."""
        if any(sequence.swapped is not None for sequence in unit):
            self._swap_in(unit)
            return
        claimed = []
        try:
            for sequence in unit:
                tokens = sequence.tokens[: sequence.prefill_end]
                claimed.append(self._space.claim(sequence.request.tenant, tokens))
        except PoolExhausted:
            for block_table in claimed:
                self._space.release(block_table)
            raise
        for sequence, block_table in zip(unit, claimed, strict=True):
            sequence.block_table = block_table

    def price(self, unit: Series[Sequence]) -> int:
        """By how much `resume` would lower the available blocks."""
        swapped = [(sequence.length, sequence.swapped) for sequence in unit if sequence.swapped is not None]
        if swapped:
            return sum(self._space.price_again(length, blocks.path, blocks.shared) for length, blocks in swapped)
        texts = [sequence.tokens[: sequence.prefill_end] for sequence in unit]
        return self._space.price(unit[0].request.tenant, *texts)

    def forget(self, sequence: Sequence) -> None:
        """Free the host memory of a swapped sequence that has ended."""
        if sequence.swapped is not None:
            self._host.free(sequence.swapped.places)
            sequence.swapped = None

    def _swap_out(self, unit: Series[Sequence]) -> None:
        begin, leader = self._clock(), unit[0]
        swapped = swap_out(self._space, self._host, [(sequence.held, sequence.computed) for sequence in unit])
        end = self._clock()
        for sequence, blocks in zip(unit, swapped, strict=True):
            sequence.swapped = blocks
        nbytes, runs = sum(blocks.nbytes for blocks in swapped), sum(blocks.runs for blocks in swapped)
        self.transfers.observe(nbytes, runs, end - begin)
        self._observer.swapped_out(leader.request.id, leader.index, nbytes, runs, begin, end)

    def _swap_in(self, unit: Series[Sequence]) -> None:
        swapped = [sequence.swapped for sequence in unit if sequence.swapped is not None]
        assert len(swapped) == len(unit), "beams are swapped together"
        begin, leader = self._clock(), unit[0]
        back = swap_in(self._space, self._host, swapped, [sequence.tokens[: sequence.length] for sequence in unit])
        end = self._clock()
        nbytes = runs = 0
        for sequence, blocks, (block_table, copied) in zip(unit, swapped, back, strict=True):
            sequence.block_table, sequence.swapped, sequence.computed = block_table, None, blocks.computed
            filled = blocks.shared + len(blocks.places)
            runs += count_runs(block_table.ids[filled - copied : filled])
            nbytes += copied * self._host.block_bytes
        leader.accounts.swaps += 1
        self.transfers.observe(nbytes, runs, end - begin)
        self._observer.swapped_in(leader.request.id, leader.index, nbytes, runs, begin, end)

    def _swap_pays(self, unit: Series[Sequence]) -> bool:
        """Whether copying out and in is estimated to take less time than any other way to get the K/V back."""
        tables = [sequence.held.blocks[: self._space.blocks_for(sequence.computed)] for sequence in unit]
        parts = own_parts(tables)
        own = [table[shared:] for table, (_, shared) in zip(tables, parts, strict=True)]
        blocks, runs = sum(map(len, own)), sum(map(count_runs, own))
        if not blocks or blocks > self._host.free_blocks:
            return False
        users = Counter(node for sequence in unit for node in sequence.held.nodes)
        again_s = sum(
            self._again_s(sequence, shared * self._space.block_tokens, users)
            for sequence, (_, shared) in zip(unit, parts, strict=True)
        )
        return 2 * self.transfers.copy_s(blocks * self._host.block_bytes, runs) < again_s

    def _again_s(self, sequence: Sequence, shared: int, users: Counter[TrieNode]) -> float:
        """Seconds to get [shared, computed) again. What sequences outside its unit keep is shared, what the daemon has
        is loaded, the rest is computed. `users`: how many of the unit use each node.
        """
        nodes = sequence.held.nodes
        kept = next((index for index, node in enumerate(nodes) if node.users <= users[node]), len(nodes))
        start = min(max(kept * self._space.block_tokens, shared), sequence.computed)
        again_s = self._costs.prefill_s(start, sequence.computed, self._step_tokens)
        session = sequence.session
        if session is not None and session.state == "connected" and sequence.offered_blocks > 0:
            stored = min(sequence.offered_blocks * session.block_tokens, sequence.computed)
            if stored > start:
                engine_blocks = self._space.blocks_for(stored - start)
                load_s = self._costs.load_s("host", engine_blocks * self._host.block_bytes)
                rest_s = self._costs.prefill_s(stored, sequence.computed, self._step_tokens)
                again_s = min(again_s, load_s + rest_s)
        return again_s
