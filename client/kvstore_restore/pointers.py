"""One request's restoration under way: which chunk is computed next, which may still be loaded, and when all is done.

The module owns the state of each chunk. The caller computes and loads. Computing goes up from the first chunk, loading
comes down from the last. When they meet, the last chunk that is being loaded is computed as well if computing it is
expected to end first; the first to end counts. A chunk whose load fails or stalls is computed. Invariants: chunks are
computed in order; a chunk counts once; no computed chunk depends on a load, since all chunks before it were computed or
are present: `computable` waits for a chunk that only a load can bring.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

_AGEING_CHUNKS_S = 16.0  # chunks of remaining work that a second of waiting counts for


def turn(chunks: int, waited_s: float) -> float:
    """Return the rank of a request among the requests that restore prefixes with the same device and link. The lowest
    rank is served first. The request has `chunks` chunks left to restore, and has waited for `waited_s` seconds. Short
    requests come first, and waiting lowers the rank, so that a long request waits only for a bounded time.
    """
    return chunks - _AGEING_CHUNKS_S * waited_s


class ChunkState(Enum):
    """The state of a chunk (some blocks of a prefix) that is being restored: STORED can be loaded, PRESENT is in the
    engine, LOST has to be computed.
    """

    STORED = "stored"
    PRESENT = "present"
    LOST = "lost"


class Pointers:
    """The progress of restoring one request, whose prefix is cut into `chunks` chunks: they are computed from the first
    on, and loaded from the last on. `overtakes(chunk)` returns whether computing all missing chunks up to `chunk` is
    expected to end before `chunk` is loaded. With `loads` False, no chunk can be loaded. A lost chunk is computed in
    any case.
    """

    def __init__(
        self, chunks: int, *, overtakes: Callable[[int], bool] = lambda chunk: True, loads: bool = True
    ) -> None:
        self._states = [ChunkState.STORED if loads else ChunkState.LOST] * chunks
        self._overtakes = overtakes
        self._is_cancelled = False
        self.head = 0  # leading chunks that are present
        self.left = chunks  # chunks that are not present
        self.computed = self.loaded = self.wasted = 0  # chunks; wasted: done twice

    @property
    def is_done(self) -> bool:
        """True if all chunks of the request are in the engine, or the restoration was cancelled."""
        return self._is_cancelled or not self.left

    def state(self, chunk: int) -> ChunkState:
        return self._states[chunk]

    def stored(self, first: int = 0) -> list[int]:
        """Return in order the numbers of the chunks, from chunk number `first` on, that are stored and neither loaded,
        computed nor lost yet.
        """
        if self.is_done:
            return []
        return [at for at in range(max(self.head, first), len(self._states)) if self._states[at] is ChunkState.STORED]

    def computable(self, most: int) -> range:
        """Return the numbers of the chunks that the next step may compute: at most `most` chunks, from the first chunk
        that is not in the engine.
        """
        end = self.head
        if not self.is_done:
            while end < min(self.head + most, len(self._states)) and self._may_compute(end):
                end += 1
        return range(self.head, end)

    def computed_chunk(self, chunk: int) -> bool:
        """Note that chunk number `chunk` has been computed. Return False if it had been loaded already, so that
        computing it was useless.
        """
        counts = self._present(chunk)
        self.computed += counts
        return counts

    def loaded_chunk(self, chunk: int) -> bool:
        """Note that chunk number `chunk` has been loaded. Return True if its bytes must be used, even if the chunk is
        being computed now. Return False if it had been computed already.
        """
        counts = self._present(chunk)
        self.loaded += counts
        return counts

    def lose(self, chunk: int) -> None:
        """Mark chunk number `chunk` as lost, because it is gone, is corrupt, or its load stalls. The engine then
        computes it.
        """
        if self._states[chunk] is ChunkState.STORED:
            self._states[chunk] = ChunkState.LOST

    def lose_all(self) -> None:
        """Mark all chunks that are not in the engine as lost, because none of them can be loaded any longer."""
        for chunk in range(self.head, len(self._states)):
            self.lose(chunk)

    def cancel(self) -> None:
        """End the restoration, because the request has ended. Chunks that are computed or loaded afterwards do not
        count.
        """
        self._is_cancelled = True

    def _may_compute(self, chunk: int) -> bool:
        state = self._states[chunk]
        return state is ChunkState.LOST or (state is ChunkState.STORED and self._overtakes(chunk))

    def _present(self, chunk: int) -> bool:
        if self._is_cancelled or self._states[chunk] is ChunkState.PRESENT:
            self.wasted += not self._is_cancelled
            return False
        self._states[chunk] = ChunkState.PRESENT
        self.left -= 1
        while self.head < len(self._states) and self._states[self.head] is ChunkState.PRESENT:
            self.head += 1
        return True
