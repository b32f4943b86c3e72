"""One request's restoration under way: which chunk is computed next, which is loaded next, and when all is done.

Owns the state of each chunk. The caller computes and loads. Computing goes up from the first chunk; each tier's link
goes down from its last. Where they meet, the last chunk that is being loaded is computed as well if computing it is
expected to be done first; the first one done counts. A chunk whose load fails or stalls is computed.
Invariants: chunks are computed in order; a chunk counts once; nothing that is computed depends on a load, since all
chunks before it were computed or are present: `next_compute` waits for a chunk that only a load can bring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

_AGEING_CHUNKS_S = 16.0  # chunks of remaining work that a second of waiting counts for


def turn(chunks: int, waited_s: float) -> float:
    """Rank a request among those that share one compute and one link; the lowest is served first.

    It has `chunks` left and has waited for `waited_s`. What is left is known exactly, so serving the shortest first is
    possible; with ageing a long request is passed over for a bounded time only.
    """
    return chunks - _AGEING_CHUNKS_S * waited_s


class State(Enum):
    """Of a chunk. LOST: it cannot be loaded."""

    STORED = "stored"
    LOADING = "loading"
    PRESENT = "present"
    LOST = "lost"


class Pointers:
    """`tiers`: where each chunk is stored. `overtakes(chunk)`: computing all from the first chunk that is not present
    to that one, from now on, is expected to be done before the links are done with it and with all that they load
    before it. `loads`, `computes`: which of the two paths the plan uses; a chunk that is lost is computed in any case.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        *,
        overtakes: Callable[[int], bool] = lambda chunk: True,
        loads: bool = True,
        computes: bool = True,
    ) -> None:
        self._tiers = tuple(tiers)
        self._states = [State.STORED if loads else State.LOST] * len(self._tiers)
        self._overtakes = overtakes
        self._computes = computes
        self._head = 0  # all chunks before it are present
        self._computing: int | None = None
        self._left = len(self._tiers)
        self._ends = {tier: len(self._tiers) for tier in self._tiers}  # no stored chunk of the tier from here on
        self._is_cancelled = False
        self.computed = self.loaded = self.wasted = 0  # chunks; wasted: done twice

    @property
    def is_done(self) -> bool:
        """All chunks are present, or the restoration was cancelled."""
        return self._is_cancelled or not self._left

    @property
    def left(self) -> int:
        """Chunks that are not present."""
        return self._left

    @property
    def head(self) -> int:
        """Leading chunks that are present."""
        return self._head

    def state(self, chunk: int) -> State:
        return self._states[chunk]

    def stored(self, tier: str, first: int = 0) -> list[int]:
        """Chunks of `tier`, from `first` on, that could still be loaded, first ones first."""
        chunks = range(max(self._head, first), self._ends.get(tier, 0))
        return [at for at in chunks if self._tiers[at] == tier and self._states[at] is State.STORED]

    def next_compute(self) -> int | None:
        """Begin to compute a chunk, always the first that is not present; None if there is nothing to compute now."""
        if self._computing is not None or not self.computable(1):
            return None
        self._computing = self._head
        return self._head

    def computable(self, most: int) -> range:
        """At most `most` chunks, from the first that is not present on, that one step might compute now."""
        end = self._head
        if not self.is_done:
            while end < min(self._head + most, len(self._states)) and self._may_compute(end):
                end += 1
        return range(self._head, end)

    def next_load(self, tier: str) -> int | None:
        """Begin to load a chunk of `tier`, its last that is stored and not being computed; None if there is none."""
        if self._is_cancelled:
            return None
        at = self._ends.get(tier, 0) - 1
        while at >= self._head:
            if self._tiers[at] == tier and self._states[at] is State.STORED and at != self._computing:
                self._states[at] = State.LOADING
                self._ends[tier] = at
                return at
            at -= 1
        return None

    def computed_chunk(self, chunk: int) -> bool:
        """A chunk has been computed. Returns whether that counts: its load was not done before."""
        if self._computing == chunk:
            self._computing = None
        counts = self._present(chunk)
        self.computed += counts
        return counts

    def loaded_chunk(self, chunk: int) -> bool:
        """A chunk has been loaded. Returns whether to use it: it was not computed before. One that is being computed
        counts as well; the caller may stop computing it (`abandon`).
        """
        counts = self._present(chunk)
        self.loaded += counts
        return counts

    def abandon(self, chunk: int) -> None:
        """Computing of `chunk` was stopped or has failed."""
        if self._computing == chunk:
            self._computing = None

    def lose(self, chunk: int) -> None:
        """The chunk has vanished, is corrupt, or its load stalls: it is computed."""
        if self._states[chunk] in (State.STORED, State.LOADING):
            self._states[chunk] = State.LOST

    def lose_all(self) -> None:
        """Nothing can be loaded any longer."""
        for chunk in range(self._head, len(self._states)):
            self.lose(chunk)

    def cancel(self) -> None:
        """The request has ended: there is nothing more to do, and results of work under way do not count."""
        self._is_cancelled = True

    def _may_compute(self, chunk: int) -> bool:
        state = self._states[chunk]
        if state is State.PRESENT or (state is State.STORED and not self._computes):
            return False
        return state is State.LOST or self._overtakes(chunk)

    def _present(self, chunk: int) -> bool:
        if self._is_cancelled or self._states[chunk] is State.PRESENT:
            self.wasted += not self._is_cancelled
            return False
        self._states[chunk] = State.PRESENT
        self._left -= 1
        while self._head < len(self._states) and self._states[self._head] is State.PRESENT:
            self._head += 1
        return True
