"""Residency: which blocks are where. `Residency` is the index, `check` its invariant walker."""

from kvstored.store.blocks.adoption import adopt
from kvstored.store.blocks.check import check
from kvstored.store.blocks.events import PresenceListener, TierListener
from kvstored.store.blocks.ghost import Absence
from kvstored.store.blocks.index import Residency
from kvstored.store.blocks.listing import Page, Selection, column_of, page, pin_counts, rows_of_fingerprint, select_all
from kvstored.store.blocks.removal import TakenCopy
from kvstored.store.blocks.tree import CyclicChainError
from kvstored.store.blocks.view import Kind, ResidencyView, unpack_keys

__all__ = [
    "Absence",
    "CyclicChainError",
    "Kind",
    "Page",
    "PresenceListener",
    "Residency",
    "ResidencyView",
    "Selection",
    "TakenCopy",
    "TierListener",
    "adopt",
    "check",
    "column_of",
    "page",
    "pin_counts",
    "rows_of_fingerprint",
    "select_all",
    "unpack_keys",
]
