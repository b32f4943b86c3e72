"""How many pages of a hit SGLang shall load, by the same choice as other connectors.

HiCache asks, loads and stores in calls that do not name the request, and tells a backend nothing of what the server
computes. Pages tie the calls together: a load that begins with the first page of a question is the answer's, and pages
that are stored just behind what was held or loaded were computed meanwhile. That time counts only if the prompt's pages
came in one call and no other question came in between: else other requests are in it.
Owns that. Asks no daemon. Safe for use by several threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore_client.hooks.load import bounded_wait_s, hit_of
from kvstore_client.restore.choice import Chosen, Hit, LoadChoice
from kvstore_client.results import Lookup

_MOST_QUESTIONS = 64  # that wait for their loads
_FORGOTTEN_S = 30.0  # a request of which nothing was stored by then was cancelled, or its pages are not written


@dataclass(slots=True)
class _Question:
    """Pages of a prompt behind `first` tokens; `loaded` leading ones are in SGLang's host pool, since `since_s`."""

    keys: tuple[str, ...]
    first: int
    hit: Hit
    chosen: Chosen
    since_s: float
    is_alone: bool
    loaded: int = 0


class PageChoice:
    """`choice`: None loads all that is stored. `clock`: seconds."""

    def __init__(
        self,
        choice: LoadChoice | None,
        *,
        page_tokens: int,
        page_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choice = choice
        self._page_tokens, self._page_bytes = page_tokens, page_bytes
        self._clock = clock
        self._questions: dict[str, _Question] = {}  # by their first page
        self._computing: _Question | None = None
        self._lock = threading.Lock()

    def question_s(self, pages: int, prefix_pages: int, longest_s: float) -> float:
        """How long asking for so many pages may take."""
        if self._choice is None:
            return longest_s
        held = prefix_pages * self._page_tokens
        bounded_s = bounded_wait_s(self._choice, held, held + pages * self._page_tokens, longest_s)
        return longest_s if bounded_s is None else bounded_s

    def pages(self, keys: Sequence[str], found: Lookup, prefix_pages: int, usable: int) -> int:
        """How many leading pages to load of those asked for, of which `usable` can be."""
        if self._choice is None or not keys:
            return usable
        held = prefix_pages * self._page_tokens
        tokens = held + len(keys) * self._page_tokens + 1  # HiCache asks for whole pages: the rest is not known here
        hit = hit_of(
            found, 0, usable, block_tokens=self._page_tokens, block_bytes=self._page_bytes, tokens=tokens, held=held
        )
        chosen = self._choice.choose(hit)
        with self._lock:
            now, before = self._clock(), self._computing
            is_alone = before is None or now - before.since_s > _FORGOTTEN_S
            question = _Question(tuple(keys), held, hit, chosen, now, is_alone)
            if before is not None:
                before.is_alone = False
            self._computing = question
            self._questions.pop(keys[0], None)
            if chosen.blocks:
                self._questions[keys[0]] = question
            if len(self._questions) > _MOST_QUESTIONS:
                del self._questions[next(iter(self._questions))]
        return chosen.blocks

    def load_s(self, keys: Sequence[str], longest_s: float) -> float:
        """How long the load of these pages may take."""
        with self._lock:
            question = self._questions.get(keys[0]) if keys else None
        return longest_s if question is None else min(longest_s, question.chosen.deadline_s)

    def loaded(self, keys: Sequence[str], pages: int, seconds: float) -> None:
        """So many leading pages of `keys` are in the host pool, after `seconds`."""
        with self._lock:
            question = self._questions.pop(keys[0], None) if keys else None
            if question is None:
                return
            question.loaded, question.since_s = pages, self._clock()
        # Other ranks may have wanted fewer, and long prefixes come in several loads.
        if self._choice is not None and len(keys) == question.chosen.blocks:
            self._choice.observe_load(question.hit, question.chosen, pages, seconds)

    def stored(self, keys: Sequence[str]) -> None:
        """These pages were computed."""
        with self._lock:
            question = self._computing
            if question is None or not keys or keys[0] not in question.keys:
                return
            self._computing = None
            rest = question.keys[question.loaded :]
            is_whole = bool(rest) and tuple(keys[: len(rest)]) == rest
            seconds = self._clock() - question.since_s
        if self._choice is not None and is_whole and question.is_alone:
            first = question.first + question.loaded * self._page_tokens
            self._choice.observe_compute(first, len(rest) * self._page_tokens, seconds)
