"""Beam search over one request's answers: which beams go on, which have ended, and when the search is done.

Pure: log probabilities in, branches out. It never sees blocks or texts.

At each step the likeliest continuations of all beams, by the sum of their log probabilities, are looked at in order.
One by an end token makes a finished hypothesis if it is among the first `width`; of the others the first `width` go on.
Enough are looked at, `(1 + end tokens) * width` and at least `2 * width`, that `width` always remain.
Hypotheses are ranked by  sum of log probabilities / length ** length_penalty  and the best `width` are kept; length
counts the generated tokens, the end token among them. This is Hugging Face's definition (transformers,
`BeamHypotheses` and `BeamSearchScorer`), and so are the three ways to stop early, which vLLM took over for its
`use_beam_search`; vLLM's later rewrite never stops early and counts the prompt in the length. The penalty is a plainer
form of that of Wu et al., "Google's Neural Machine Translation System" (2016).

Open-ended text becomes repetitive (Holtzman et al., "The Curious Case of Neural Text
Degeneration", 2020).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.request import BeamSettings
from kvstore_engine.batching.token_choice import UNSOUND, log_of_sum

Floats = npt.NDArray[np.float32]


class UnsoundLogits(RuntimeError):
    """The model produced logits from which no beam can go on."""


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One token of a beam, after those of `before`, which beams share. `top` as in `events.Token`."""

    before: "Link | None"
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def path(self) -> list["Link"]:
        """From the first token to this one."""
        links: list[Link] = []
        link: Link | None = self
        while link is not None:
            links.append(link)
            link = link.before
        return links[::-1]


@dataclass(frozen=True, slots=True)
class Branch:
    """A beam after a step: `parent` is the number of the beam it continues, `logprob` the sum so far."""

    parent: int
    logprob: float
    last: Link


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer. `last` is its last token, without the end token; None if there is no other."""

    score: float
    logprob: float
    last: Link | None
    reason: Literal["end", "length"]

    def links(self) -> list[Link]:
        return self.last.path() if self.last is not None else []


class BeamSearch:
    """The search of one request: at most `most_tokens` tokens, `end_ids` end an answer, `tops` log probabilities are
    kept of each step.
    """

    def __init__(self, settings: BeamSettings, end_ids: frozenset[int], most_tokens: int, tops: int = 0) -> None:
        self._settings = settings
        self.width = settings.width
        self._end_ids, self._most_tokens, self._tops = end_ids, most_tokens, tops
        self._length = 0
        self._beams: list[Branch | None] = [None]  # before the first token
        self.hypotheses: list[Hypothesis] = []  # the best first
        self.is_done = False

    def advance(self, rows: Floats) -> list[Branch]:
        """Continue by one token. `rows`: logits float32 [beams, vocabulary], in the order of the last call's branches.

        Returns the remaining beams, the likeliest first; none once the search is done. UnsoundLogits if no beam can go
        on.
        """
        assert len(rows) == len(self._beams) and not self.is_done
        self._length += 1
        count = max(2, 1 + len(self._end_ids)) * self.width
        found = sorted(self._continuations(rows, count), key=lambda each: (-each[0], each[1], each[2].token))
        if not found:
            raise UnsoundLogits("the model allows no token")
        going: list[Branch] = []
        for rank, (logprob, parent, link) in enumerate(found[:count]):
            if link.token in self._end_ids:
                if rank < self.width:
                    self._finish(logprob, link.before, "end")
            elif len(going) < self.width:
                going.append(Branch(parent, logprob, link))
        if not going or self._is_decided(going[0].logprob):
            self.is_done = True
        elif self._length == self._most_tokens:
            for branch in going:
                self._finish(branch.logprob, branch.last, "length")
            self.is_done = True
        self._beams = [] if self.is_done else list(going)
        return [] if self.is_done else going

    def _continuations(self, rows: Floats, count: int) -> Iterator[tuple[float, int, Link]]:
        """The `count` likeliest of each beam, with their sums."""
        for number, (beam, row) in enumerate(zip(self._beams, rows, strict=True)):
            before, so_far = (None, 0.0) if beam is None else (beam.last, beam.logprob)
            likeliest = _likeliest(row, max(count, self._tops))
            top = tuple(likeliest[: self._tops])
            for token, logprob in likeliest[:count]:
                yield so_far + logprob, number, Link(before, token, logprob, top)

    def _finish(self, logprob: float, last: Link | None, reason: Literal["end", "length"]) -> None:
        hypothesis = Hypothesis(self._scored(logprob, self._length), logprob, last, reason)
        ranked = sorted([*self.hypotheses, hypothesis], key=lambda each: -each.score)  # stable: the earlier first
        self.hypotheses = ranked[: self.width]

    def _scored(self, logprob: float, length: int) -> float:
        scale: float = float(length) ** self._settings.length_penalty
        return logprob / scale

    def _is_decided(self, best: float) -> bool:
        """By `early_stopping`; `best` is the sum of the likeliest remaining beam."""
        if len(self.hypotheses) < self.width:
            return False
        stopping = self._settings.early_stopping
        if stopping is True:
            return True
        is_longer_better = stopping == "never" and self._settings.length_penalty > 0
        length = self._most_tokens if is_longer_better else self._length
        return self.hypotheses[-1].score >= self._scored(best, length)


def _likeliest(row: Floats, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest possible tokens, with their log probabilities; ties by id."""
    total = log_of_sum(row)
    if not math.isfinite(total):
        raise UnsoundLogits(UNSOUND.format(total))
    candidates = np.arange(len(row))
    if count < len(row):
        threshold = np.partition(row, len(row) - count)[len(row) - count]
        candidates = np.flatnonzero(row >= threshold)
    order = candidates[np.argsort(-row[candidates], kind="stable")][:count]
    values = row[order].astype(np.float64) - total
    return [(token, value) for token, value in zip(order.tolist(), values.tolist(), strict=True) if value > -math.inf]
