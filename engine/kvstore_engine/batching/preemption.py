"""Takes a running sequence's blocks, in the way that costs least to undo, and gives it blocks again.

The module chooses between swapping (copy out now, copy in later) and recomputing (drop, then share, restore or compute
again), by the cost models. It does not choose the victim. No token is lost either way.
"""

from collections.abc import Callable
from typing import Literal

from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.sequence import NO_SELECTION, Sequence
from kvstore_engine.blocks.host_pool import HostPool, SwappedBlocks, swap_in, swap_out
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.blocks.transfers import TransferCosts, count_runs
from kvstore_restore.learned import LearnedCosts

_MEMORY = 0.05


class Preemption:
    """The part of the engine that takes the pool blocks of a running sequence and gives it blocks again later. It
    either swaps them (copies them to the memory `host` and back) or drops them, so that they are computed again,
    whichever is estimated to cost less.
    """

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
        """The average number of swaps (copies of a sequence's blocks to host memory and back) of the sequences that
        have ended, at most 1. It is the estimate for running ones.
        """
        return min(self._swaps_a_sequence, 1.0)

    def ended(self, sequence: Sequence) -> None:
        """Note that `sequence` has ended, so that its number of swaps counts in the average `expected_transfers`."""
        self._swaps_a_sequence += _MEMORY * (sequence.accounts.swaps - self._swaps_a_sequence)

    def preempt(self, sequence: Sequence) -> Literal["swap", "recompute"]:
        """Take the pool blocks of the running `sequence`. Return "swap" if they were copied to host memory, "recompute"
        if they were dropped.
        """
        sequence.accounts.preemptions += 1
        how: Literal["swap", "recompute"] = "recompute"
        if self._swap_pays(sequence):
            how = "swap"
            self._swap_out(sequence)
        else:
            self._space.release(sequence.held)
            sequence.computed, sequence.selected_from = 0, NO_SELECTION
        sequence.block_table = None
        sequence.is_requested = False
        self._observer.preempted(sequence.request.id, sequence.index, how, self._clock())
        return how

    def resume(self, sequence: Sequence) -> None:
        """Give a new or preempted `sequence` the pool blocks that it needs to run. Blocks that were copied to host
        memory are copied back. Raises PoolExhausted, with nothing changed, if the pool has too few blocks.
        """
        if sequence.swapped is not None:
            self._swap_in(sequence, sequence.swapped)
        else:
            sequence.block_table = self._space.claim(sequence.request.tenant, sequence.tokens[: sequence.length])

    def price(self, sequence: Sequence) -> int:
        """Return the number of available pool blocks that `resume(sequence)` would use up."""
        if sequence.swapped is not None:
            return self._space.price_again(sequence.length, sequence.swapped.path)
        return self._space.price(sequence.request.tenant, sequence.tokens[: sequence.length])

    def forget(self, sequence: Sequence) -> None:
        """Free the host memory to which the blocks of `sequence` were copied; the sequence has ended."""
        if sequence.swapped is not None:
            self._host.free(sequence.swapped.places)
            sequence.swapped = None

    def _swap_out(self, sequence: Sequence) -> None:
        begin = self._clock()
        swapped = sequence.swapped = swap_out(self._space, self._host, sequence.held, sequence.computed, sequence.exact)
        end = self._clock()
        self.transfers.observe(swapped.nbytes, swapped.runs, end - begin)
        self._observer.swapped_out(sequence.request.id, sequence.index, swapped.nbytes, swapped.runs, begin, end)

    def _swap_in(self, sequence: Sequence, swapped: SwappedBlocks) -> None:
        begin = self._clock()
        block_table, copied = swap_in(self._space, self._host, swapped, sequence.tokens[: sequence.length])
        end = self._clock()
        sequence.block_table, sequence.swapped, sequence.computed = block_table, None, swapped.computed
        filled = len(swapped.places)
        runs, nbytes = count_runs(block_table.ids[filled - copied : filled]), copied * self._host.block_bytes
        sequence.accounts.swaps += 1
        self.transfers.observe(nbytes, runs, end - begin)
        self._observer.swapped_in(sequence.request.id, sequence.index, nbytes, runs, begin, end)

    def _swap_pays(self, sequence: Sequence) -> bool:
        """Return whether copying out and in is expected to take less time than any other way to get the K/V back."""
        blocks = sequence.held.blocks[: self._space.blocks_for(sequence.computed)]
        if not blocks or len(blocks) > self._host.free_blocks or self._space.windows is not None:
            return False
        copying_s = self.transfers.copy_s(len(blocks) * self._host.block_bytes, count_runs(blocks))
        return 2 * copying_s < self._again_s(sequence)

    def _again_s(self, sequence: Sequence) -> float:
        """Return the estimated seconds to get [0, computed) again. Blocks that other sequences keep are shared, stored
        ones are loaded, the others are computed.
        """
        nodes = sequence.held.nodes
        kept = next((index for index, node in enumerate(nodes) if node.users <= 1), len(nodes))
        start = min(kept * self._space.block_tokens, sequence.computed)
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
