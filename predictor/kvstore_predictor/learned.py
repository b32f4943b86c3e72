"""Session-return's guesses with chances of a learned model, as far as the model does better.

A guess's chance is a mixture of both, by the loss of each on the guesses that were checked lately (log loss, decayed,
by horizon): a model that predicts worse than session-return loses its weight. A chain unlike the training data keeps
session-return's chance, and so does one that an engine announced. Session-return decides which chains are guessed, and
when they are due.

The module owns losses. Bounded: `_OPEN` questions of `_NOTED` guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvstore_predictor.ages import Floats
from kvstore_predictor.base import Array, Guess, Hint, Piece, Predictor, PredictorRequest, within
from kvstore_predictor.questions import HORIZONS_S, OpenQuestions, nearest
from kvstore_predictor.return_trees import LEAST, ChainRows, ReturnTrees
from kvstore_predictor.session_return import SessionReturn

_EVERY, _EVERY_FIRST, _FIRST = 256, 32, 1024  # requests from one question to the next, at first, and how long that is
_OPEN, _NOTED = 64, 64  # questions, guesses
_DECAY = 0.98  # of losses, a question of the same horizon
_TRUST = 0.25  # of one guess's loss: guesses of one moment err alike
_OWN = "session-return/"


class _Question:
    """A question. `slots` and `keys` of the chains; `chances`: session-return's and the model's, a row each."""

    __slots__ = ("chances", "due_s", "horizon", "is_gone", "keys", "slots")

    def __init__(self, due_s: float, horizon: int, slots: list[int], keys: list[bytes], chances: Floats) -> None:
        self.due_s, self.horizon, self.slots, self.keys, self.chances = due_s, horizon, slots, keys, chances
        self.is_gone = np.zeros(len(slots), np.bool_)  # deleted


class LearnedPredictor(Predictor):
    """A predictor that corrects the chances of the predictor session-return by a trained `model`. The correction has
    more weight the better the model predicted lately. It remembers the last `requests_max` requests.
    """

    name = "learned"

    def __init__(self, model: ReturnTrees, requests_max: int = 1 << 16) -> None:
        self._model, self._requests_max = model, requests_max
        self._plain = SessionReturn(requests_max)
        self._rows = ChainRows(self._plain)
        self._losses = np.zeros((len(HORIZONS_S), 2))
        self._reset()

    def _reset(self) -> None:
        self._questions: OpenQuestions[_Question] = OpenQuestions(_OPEN)
        self._requests = self._asked = 0

    def requested(self, request: PredictorRequest, now_s: float) -> None:
        if not request.keys:
            return
        for question in self._questions.over(now_s):
            self._count(question)
        self._plain.requested(request, now_s)
        self._rows.requested(request.tenant, now_s)
        self._requests += 1
        if self._requests % (_EVERY if self._requests > _FIRST else _EVERY_FIRST) == 0 and self._questions.has_room:
            self._ask(now_s)

    def answered(self, number: int, output_tokens: int, now_s: float) -> None:
        self._plain.answered(number, output_tokens, now_s)

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:
        self._plain.hinted(tenant, key, hint, now_s)

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        gone = None if keys is None else list(keys)
        self._plain.forget(tenant, gone)
        if gone is None:
            self._rows.forget(tenant)
        for question, at in self._questions.taken(tenant, gone):
            question.is_gone[at] = True

    def rows(self, guesses: Sequence[Guess], now_s: float, horizon_s: float) -> Floats:
        """Return the model's inputs, one row of numbers for the chain of each of `guesses`. The guesses were made just
        now, at the time `now_s` for the next `horizon_s` seconds, without a trained model. Training uses the rows too.
        """
        return self._rows.rows(guesses, now_s, horizon_s)

    # Questions of its own

    def _ask(self, now_s: float) -> None:
        horizon = self._asked % len(HORIZONS_S)
        horizon_s = HORIZONS_S[horizon]
        found = self._plain.sample(now_s, horizon_s, _NOTED, self._asked // len(HORIZONS_S))
        self._asked += 1
        self._losses[horizon] *= _DECAY
        rows, sessions = self._rows.rows(found, now_s, horizon_s), self._plain.sessions
        judged = np.flatnonzero(self._model.knows(rows) & ~_announced(found))
        if not len(judged):
            return
        asked = [found[at] for at in judged.tolist()]
        slots = [sessions.by_end(guess.tenant, guess.key) for guess in asked]
        chances = np.stack([[guess.probability for guess in asked], self._model.chances(rows[judged])])
        question = _Question(now_s + horizon_s, horizon, slots, [guess.key for guess in asked], chances)
        concerns = (
            ((guess.tenant, key), at)
            for at, (guess, slot) in enumerate(zip(asked, slots, strict=True))
            for key in (guess.key, sessions.above[slot])
            if key is not None
        )
        self._questions.ask(question, concerns)

    def _count(self, question: _Question) -> None:
        """Count the losses of a question that is over. A chain that is no longer known has gone on."""
        last = self._plain.sessions.last
        came = [last[slot] != key for slot, key in zip(question.slots, question.keys, strict=True)]
        sure = np.clip(question.chances, LEAST, 1.0 - LEAST)
        losses = -np.log(np.where(came, sure, 1.0 - sure))
        self._losses[question.horizon] += losses[:, ~question.is_gone].sum(axis=1)

    # Answers

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        if limit < 1:
            return []
        found = self._mixed(self._plain.guesses(now_s, horizon_s, limit + _NOTED), now_s, horizon_s)
        return found[:limit]

    def sample(self, now_s: float, horizon_s: float, count: int, turn: int) -> list[Guess]:
        return self._mixed(self._plain.sample(now_s, horizon_s, count, turn), now_s, horizon_s)

    def say(self, horizon_s: float) -> float:
        """Return the weight, from 0 to 1, of the trained model in a chance for the next `horizon_s` seconds.
        Session-return's chance has the remaining weight.
        """
        plain, model = self._losses[nearest(horizon_s)]
        return float(1.0 / (1.0 + np.exp(np.clip(_TRUST * (model - plain), -30.0, 30.0))))

    def _mixed(self, guesses: Sequence[Guess], now_s: float, horizon_s: float) -> list[Guess]:
        rows = self._rows.rows(guesses, now_s, horizon_s)
        say = self.say(horizon_s) * (self._model.knows(rows) & ~_announced(guesses))
        plain = np.array([guess.probability for guess in guesses])
        chances = (say * self._model.chances(rows) + (1.0 - say) * plain).tolist()
        found = [
            Guess(guess.tenant, guess.key, guess.blocks, chance, guess.first_s, guess.due_s, guess.confidence)
            for guess, chance in zip(guesses, chances, strict=True)
        ]
        found.sort(key=lambda guess: -guess.probability)
        return found

    # Over a restart

    def export_state(self) -> Iterator[Piece]:
        yield "losses", self._losses.copy()
        yield "model", np.frombuffer(self._model.digest, np.uint8)
        yield from self._rows.export_state()
        for name, piece in self._plain.export_state():
            yield _OWN + name, piece

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        losses, digest = state.get("losses"), state.get("model")
        if losses is None or digest is None or losses.shape != self._losses.shape or not np.isfinite(losses).all():
            raise ValueError("the state of another version")
        plain = SessionReturn(self._requests_max)
        plain.import_state(within(state, _OWN), later_s)
        rows = ChainRows(plain)
        rows.import_state(state, later_s)
        self._plain, self._rows = plain, rows
        is_same = digest.tobytes() == self._model.digest  # what another model lost says nothing of this one
        self._losses = losses.copy() if is_same else np.zeros_like(self._losses)
        self._reset()


def _announced(guesses: Sequence[Guess]) -> Array:
    return np.array([guess.confidence >= 1.0 for guess in guesses], np.bool_)
