"""A predictor behind a guard: its exceptions cost predictions, and no request.

Owns whether the predictor still works. After its first exception it is not asked again: what it would say next rests on
a state that is half changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from kvstore_predictor.base import Array, Guess, Hint, Piece, Predictor
from kvstored.predictor_names import LEARNED, NONE, PREDICTORS

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


def create_predictor(name: str, model: Path | None = None) -> Predictor | None:
    """The predictor `name`; None for the one that predicts nothing. Its module is imported here. `model`: the file of
    the one that is made with a model. Raises ValueError with one line where that cannot be used."""
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
    """`failure`: what the predictor raised; "" while it works."""

    def __init__(self, predictor: Predictor | None) -> None:
        self._predictor = predictor
        self.name = NONE if predictor is None else predictor.name
        self.failure = ""
        self.hints = 0  # given to it

    @property
    def works(self) -> bool:
        return self._predictor is not None and not self.failure

    def attempt(self, call: Callable[[Predictor], Answer], otherwise: Answer) -> Answer:
        """What `call` answers of the predictor; `otherwise` where there is none, or none that works."""
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
        """What the predictor has learned; it ends early where that fails."""
        nothing: Iterator[Piece] = iter(())
        found = self.attempt(lambda predictor: predictor.export_state(), nothing)
        while (piece := self.attempt(lambda _: next(found, None), None)) is not None:
            yield piece

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        """Raises ValueError, having changed nothing, for a state that the predictor cannot use."""

        def refusal(predictor: Predictor) -> ValueError | None:
            try:
                predictor.import_state(state, later_s)
            except ValueError as error:
                return error
            return None

        if (error := self.attempt(refusal, None)) is not None:
            raise error
