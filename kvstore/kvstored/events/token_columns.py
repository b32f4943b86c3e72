"""The token ids of many blocks at once, from the headers of their copies in memory.

Read on the control thread, which gives no slot away meanwhile. Clients may write some of these arenas: a count that
cannot be is none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import MAX_TOKENS, TOKEN_COUNT_OFFSET, TOKENS_OFFSET
from kvstore_tiers.base import Tier
from kvstored.store.blocks import Residency
from kvstored.tier_set import NO_TIERS, TierSet, holding

_COUNT_AT, _IDS_AT = TOKEN_COUNT_OFFSET // 4, TOKENS_OFFSET // 4
Numbers = npt.NDArray[np.integer]


class TokenColumns:
    """`tiers`: by position; those in memory are where token ids are read. None where they are private."""

    def __init__(self, residency: Residency, tiers: Sequence[Tier]) -> None:
        self._residency = residency
        self._tiers = tiers
        self.readable = TierSet.of(*(position for position, tier in enumerate(tiers) if tier.info.is_in_memory))

    def read(self, rows: Numbers, masks: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint16], bytes]:
        """How many each of `rows` has, and all of them, packed in order. None of a block that is not in memory."""
        counts = np.zeros(len(rows), np.uint16)
        left = masks.copy()
        parts: list[tuple[Numbers, Numbers, npt.NDArray[np.int32]]] = []  # which rows, their places, the memory
        for position in self.readable:
            here = np.flatnonzero(holding(left, position))
            if len(here):
                parts.extend(self._places(self._tiers[position], position, rows, here))
                left[here] = NO_TIERS
        for which, places, words in parts:
            found = words[places + _COUNT_AT]
            counts[which] = np.where((found >= 0) & (found <= MAX_TOKENS), found, 0)
        ends = np.cumsum(counts, dtype=np.int64)
        ids = np.empty(int(ends[-1]) if len(ends) else 0, np.int32)
        for which, places, words in parts:
            of_each = counts[which]
            for count in np.unique(of_each).tolist():
                same = slice(None) if of_each[0] == count and (of_each == count).all() else of_each == count
                numbers = np.arange(count)
                to = (ends[which[same]] - count)[:, None] + numbers
                ids[to] = words[(places[same] + _IDS_AT)[:, None] + numbers]
        return counts, ids.tobytes()

    def _places(
        self, tier: Tier, position: int, rows: Numbers, here: Numbers
    ) -> list[tuple[Numbers, Numbers, npt.NDArray[np.int32]]]:
        """Of the rows that `here` picks: the words of each container's memory, and where in them each slot begins."""
        copies, wanted = self._residency.copies[position], rows[here]
        containers = np.frombuffer(copies.container, np.uint32)[wanted]
        offsets = np.frombuffer(copies.offset, np.uint64)[wanted].astype(np.int64)
        found = []
        for container in np.unique(containers).tolist():
            mine = containers == container
            picked, begins = here[mine], offsets[mine]
            first = self._residency.slot(int(wanted[mine][0]), position)
            base = tier.slot_segment(first).address - first.offset  # slots of a container are in one piece of memory
            low, high = int(begins.min()), int(begins.max()) + TOKENS_OFFSET + 4 * MAX_TOKENS
            nbytes = 2 ** (high - low - 1).bit_length()  # few lengths: ctypes makes a type of each; none read so far
            memory = memoryview((ctypes.c_char * nbytes).from_address(base + low))
            found.append((picked, (begins - low) // 4, np.frombuffer(memory, np.int32)))
        return found
