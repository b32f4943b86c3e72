"""Members' guesses, calibrated and mixed: what each predicted is held against what came.

Now and then the ensemble asks its members itself, for one of three horizons in turn, and notes which of the guesses
come true. From that follow, for each member and horizon, a calibration (bins of probability, made monotone) and a
weight (by the log loss of its calibrated guesses, decayed). A guess of one member alone is its own; of several, they
are mixed by weight in log odds.

Owns calibrations, weights and open questions. Bounded: `_NOTED` guesses a member and question, `_OPEN` questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvstore_predictor.base import Array, Guess, Hint, Piece, Predictor, Request
from kvstore_predictor.gittins import Floats
from kvstore_predictor.markov import Markov
from kvstore_predictor.session_return import SessionReturn
from kvstore_predictor.sessions import Sessions

HORIZONS_S = (10.0, 60.0, 300.0)
_EDGES: Floats = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9])
_BINS = len(_EDGES) + 1
_PRIOR = 10.0  # guesses that it takes in a bin for what came to count as much as what was predicted
_DECAY = 0.98  # of what was seen, a question
_EVERY, _EVERY_FIRST, _OPEN, _NOTED = 256, 16, 64, 128  # requests, questions, guesses
_FOLLOWED = 1 << 13  # requests: to know which of them continue a chain
_TRUST = 4.0  # how sharply log loss separates members
Name = tuple[int, bytes]


class _Question:
    """`chances`: by name, what each member said (-1: nothing). `came`: those that came true."""

    __slots__ = ("came", "chances", "due_s", "horizon")

    def __init__(self, due_s: float, horizon: int, chances: dict[Name, list[float]]) -> None:
        self.due_s, self.horizon, self.chances = due_s, horizon, chances
        self.came: set[Name] = set()


class Ensemble(Predictor):
    """See the module. `members`: what makes each of them."""

    name = "ensemble"

    def __init__(self, members: Sequence[Callable[[], Predictor]] = (SessionReturn, Markov)) -> None:
        self._make = tuple(members)
        self.members = [make() for make in members]
        shape = (len(members), len(HORIZONS_S), _BINS)
        self._predicted, self._came, self._guessed = (np.zeros(shape) for _ in range(3))
        self._loss = np.zeros((len(members), len(HORIZONS_S), 2))  # sum and guesses
        self._open: list[_Question] = []
        self._awaited: dict[int, dict[bytes, list[_Question]]] = {}  # by tenant and key
        self._due_s = math.inf  # when the first open question is over
        self._sessions = Sessions(_FOLLOWED)
        self._requests = self._asked = 0

    def requested(self, request: Request, now_s: float) -> None:
        if not request.keys:
            return
        if now_s > self._due_s:
            self._close(now_s)
        self._seen(request)
        for member in self.members:
            member.requested(request, now_s)
        self._requests += 1
        if self._requests % (_EVERY if self._requests > 2 * _EVERY else _EVERY_FIRST) == 0 and len(self._open) < _OPEN:
            self._ask(now_s)

    def answered(self, number: int, output_tokens: int, now_s: float) -> None:
        for member in self.members:
            member.answered(number, output_tokens, now_s)

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:
        for member in self.members:
            member.hinted(tenant, key, hint, now_s)

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        gone = None if keys is None else set(keys)
        for member in self.members:
            member.forget(tenant, gone)
        self._sessions.forget(tenant, gone)
        for question in self._open:
            for name in [each for each in question.chances if each[0] == tenant and (gone is None or each[1] in gone)]:
                del question.chances[name]
                question.came.discard(name)
                self._awaited.get(tenant, {}).pop(name[1], None)

    # Questions of its own

    def _seen(self, request: Request) -> None:
        """Which awaited chains the request uses."""
        tenant, keys, sessions = request.tenant, request.keys, self._sessions
        prev, _ = sessions.find(tenant, keys)
        fan, last = 0, None
        if prev >= 0:
            fan, last = sessions.fan_of(prev, keys), sessions.last[prev]
            sessions.drop(prev)
        sessions.take(tenant, keys, fan)
        awaited = self._awaited.get(tenant)
        if awaited:
            came = [key for key in keys if key in awaited]
            if last is not None and last in awaited:
                came.append(last)
            for key in came:
                for question in awaited.pop(key, ()):
                    question.came.add((tenant, key))  # counted when the question closes, as the others are

    def _ask(self, now_s: float) -> None:
        horizon = self._asked % len(HORIZONS_S)
        chances: dict[Name, list[float]] = {}
        for number, member in enumerate(self.members):
            for guess in member.guesses(now_s, HORIZONS_S[horizon], _NOTED):
                said = chances.setdefault((guess.tenant, guess.key), [-1.0] * len(self.members))
                said[number] = guess.probability
        question = _Question(now_s + HORIZONS_S[horizon], horizon, chances)
        for tenant, key in chances:
            self._awaited.setdefault(tenant, {}).setdefault(key, []).append(question)
        self._open.append(question)
        self._due_s = min(self._due_s, question.due_s)
        self._asked += 1
        for column in (self._predicted, self._came, self._guessed, self._loss):
            column[:, horizon] *= _DECAY

    def _close(self, now_s: float) -> None:
        """Count what came, and what did not, of the questions whose horizon is over."""
        for question in [each for each in self._open if each.due_s < now_s]:
            self._open.remove(question)
            for (tenant, key), said in question.chances.items():
                self._score(question.horizon, said, float((tenant, key) in question.came))
                awaited = self._awaited.get(tenant, {})
                left = [each for each in awaited.pop(key, ()) if each is not question]
                if left:
                    awaited[key] = left
        for tenant in [each for each, awaited in self._awaited.items() if not awaited]:
            del self._awaited[tenant]
        self._due_s = min((each.due_s for each in self._open), default=math.inf)

    def _score(self, horizon: int, said: Sequence[float], came: float) -> None:
        for member, chance in enumerate(said):
            if chance < 0.0:
                continue
            sure = float(self._calibrated(member, horizon, np.array([chance]))[0])
            self._loss[member, horizon] += (-math.log(sure if came else 1.0 - sure), 1.0)
            at = int(np.searchsorted(_EDGES, chance, side="right"))
            self._predicted[member, horizon, at] += chance
            self._came[member, horizon, at] += came
            self._guessed[member, horizon, at] += 1.0

    def _calibrated(self, member: int, horizon: int, chances: Floats) -> Floats:
        """What came of guesses like these."""
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
        horizon = int(np.argmin([abs(math.log(max(horizon_s, 1e-3) / each)) for each in HORIZONS_S]))
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
        """Of each member, for the horizon of this number."""
        loss = (self._loss[:, horizon, 0] + _PRIOR * 0.3) / (self._loss[:, horizon, 1] + _PRIOR)
        odds = np.exp(-_TRUST * (loss - loss.min()))
        return [float(each) for each in odds / odds.sum()]

    # Over a restart

    def export_state(self) -> Iterator[Piece]:
        yield "seen", np.stack([self._predicted, self._came, self._guessed])
        yield "loss", self._loss.copy()
        for number, member in enumerate(self.members):
            for name, piece in member.export_state():
                yield f"{number}/{name}", piece

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        seen, loss = state.get("seen"), state.get("loss")
        if seen is None or loss is None or seen.shape != (3, *self._came.shape) or loss.shape != self._loss.shape:
            raise ValueError("the state of another version")
        members = [make() for make in self._make]
        for number, member in enumerate(members):
            own = f"{number}/"
            member.import_state(
                {name[len(own) :]: each for name, each in state.items() if name.startswith(own)}, later_s
            )
        self.members = members
        self._predicted, self._came, self._guessed = seen.copy()
        self._loss = loss.copy()
        self._open.clear()
        self._awaited.clear()
        self._due_s = math.inf
        self._sessions = Sessions(_FOLLOWED)
        self._requests = self._asked = 0


_CENTRES: Floats = (np.concatenate([[0.005], _EDGES]) + np.concatenate([_EDGES, [1.0]])) / 2


def _mixed(said: Sequence[tuple[float, float, Guess]]) -> Guess:
    """One guess of several of the same chain: chances by weight, times of the member that weighs most."""
    if len(said) == 1:
        _, chance, guess = said[0]
    else:
        total = sum(weight for weight, _, _ in said)
        odds = sum(weight * math.log(chance / (1.0 - chance)) for weight, chance, _ in said) / total
        chance = 1.0 / (1.0 + math.exp(-odds))
        guess = max(said, key=lambda each: each[0])[2]
    sure = max(each.confidence for _, _, each in said)
    return Guess(guess.tenant, guess.key, guess.blocks, chance, guess.first_s, guess.due_s, sure)
