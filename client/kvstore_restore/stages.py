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
    """The state of a chunk's input: the hidden states from which a pipeline stage computes the chunk. STORED can be
    loaded. PRESENT is in memory, until the chunk has been computed. MISSING can only come from the previous stage.
    """

    STORED = "stored"
    PRESENT = "present"
    MISSING = "missing"


class Stages:
    """The progress of restoring one request in all stages of a pipeline. `pointers` has the progress of each stage.
    `inputs` says for each stage except the first which chunks have stored hidden states, from which the stage computes.
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
        """Return the number of the chunk that stage number `stage` computes now, or None if it computes none."""
        return self._busy[stage]

    def input(self, stage: int, chunk: int) -> Input:
        return self._inputs[stage][chunk] if stage else Input.PRESENT

    def wanted(self, stage: int) -> int | None:
        """Return the number of the chunk that stage number `stage` should compute next, once its input is there. It is
        a chunk that this stage lacks, or else a chunk whose hidden states the next stage lacks. Return None if neither
        exists.
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
        """Return whether stage number `stage` can get the input (hidden states) of `chunk`: it is present or can be
        loaded, or the previous stage will compute the chunk for itself anyway.
        """
        return self.input(stage, chunk) is not Input.MISSING or chunk >= self.pointers[stage - 1].head

    def next_compute(self, stage: int) -> int | None:
        """Begin to compute the next chunk in stage number `stage`, and return the chunk's number. Return None if no
        chunk has to be computed now, or its input is missing.
        """
        if self._busy[stage] is not None:
            return None
        chunk = self.wanted(stage)
        if chunk is None or self.input(stage, chunk) is not Input.PRESENT:
            return None
        self._is_own[stage] = chunk == self.pointers[stage].head
        self._busy[stage] = chunk
        return chunk

    def computed(self, stage: int, chunk: int) -> bool:
        """Note that stage number `stage` has computed `chunk`. Return True if the next stage needs the hidden states
        that came out of it.
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
        """Note that the input (hidden states) of `chunk` for stage number `stage` has been loaded. Return False if the
        previous stage had computed it already.
        """
        is_new = self.input(stage, chunk) is not Input.PRESENT
        if is_new:
            self._inputs[stage][chunk] = Input.PRESENT
        return is_new

    def lose_input(self, stage: int, chunk: int) -> None:
        """Note that the hidden states of `chunk` for stage number `stage` cannot be loaded."""
        if self.input(stage, chunk) is Input.STORED:
            self._inputs[stage][chunk] = Input.MISSING
            self._stored[stage][chunk] = False

    def cancel(self) -> None:
        """End the restoration, as the request has ended."""
        for each in self.pointers:
            each.cancel()
