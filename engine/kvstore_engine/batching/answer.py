"""One growing answer: its random numbers, its constraint, its text and stop strings, and the choice of its next token.

The module owns all of an answer except the K/V of its tokens, and the order of a choice: the constraint's mask, then
the sampler. Log probabilities come from a row of the model's logits, unchanged. Plain greedy rows are chosen together,
on the device that holds the logits. The module does not compute or change logits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.constraint import Constraint
from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.errors import UsageError
from kvstore_engine.executors.logits import StepLogits
from kvstore_engine.restore.session import NextStep
from kvstore_engine.sampler import SamplingSettings, TokenSampler
from kvstore_engine.tokenizer.tokenizer import StreamingDetokenizer

Floats = npt.NDArray[np.float32]


class TextSource(Protocol):
    """An object, usually a tokenizer, that turns an answer's tokens into text. `end_ids` are the ids of tokens that end
    a text; `stream` returns a decoder from tokens to text.
    """

    @property
    def end_ids(self) -> frozenset[int]: ...
    def stream(self, special: bool = False, continues: bool = False) -> StreamingDetokenizer: ...


class StopStrings:
    """A search for stop strings in the text of one answer, which arrives in pieces. The stop string that is complete
    first ends the answer; the text before it is shown. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add `text` to the answer. Return the text that can be shown now, and True if a stop string is complete. The
        text that is shown never contains a stop string or the beginning of one.
        """
        if not self._stops:
            return text, False
        buffer = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            self._held = ""
            return buffer[: min(found)[1]], True
        keep = max(self._overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def finish(self) -> str:
        """Return the text that was held back, for an answer that has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest end of `text` that begins `stop`."""
        most = min(len(text), len(stop) - 1)
        return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)


class Answer:
    """One answer to a request while its tokens are generated: its sampler, constraint, text and stop strings. `index`
    numbers the answers of a request from 0. `is_plain` is True if the next token is always the likeliest one. Raises
    UsageError if the request's constraint (such as a grammar) cannot be made.
    """

    def __init__(self, settings: RequestSettings, index: int, tokenizer: TextSource) -> None:
        self.sampler = TokenSampler(_own_seed(settings.sampling, index))
        self.constraint = _made(settings.constraint) if settings.constraint is not None else None
        self.is_plain = settings.sampling.is_greedy and self.constraint is None
        self.end_ids = frozenset[int]() if settings.ignore_end else tokenizer.end_ids
        self._stream = tokenizer.stream(continues=True)
        self._stops = StopStrings(settings.stop)
        self._is_stopped = False
        self._next_step = settings.next_step
        self._tokens: list[int] = []  # where `next_step` needs them

    def push(self, token: int) -> tuple[str, bool]:
        """Add the token with the id `token` to the answer. Return the text that can be shown now, and True if a stop
        string or the constraint (such as a grammar) ends the answer here. Raises the errors of the constraint, and of a
        tokenizer that does not know the id.
        """
        if self._next_step is not None:
            self._tokens.append(token)
        shown, self._is_stopped = self._stops.push(self._stream.push(token))
        if self.constraint is None:
            return shown, self._is_stopped
        self.constraint.accept(token)
        return shown, self._is_stopped or self.constraint.finished

    @property
    def next_step(self) -> Callable[[], NextStep | None] | None:
        """A function that says which request of the conversation will follow this answer, if the answer ended by
        itself. It is None if the request did not give one.
        """
        return None if self._next_step is None else partial(self._next_step, self._tokens)

    def finish(self) -> str:
        """Return the text that was held back until the answer's last token. It is empty if a stop string or the
        constraint ended the answer.
        """
        if self._is_stopped:
            return ""
        shown, stopped = self._stops.push(self._stream.finish())
        return shown if stopped else shown + self._stops.finish()


def _made(make: Callable[[], Constraint]) -> Constraint:
    try:
        return make()
    except Exception as error:  # of any kind, since the caller made it
        raise UsageError(f"the constraint cannot be made: {error or type(error).__name__}") from error


def _own_seed(sampling: SamplingSettings, index: int) -> SamplingSettings:
    """Return the settings with the answer's seed: the first answer is drawn as with n = 1; the others independently of
    it and of each other.
    """
    if index == 0 or sampling.seed is None:
        return sampling
    return replace(sampling, seed=int(np.random.SeedSequence([sampling.seed, index]).generate_state(1, np.uint64)[0]))


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """The id of an answer's next token, or the reason why none could be chosen (`failure`). `is_unsound` is True if the
    logits were not finite; then the K/V from which they were computed must not be shared with other answers.
    """

    token: int
    failure: str = ""
    is_unsound: bool = False


def choose(logits: StepLogits, answers: Mapping[int, Answer], whole: Mapping[int, Floats]) -> dict[int, ChosenToken]:
    """Choose the next token of each answer. `answers` has each answer by the number of its row in `logits`; the result
    has the chosen tokens by the same numbers. `whole` has complete rows of logits, float32 [vocabulary], by row number:
    at least the row of each answer that does not simply take the likeliest token.
    """
    choices: dict[int, ChosenToken] = {}
    plain = [row for row, answer in answers.items() if answer.is_plain]
    if plain:
        for row, token, value in zip(plain, *logits.likeliest(plain), strict=True):
            choices[row] = ChosenToken(token) if math.isfinite(value) else _unsound(value)
    return choices | {row: choose_one(whole[row], answer) for row, answer in answers.items() if row not in choices}


def log_probabilities(logits: Floats, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log probability of the token `token`, and the `count` likeliest tokens as pairs of id and log
    probability, likeliest first, equal ones by id. `logits` are the row to compute them from, float32 [vocabulary].
    """
    row = logits.astype(np.float64) - _log_of_sum(logits)
    top: list[int] = []
    if count:
        threshold = np.partition(row, len(row) - count)[len(row) - count] if count < len(row) else -math.inf
        candidates = np.flatnonzero(row >= threshold)
        top = candidates[np.argsort(-row[candidates], kind="stable")][:count].tolist()
    return float(row[token]), tuple((other, float(row[other])) for other in top)


def _log_of_sum(logits: Floats) -> float:
    """Return log(sum(exp(logits))). It is not finite if the logits are not."""
    most = float(logits.max())
    if not math.isfinite(most):
        return most
    return most + math.log(float(np.exp(logits.astype(np.float64) - most).sum()))


def _unsound(value: float) -> ChosenToken:
    return ChosenToken(0, f"the model produced logits that cannot be sampled: {value}", is_unsound=True)


def choose_one(row: Floats, answer: Answer) -> ChosenToken:
    """Choose the next token of `answer` from its row of logits, float32 [vocabulary]: the constraint removes tokens,
    then the sampler draws one. An error is not raised; it becomes the `failure` of the result.
    """
    most = float(row.max())  # NaN if there is one anywhere
    if not math.isfinite(most):
        return _unsound(most)
    try:
        mask = answer.constraint.mask() if answer.constraint is not None else None
        if mask is not None:
            row = _masked(row, mask)
            if not np.isfinite(row.max()):
                return ChosenToken(0, "the constraint allows no token that the model has")
        token = answer.sampler.choose(row)
    except Exception as error:  # from a constraint: the other answers go on
        return ChosenToken(0, str(error) or type(error).__name__)
    return ChosenToken(token)


def _masked(row: Floats, mask: npt.NDArray[np.uint32]) -> Floats:
    """Return `row` with minus infinity for each token without a bit in `mask`; tokens past the mask are not allowed."""
    bits = np.unpackbits(np.ascontiguousarray(mask, "<u4").view(np.uint8), bitorder="little", count=None)
    allowed = np.zeros(len(row), np.bool_)
    known = min(len(row), len(bits))
    allowed[:known] = bits[:known]
    masked: Floats = np.where(allowed, row, np.float32(-np.inf))
    return masked
