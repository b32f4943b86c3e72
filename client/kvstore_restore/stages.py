"""One request's restoration over pipeline stages: each stage restores the K/V of its own layers, at the same time as
the others.

The module owns a pair of pointers for each stage (`pointers.py`), and the places of the hidden states from which a
stage computes a chunk. The first stage starts from tokens. Any other starts from the states at its boundary, which are
stored, or which the stage before has computed; so no stage waits for another, unless states are missing. The caller
computes and loads. Invariants: a stage computes one chunk at a time, and only one whose input is there and before which
all its chunks are present; states that cannot be loaded are computed by the stage before, again if needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kvstore_restore.pointers import Pointers


class Input(Enum):
    """The state of a chunk's hidden states. PRESENT: from their arrival until the chunk has been computed, when the
    caller may discard them. MISSING: only the stage before can bring them.
    """

    STORED = "stored"
    PRESENT = "present"
    MISSING = "missing"


class Stages:
    """The restoration of all stages. `pointers`: one for each stage. `inputs`: for each stage but the first, the chunks
    whose hidden states are stored.
    """

    def __init__(self, pointers: Sequence[Pointers], inputs: Sequence[Sequence[bool]]) -> None:
        self.pointers = tuple(pointers)
        self._stored = [[], *(list(each) for each in inputs)]
        self._inputs = [[Input.STORED if is_stored else Input.MISSING for is_stored in each] for each in self._stored]
        self._busy: list[int | None] = [None] * len(self.pointers)
        self._is_own = [False] * len(self.pointers)
        self.forwarded = 0  # chunks that a stage computed only for the next one

    @property
    def is_done(self) -> bool:
        """True if all chunks of all stages are present, or the restoration was cancelled."""
        return all(each.is_done for each in self.pointers)

    def computing(self, stage: int) -> int | None:
        """Return the chunk that the stage computes now; None if it computes none."""
        return self._busy[stage]

    def input(self, stage: int, chunk: int) -> Input:
        return self._inputs[stage][chunk] if stage else Input.PRESENT

    def wanted(self, stage: int) -> int | None:
        """Return the chunk that the stage computes next, once it has its input: one of its own, otherwise one whose
        states the next stage lacks.
        """
        pointers = self.pointers[stage]
        if own := pointers.computable(1):
            return own.start
        if stage + 1 == len(self.pointers):
            return None
        lacked = self.wanted(stage + 1)
        if lacked is None or lacked > pointers.head or self._inputs[stage + 1][lacked] is not Input.MISSING:
            return None
        return lacked

    def is_within_reach(self, stage: int, chunk: int) -> bool:
        """Return whether the stage has the chunk's input or can load it, or the stage before has yet to compute the
        chunk. If not, the stage before would compute the chunk for this stage alone: then loading it is better.
        """
        return self.input(stage, chunk) is not Input.MISSING or chunk >= self.pointers[stage - 1].head

    def next_compute(self, stage: int) -> int | None:
        """Begin to compute a chunk, and return it; None if there is nothing to compute now, or its input is missing."""
        if self._busy[stage] is not None:
            return None
        chunk = self.wanted(stage)
        if chunk is None or self.input(stage, chunk) is not Input.PRESENT:
            return None
        self._is_own[stage] = chunk == self.pointers[stage].head
        self._busy[stage] = chunk
        return chunk

    def computed(self, stage: int, chunk: int) -> bool:
        """Note that the stage has computed a chunk. Return whether the next stage lacks the states that it ends
        with.
        """
        self._busy[stage] = None
        if self._is_own[stage]:
            self.pointers[stage].computed_chunk(chunk)
        else:
            self.forwarded += 1
        if stage:
            self._inputs[stage][chunk] = Input.STORED if self._stored[stage][chunk] else Input.MISSING
        following = stage + 1
        if following == len(self.pointers) or self.input(following, chunk) is Input.PRESENT:
            return False
        is_lacking = chunk >= self.pointers[following].head or self.wanted(following) == chunk
        if is_lacking:
            self._inputs[following][chunk] = Input.PRESENT
        return is_lacking

    def loaded_input(self, stage: int, chunk: int) -> bool:
        """Note that a chunk's hidden states have been loaded. Return whether to use them: the stage before was not
        first.
        """
        is_new = self.input(stage, chunk) is not Input.PRESENT
        if is_new:
            self._inputs[stage][chunk] = Input.PRESENT
        return is_new

    def lose_input(self, stage: int, chunk: int) -> None:
        """Note that a chunk's hidden states cannot be loaded."""
        if self.input(stage, chunk) is Input.STORED:
            self._inputs[stage][chunk] = Input.MISSING
            self._stored[stage][chunk] = False

    def cancel(self) -> None:
        """End the restoration, as the request has ended."""
        for each in self.pointers:
            each.cancel()
