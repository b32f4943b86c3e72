"""Frees the chains that no block names, here or in a ghost: mark and sweep, a bounded step at a time.

Marks are set from the rows first, then from the ghosts' shards. In between, a chain's name moves from a row to a ghost
(the block is evicted), where it is found later, or from a ghost to a row (it is stored again), while the ghost keeps
it; what a ghost forgets meanwhile is marked as it goes, and so is every chain that is used, taken or inherited.

Owns the marks and the hand. Never decides what is evicted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvstored.store.policies.chains.ghost import SHARDS, ChainGhost, Chains
from kvstored.store.policies.chains.table import ChainTable

_ROWS, _SLOTS = 1 << 16, 1 << 12  # looked at in a step
_SLACK = 1024  # chains that are not worth a cycle


class Collector:
    """`step` it while `is_due`."""

    def __init__(self, chains: ChainTable, owner: array[int], ghosts: Sequence[ChainGhost]) -> None:
        self._chains = chains
        self._owner = owner
        self._ghosts = ghosts
        self._start_at = _SLACK
        self._row = self._shard = self._slot = 0
        self._is_running = False

    @property
    def is_due(self) -> bool:
        return self._is_running or self._chains.in_use >= self._start_at

    def step(self) -> None:
        chains = self._chains
        if not self._is_running:
            self._is_running = True
            self._row = self._shard = self._slot = 0
            chains.marks[:] = bytes(len(chains.marks))
        elif self._row < len(self._owner):
            owners = np.frombuffer(self._owner, np.int32)[self._row : self._row + _ROWS]
            self._mark(owners[owners >= 0])
            self._row += _ROWS
        elif self._shard < SHARDS * len(self._ghosts):
            tenant, shard = divmod(self._shard, SHARDS)
            self._mark(self._ghosts[tenant].chains(shard))
            self._shard += 1
        elif self._slot < chains.slots:
            chains.free_unmarked(self._slot, self._slot + _SLOTS)
            self._slot += _SLOTS
        else:
            self._is_running = False
            self._start_at = 2 * chains.in_use + _SLACK

    def forgotten(self, chains: Chains) -> None:
        """A ghost forgets keys of these."""
        if self._is_running and len(chains):
            self._mark(chains)

    def _mark(self, chains: Chains | np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        np.frombuffer(self._chains.marks, np.uint8)[chains] = 1
