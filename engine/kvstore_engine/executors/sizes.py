"""The sizes for which an executor and its pool are made: plain values, which also travel to a worker's process."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore_engine.graph.step import StepLimits
from kvstore_engine.page_selection import PageSelection
from kvstore_engine.pool import BlockPool


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """The sizes of a K/V pool: `blocks` blocks of `block_tokens` tokens, the type `kv_dtype` of K and V, and
    `window_blocks` further blocks for layers with a sliding window. `selection`: the pages that new tokens of answers
    read; None: all.
    """

    blocks: int
    block_tokens: int
    kv_dtype: str
    window_blocks: int = 0
    selection: PageSelection | None = None


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The limits of the steps of an executor, and the number of processor threads that compute them."""

    threads: int = 2
    max_tokens_per_step: int = 512
    max_sequences: int = 16
    max_context: int = 8192

    def limits(self, vocabulary: int, pool: BlockPool) -> StepLimits:
        """Return the limits of steps over `pool` for a model with `vocabulary` tokens."""
        most = self.max_tokens_per_step, self.max_sequences, self.max_context
        window_blocks = 0 if pool.window is None else pool.window.blocks
        return StepLimits(vocabulary, pool.blocks, pool.block_tokens, *most, window_blocks, pool.selection)
