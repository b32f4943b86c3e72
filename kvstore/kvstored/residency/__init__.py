"""Residency: which blocks are where. `Residency` is the index, `check` its invariant walker."""

from kvstored.residency.adoption import adopt
from kvstored.residency.check import check
from kvstored.residency.events import PresenceListener, TierListener
from kvstored.residency.ghost import Absence
from kvstored.residency.index import CyclicChainError, Residency
from kvstored.residency.listing import Page, Selection, column_of, page, pin_counts, rows_of_fingerprint, select_all
from kvstored.residency.removal import TakenCopy
from kvstored.residency.view import Kind, ResidencyView, unpack_keys

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
