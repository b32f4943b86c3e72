"""The module keeps facts about each slot of a slab in few bytes: how much it stores, its generation, and a mark of the
generation that a record names.

It knows no files and no records. `StoredWords` may be used by several threads.
"""

from __future__ import annotations

import threading
from array import array

import numpy as np
import numpy.typing as npt

from kvstore_tiers.nvme.layout import CODEC_SHIFT, STORED_MASK

_NARROW = 2**32 - 1
_MARKS = 2**16 - 1


def mark(generation: int) -> int:
    """Return a number from 1 to 65,535 for `generation`; for no generation (0), 0. It tells the uses of a slot apart,
    which follow each other one by one."""
    return generation % _MARKS + 1 if generation else 0


def marks(generations: npt.NDArray[np.uint64], taken: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint16]:
    """Return the `mark` of each of `generations` where `taken` is true, and 0 elsewhere."""
    found: npt.NDArray[np.uint16] = (generations % np.uint64(_MARKS) + np.uint64(1)).astype(np.uint16)
    found *= taken
    return found


def generations_of(values: npt.NDArray[np.uint64]) -> array[int]:
    """Return the generations `values` as an array of 4 bytes a slot, or of 8 if one does not fit."""
    code = "I" if values.max(initial=0) <= _NARROW else "Q"
    return array(code, values.astype(code).tobytes())


class StoredWords:
    """The `stored_word` (length and codec of the stored bytes) of each of `slots` slots. It is one number while all
    slots that were written have an equal one, and takes 4 bytes a slot from then on, 8 where blocks have codecs.
    """

    __slots__ = ("_lock", "_slots", "_words")

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._words: int | array[int] = 0
        self._lock = threading.Lock()  # a wider column replaces `_words`

    def of(self, index: int) -> tuple[int, int]:
        """Return the number of bytes that slot number `index` stores, and the number of their codec (0 for none)."""
        words = self._words
        word = words if isinstance(words, int) else words[index]
        return word & STORED_MASK, word >> CODEC_SHIFT

    def note(self, index: int, word: int) -> None:
        """Set the word of slot number `index`."""
        with self._lock:
            words = self._words
            if isinstance(words, int):
                if words in (0, word):
                    self._words = word
                    return
                words = array("I" if max(words, word) <= _NARROW else "Q", [words]) * self._slots
            elif word > _NARROW and words.itemsize == 4:
                words = array("Q", words)
            words[index] = word
            self._words = words

    def adopt(self, words: npt.NDArray[np.uint64], taken: npt.NDArray[np.bool_]) -> None:
        """Set the word of each slot that `taken` selects to the entry of `words` at its position."""
        here = words[taken]
        if len(here) and (here == here[0]).all():
            self._words = int(here[0])
            return
        kind = np.dtype(np.uint32 if words.max(initial=0) <= _NARROW else np.uint64)
        self._words = array("I" if kind.itemsize == 4 else "Q", words.astype(kind).tobytes())
