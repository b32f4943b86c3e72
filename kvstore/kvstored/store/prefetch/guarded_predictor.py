"""A predictor behind a guard: after an exception only predictions are lost, and no request fails. It learns from a
request in the event loop's next turn, so that the request does not wait for it.

The module owns whether the predictor still works. After its first exception it is not asked again: its next answers
would rest on a state that is half changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from operator import methodcaller
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvstore_predictor.base import Array, Guess, Hint, Piece, Predictor, PredictorRequest, State, within
from kvstored.clock import NS_PER_S
from kvstored.predictor_names import LEARNED, NONE, PREDICTORS
from kvstored.store.policies import Origin
from kvstored.store.prefetch.credit import CREDIT, PrefetchCredit
from kvstored.store.prefetch.recent import END, RecentRequests

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


def create_predictor(name: str, model: Path | None = None) -> Predictor | None:
    """Return the predictor `name`, or None if the name stands for no prediction. `model` is the file for a predictor
    that needs a model. Raises ValueError with one line if the predictor cannot be used."""
    address = PREDICTORS[name]
    if not address:
        return None
    module, _, maker = address.partition(":")
    make = getattr(import_module(module), maker)
    predictor = make(model) if name == LEARNED else make()
    if not isinstance(predictor, Predictor):
        raise RuntimeError(f"{address} is no Predictor")
    return predictor


class GuardedPredictor:
    """A wrapper around a predictor that protects requests from its errors: after its first exception the predictor is
    not used any more. `failure` is that exception's text, "" while the predictor works. `later` is called with work
    that no request waits for, and runs it after the present event; None runs such work at once."""

    def __init__(
        self, predictor: Predictor | None, later: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        self._predictor = predictor
        self._later = later
        self._waiting: list[tuple[PredictorRequest, float]] = []  # requests and their times
        self.name = NONE if predictor is None else predictor.name
        self.failure = ""
        self.hints = 0  # given to it

    @property
    def works(self) -> bool:
        return self._predictor is not None and not self.failure

    def attempt(self, call: Callable[[Predictor], Answer], otherwise: Answer) -> Answer:
        """Return the result of `call` with the predictor as its argument. Return `otherwise` if there is no predictor,
        or it has failed or fails now.
        """
        if self._waiting:
            self._learn()
        return self._guarded(call, otherwise)

    def beside(self, call: Callable[[], None]) -> None:
        """Make `call`, which belongs to prediction but does not ask the predictor, under the same guard."""
        self._guarded(lambda _: call(), None)

    def requested(self, request: PredictorRequest, now_s: float) -> None:
        """Let the predictor learn that `request` arrived at `now_s`: later, but before it is asked anything."""
        if not self.works:
            return
        self._waiting.append((request, now_s))
        if self._later is None:
            self._learn()
        elif len(self._waiting) == 1:
            self._later(self._learn)

    def _learn(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request, now_s in waiting:
            self._guarded(methodcaller("requested", request, now_s), None)

    def _guarded(self, call: Callable[[Predictor], Answer], otherwise: Answer) -> Answer:
        if self._predictor is None or self.failure:
            return otherwise
        try:
            return call(self._predictor)
        except Exception as error:  # a mistake of ours: requests go on without predictions
            self.failure = f"{type(error).__name__}: {error}"
            self._predictor = None  # nothing that it knows is kept
            log.exception("predictor %s failed and is off until the daemon starts again", self.name)
            return otherwise

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:
        self.hints += 1
        self.attempt(lambda predictor: predictor.hinted(tenant, key, hint, now_s), None)

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        def checked(predictor: Predictor) -> list[Guess]:
            found = predictor.guesses(now_s, horizon_s, limit)
            for guess in found:
                if not math.isfinite(guess.probability + guess.first_s + guess.due_s):
                    raise ValueError(f"a guess that is not finite: {guess}")
            return found

        return self.attempt(checked, [])

    def pieces(self) -> Iterator[Piece]:
        """Yield the predictor's learned state in pieces to save. If the predictor fails, the pieces end there."""
        nothing: Iterator[Piece] = iter(())
        found = self.attempt(lambda predictor: predictor.export_state(), nothing)
        while (piece := self.attempt(lambda _: next(found, None), None)) is not None:
            yield piece

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        """Let the predictor continue from `state`, adding `later_s` to saved times. Raises ValueError, having changed
        nothing, for a state that it cannot use.
        """

        def refusal(predictor: Predictor) -> ValueError | None:
            try:
                predictor.import_state(state, later_s)
            except ValueError as error:
                return error
            return None

        if (error := self.attempt(refusal, None)) is not None:
            raise error


_PREDICTOR, _CREDIT, _ENDS = "predictor/", "credit", "ends"


class PrefetchState:
    """The saved form of one store's prefetch: what the predictor has learned, the tenants' credit, and recent
    requests."""

    def __init__(self, predictor: GuardedPredictor, recent: RecentRequests, credit: PrefetchCredit) -> None:
        self._predictor = predictor
        self._recent = recent
        self._credit = credit

    @property
    def name(self) -> str:
        """The predictor's name. A saved state is used only by a predictor of the same name."""
        return self._predictor.name

    @property
    def works(self) -> bool:
        """True if there is a predictor that works."""
        return self._predictor.works

    @property
    def hints(self) -> int:
        """The number of hints given to the predictor since the start; when it has changed, so has the learned state."""
        return self._predictor.hints

    def export_state(self) -> Iterator[Piece]:
        """Yield the state in pieces that take at most half a millisecond each, nothing without a working predictor.
        Events may come between two pieces.
        """
        if self._predictor.works:
            for name, piece in self._predictor.pieces():
                yield _PREDICTOR + name, piece
            for piece in self._credit.pieces():
                yield _CREDIT, piece
            for piece in self._recent.ends():
                yield _ENDS, piece

    def import_state(self, state: State, origin: Origin) -> None:
        """Continue from `state`, the joined pieces. Raises ValueError, having changed nothing, for a state that cannot
        be used.
        """
        if not self._predictor.works:
            return
        later_s, now_s = origin.later_ns / NS_PER_S, origin.now_ns / NS_PER_S
        credit, ends = (_renumbered(state[name], origin) if name in state else None for name in (_CREDIT, _ENDS))
        if credit is None or credit.dtype != CREDIT or ends is None or ends.dtype != END:
            raise ValueError("the state of another version")
        learned = {name: _renumbered(table, origin) for name, table in within(state, _PREDICTOR).items()}
        self._predictor.import_state(learned, later_s)
        self._credit.restore(credit, later_s, now_s)
        self._recent.restore(ends)


def _renumbered(table: Array, origin: Origin) -> Array:
    """Return the rows of tenants that still exist, by their present numbers; `table` itself if its rows belong to no
    tenant.
    """
    if table.dtype.names is None or "tenant" not in table.dtype.names:
        return table
    former = table["tenant"].astype(np.int64)
    if table.ndim != 1 or (len(table) and (former.min() < 0 or former.max() >= len(origin.tenants))):
        raise ValueError("it names tenants that there were not")
    tenants = origin.tenants[former]
    found = table[tenants >= 0]
    found["tenant"] = tenants[tenants >= 0]
    return found
