"""Members' guesses, calibrated and mixed: the predictions of each are compared with the outcomes.

Now and then the ensemble asks its members for a sample of their guesses, for one of three horizons in turn, and notes
which of them come true. This gives, for each member and horizon, a calibration (bins of probability, made monotone) and
a weight (by the log loss of its calibrated guesses, decayed). A guess of one member alone is passed on; guesses of
several members are mixed by weight in log odds.

The module owns calibrations and weights. Bounded: `_NOTED` guesses a member and question, `_OPEN` questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from kvstore_predictor.ages import Floats
from kvstore_predictor.base import Array, Guess, Hint, Piece, Predictor, PredictorRequest, within
from kvstore_predictor.generations import Generations
from kvstore_predictor.markov import Markov
from kvstore_predictor.questions import HORIZONS_S, Name, OpenQuestions, nearest
from kvstore_predictor.session_return import SessionReturn
from kvstore_predictor.sessions import LOOKED_BACK, SHARED_FAN

_EDGES: Floats = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9])
_BINS = len(_EDGES) + 1
_PRIOR = 10.0  # guesses that it takes in a bin for what came to count as much as what was predicted
_DECAY = 0.98  # of what was seen, a question
_EVERY, _EVERY_FIRST, _FIRST, _OPEN, _NOTED = 256, 16, 512, 64, 128  # requests, requests, requests, questions, guesses
_FOLLOWED = 1 << 13  # requests of which the last block but one is known
_TRUST = 4.0  # how sharply log loss separates members


class _Question:
    """A question. `said`: the chance for each guess and member, -1 for none. `came`: for each guess, whether it came
    true; None if its chain was deleted.
    """

    __slots__ = ("came", "due_s", "horizon", "names", "said")

    def __init__(self, due_s: float, horizon: int, chances: dict[Name, list[float]]) -> None:
        self.due_s, self.horizon = due_s, horizon
        self.names, self.said = list(chances), list(chances.values())
        self.came: list[float | None] = [0.0] * len(chances)


class Ensemble(Predictor):
    """A predictor that mixes the guesses of several predictors. It corrects the chances by how often each predictor's
    guesses came true. `members` are functions that make these predictors.
    """

    name = "ensemble"

    def __init__(self, members: Sequence[Callable[[], Predictor]] = (SessionReturn, Markov)) -> None:
        self._make = tuple(members)
        self.members = [make() for make in members]
        shape = (len(members), len(HORIZONS_S), _BINS)
        self._predicted, self._came, self._guessed = (np.zeros(shape) for _ in range(3))
        self._loss = np.zeros((len(members), len(HORIZONS_S), 2))  # sum and guesses
        self._reset()

    def _reset(self) -> None:
        self._questions: OpenQuestions[_Question] = OpenQuestions(_OPEN)
        self._above: Generations[Name, bytes] = Generations(_FOLLOWED)  # of a last block, the one before it,
        self._below: Generations[Name, tuple[bytes, int]] = Generations(_FOLLOWED)  # and how many have followed that
        self._requests = self._asked = 0

    def requested(self, request: PredictorRequest, now_s: float) -> None:
        if not request.keys:
            return
        for question in self._questions.over(now_s):
            self._score(question)
        self._seen(request)
        for member in self.members:
            member.requested(request, now_s)
        self._requests += 1
        every = _EVERY if self._requests > _FIRST else _EVERY_FIRST
        if self._requests % every == 0 and self._questions.has_room:
            self._ask(now_s)

    def answered(self, number: int, output_tokens: int, now_s: float) -> None:
        for member in self.members:
            member.answered(number, output_tokens, now_s)

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:
        for member in self.members:
            member.hinted(tenant, key, hint, now_s)

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        gone = None if keys is None else list(keys)
        for member in self.members:
            member.forget(tenant, gone)
        for question, at in self._questions.taken(tenant, gone):
            question.came[at] = None
        for key in [key for owner, key in self._known() if owner == tenant] if gone is None else gone:
            self._above.pop((tenant, key))
            self._below.pop((tenant, key))

    def _known(self) -> list[Name]:
        return [name for table in (self._above, self._below) for name, _ in table.items()]

    # Questions of its own

    def _seen(self, request: PredictorRequest) -> None:
        """Mark the awaited chains that the request uses."""
        tenant, keys = request.tenant, request.keys
        looked_at = reversed(keys) if len(keys) <= LOOKED_BACK else islice(reversed(keys), LOOKED_BACK)
        for question, at in self._questions.taken(tenant, looked_at):
            if question.came[at] is not None:
                question.came[at] = 1.0
        if len(keys) > 2:  # the first block is no session's
            last, name = keys[-1], (tenant, keys[-2])
            self._above[tenant, last] = name[1]
            below = self._below.get(name)
            if below is None or below[0] != last:
                self._below[name] = (last, 1 if below is None else below[1] + 1)

    def _ask(self, now_s: float) -> None:
        horizon = self._asked % len(HORIZONS_S)
        chances: dict[Name, list[float]] = {}
        for number, member in enumerate(self.members):
            for guess in member.sample(now_s, HORIZONS_S[horizon], _NOTED, self._asked // len(HORIZONS_S)):
                said = chances.setdefault((guess.tenant, guess.key), [-1.0] * len(self.members))
                said[number] = guess.probability
        question = _Question(now_s + HORIZONS_S[horizon], horizon, chances)
        self._questions.ask(question, self._concerns(question.names))
        self._asked += 1
        for column in (self._predicted, self._came, self._guessed, self._loss):
            column[:, horizon] *= _DECAY

    def _concerns(self, names: Sequence[Name]) -> Iterator[tuple[Name, int]]:
        """Yield the blocks whose request makes the guess of a chain come true: its last block, and the one before
        unless it is a prefix of many chains.
        """
        for at, (tenant, key) in enumerate(names):
            yield (tenant, key), at
            above = self._above.get((tenant, key))
            if above is not None and (self._below.get((tenant, above)) or (b"", 0))[1] < SHARED_FAN:
                yield (tenant, above), at

    def _score(self, question: _Question) -> None:
        horizon = question.horizon
        kept = [at for at, came in enumerate(question.came) if came is not None]
        if not kept:
            return
        came = np.array([question.came[at] for at in kept], np.float64)
        for member, chances in enumerate(np.array([question.said[at] for at in kept]).T):
            named = chances >= 0.0
            said, true = chances[named], came[named]
            sure = self._calibrated(member, horizon, said)
            self._loss[member, horizon] += (-np.log(np.where(true > 0.0, sure, 1.0 - sure)).sum(), len(said))
            bins = np.searchsorted(_EDGES, said, side="right")
            for column, weights in ((self._predicted, said), (self._came, true), (self._guessed, np.ones(len(said)))):
                column[member, horizon] += np.bincount(bins, weights, _BINS)

    def _calibrated(self, member: int, horizon: int, chances: Floats) -> Floats:
        """Return the calibrated chances: the outcomes of earlier guesses with such chances."""
        bins = np.searchsorted(_EDGES, chances, side="right")
        predicted, came, guessed = (each[member, horizon] for each in (self._predicted, self._came, self._guessed))
        factors = (came + _PRIOR * _CENTRES) / (predicted + _PRIOR * _CENTRES)
        limits = np.maximum.accumulate(came / (guessed + _PRIOR))  # what was seen alone: an empty bin says nothing
        lower = np.concatenate([[0.0], limits[:-1]])
        found: Floats = np.clip(np.maximum(chances * factors[bins], lower[bins]), 1e-4, 1.0 - 1e-4)
        return found

    # Answers

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        if limit < 1:
            return []
        horizon = nearest(horizon_s)
        weights = self.weights(horizon)
        found: dict[Name, list[tuple[float, float, Guess]]] = {}
        for number, member in enumerate(self.members):
            theirs = member.guesses(now_s, horizon_s, 2 * limit + _NOTED)  # calibrated, their order may be another one
            chances = self._calibrated(number, horizon, np.array([each.probability for each in theirs]))
            for guess, chance in zip(theirs, chances.tolist(), strict=True):
                found.setdefault((guess.tenant, guess.key), []).append((weights[number], chance, guess))
        mixed = [_mixed(said) for said in found.values()]
        mixed.sort(key=lambda each: (-each.probability, each.tenant, each.key))
        return mixed[:limit]

    def weights(self, horizon: int) -> list[float]:
        """Return the weight of each member predictor's guesses for horizon number `horizon` (its position in
        HORIZONS_S). The weights sum to 1.
        """
        loss = (self._loss[:, horizon, 0] + _PRIOR * 0.3) / (self._loss[:, horizon, 1] + _PRIOR)
        odds = np.exp(-_TRUST * (loss - loss.min()))
        return [float(each) for each in odds / odds.sum()]

    # Over a restart

    def export_state(self) -> Iterator[Piece]:
        yield "numbers", np.array([self._requests, self._asked], np.float64)
        yield "seen", np.stack([self._predicted, self._came, self._guessed])
        yield "loss", self._loss.copy()
        for number, member in enumerate(self.members):
            for name, piece in member.export_state():
                yield f"{number}/{name}", piece

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        shapes = {"numbers": (2,), "seen": (3, *self._came.shape), "loss": self._loss.shape}
        if any(name not in state or state[name].shape != shape for name, shape in shapes.items()):
            raise ValueError("the state of another version")
        seen, loss, requests = state["seen"], state["loss"], state["numbers"]
        members = [make() for make in self._make]
        for number, member in enumerate(members):
            member.import_state(within(state, f"{number}/"), later_s)
        self.members = members
        self._predicted, self._came, self._guessed = seen.copy()
        self._loss = loss.copy()
        self._reset()
        self._requests, self._asked = map(int, requests.tolist())


_CENTRES: Floats = (np.concatenate([[0.005], _EDGES]) + np.concatenate([_EDGES, [1.0]])) / 2


def _mixed(said: Sequence[tuple[float, float, Guess]]) -> Guess:
    """Return one guess from several about one chain: the chance by weight, the times of the member with the largest
    weight.
    """
    if len(said) == 1:
        _, chance, guess = said[0]
    else:
        total = sum(weight for weight, _, _ in said)
        odds = sum(weight * math.log(chance / (1.0 - chance)) for weight, chance, _ in said) / total
        chance = 1.0 / (1.0 + math.exp(-odds))
        guess = max(said, key=lambda each: each[0])[2]
    sure = max(each.confidence for _, _, each in said)
    return Guess(guess.tenant, guess.key, guess.blocks, chance, guess.first_s, guess.due_s, sure)
