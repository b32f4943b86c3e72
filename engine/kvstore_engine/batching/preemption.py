"""Takes a running sequence's blocks away, in the way that costs least to undo.

Owns the choice between swapping (copy out now, copy in later) and recomputing (drop, then share, restore or compute
again), by the cost models. It never chooses the victim. No token is lost either way: what is known of a sequence is its
tokens, and they stay.
"""

from collections.abc import Callable
from typing import Literal

from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.blocks import BlockSpace, Holding, HostPool, TransferCosts, count_runs, swap_in, swap_out
from kvstore_engine.restore.costs import CostModel

_MEMORY = 0.05


class Preemption:
    """Preempts sequences of one space, and resumes swapped ones."""

    def __init__(
        self,
        space: BlockSpace,
        host: HostPool,
        *,
        costs: CostModel,
        transfers: TransferCosts,
        step_tokens: int,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._space = space
        self._host = host
        self._costs = costs
        self._transfers = transfers
        self._step_tokens = step_tokens
        self._observer = observer
        self._clock = clock
        self._swaps_a_sequence = 0.0

    @property
    def expected_transfers(self) -> float:
        """How often the blocks of a sequence will still be copied, out and in, going by those that have ended."""
        return 2 * self._swaps_a_sequence

    def ended(self, sequence: Sequence) -> None:
        """A sequence has ended: that is how often it was swapped."""
        self._swaps_a_sequence += _MEMORY * (sequence.accounts.swaps - self._swaps_a_sequence)

    def preempt(self, sequence: Sequence) -> Literal["swap", "recompute"]:
        """`sequence` holds no blocks afterwards."""
        holding = sequence.held
        sequence.accounts.preemptions += 1
        how: Literal["swap", "recompute"] = "recompute"
        if self._swap_pays(sequence, holding):
            how = "swap"
            self._swap_out(sequence, holding)
        else:
            self._space.release(holding)
            sequence.computed = 0
        sequence.holding = None
        sequence.asked_daemon = False
        self._observer.preempted(sequence.request.id, sequence.index, how, self._clock())
        return how

    def resume(self, sequence: Sequence) -> None:
        """Bring a swapped sequence's blocks back. PoolExhausted: nothing has changed."""
        swapped = sequence.swapped
        assert swapped is not None
        begin = self._clock()
        holding, copied = swap_in(self._space, self._host, swapped, sequence.tokens[: sequence.length])
        end = self._clock()
        sequence.holding, sequence.swapped, sequence.computed = holding, None, swapped.computed
        sequence.accounts.swaps += 1
        runs = count_runs(holding.table[len(swapped.places) - copied : len(swapped.places)])
        nbytes = copied * self._host.block_bytes
        self._transfers.observe(nbytes, runs, end - begin)
        self._observer.swapped_in(sequence.request.id, sequence.index, nbytes, runs, begin, end)

    def forget(self, sequence: Sequence) -> None:
        """A swapped sequence has ended."""
        if sequence.swapped is not None:
            self._host.free(sequence.swapped.places)
            sequence.swapped = None

    def _swap_out(self, sequence: Sequence, holding: Holding) -> None:
        begin = self._clock()
        swapped = sequence.swapped = swap_out(self._space, self._host, holding, sequence.computed)
        end = self._clock()
        self._transfers.observe(swapped.nbytes, swapped.runs, end - begin)
        self._observer.swapped_out(sequence.request.id, sequence.index, swapped.nbytes, swapped.runs, begin, end)

    def _swap_pays(self, sequence: Sequence, holding: Holding) -> bool:
        """Whether copying out and in is expected to be quicker than getting the K/V back in any other way."""
        blocks = self._space.blocks_for(sequence.computed)
        if not blocks or blocks > self._host.free_blocks:
            return False
        runs = count_runs(holding.table[:blocks])
        return 2 * self._transfers.copy_s(blocks * self._host.block_bytes, runs) < self._again_s(sequence, holding)

    def _again_s(self, sequence: Sequence, holding: Holding) -> float:
        """Seconds to have [0, computed) again: shared as far as others keep it, loaded as far as stored, computed."""
        kept = next((index for index, node in enumerate(holding.nodes) if node.users < 2), len(holding.nodes))
        start = min(kept * self._space.block_tokens, sequence.computed)
        again_s = self._costs.prefill_s(start, sequence.computed, self._step_tokens)
        session = sequence.session
        if session is not None and session.state == "connected" and sequence.offered_blocks > 0:
            stored = min(sequence.offered_blocks * session.block_tokens, sequence.computed)
            if stored > start:
                engine_blocks = self._space.blocks_for(stored - start)
                load_s = self._costs.load_s(engine_blocks * self._host.block_bytes, 0.0)
                rest_s = self._costs.prefill_s(stored, sequence.computed, self._step_tokens)
                again_s = min(again_s, load_s + rest_s)
        return again_s
