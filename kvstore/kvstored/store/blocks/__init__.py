"""Residency: which blocks are in which tiers. `Residency` is the index, `check` its invariant walker."""

from kvstored.store.blocks.index import Residency
from kvstored.store.blocks.tree import CyclicChainError
from kvstored.store.blocks.view import ResidencyView, RowKind

__all__ = ["CyclicChainError", "RowKind", "Residency", "ResidencyView"]
