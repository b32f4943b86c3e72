"""The number of pages of a hit that SGLang shall load, by the choice of the other connectors.

HiCache asks, loads and stores in calls that do not name the request, and a backend does not see what the server
computes. Pages tie the calls together: a load that begins with the first page of a question belongs to its answer, and
pages that are stored just behind the held or loaded ones were computed in between. That time counts only if those pages
came in one call and no other prompt was asked for in between; otherwise it includes other requests. A controller may
ask for a long prompt in batches, and stops at the first batch that is not reported whole. So a whole batch, behind
which the prompt may go on, is loaded whole or not at all. The module asks no daemon. Safe for several threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore_client.results import Lookup
from kvstore_connectors.load import bounded_wait_s, hit_of
from kvstore_restore.choice import Chosen, Hit, LoadChoice

_MOST_QUESTIONS = 64  # that wait for their loads
_BATCH_PAGES = 128  # SGLang's STORAGE_BATCH_SIZE
_NEXT_BATCH_S = 0.1  # SGLang asks for it at once
_FORGOTTEN_S = 30.0  # a request of which nothing was stored by then was cancelled, or its pages are not written


@dataclass(frozen=True, slots=True)
class _Question:
    hit: Hit
    chosen: Chosen


@dataclass(slots=True)
class _Prompt:
    """A prompt whose pages follow at least `first` tokens, from one question or several batches. Its first `loaded`
    pages are in SGLang's host pool. `since_s`: the time of the latest question or end of a load. `goes_on`: another
    batch may follow.
    """

    keys: list[str]
    first: int
    since_s: float
    is_alone: bool
    goes_on: bool = False
    loaded: int = 0


class PageChoice:
    """A decider that says, for each hit of SGLang, how many of its stored pages to load. `choice` compares the
    predicted times of loading and computing; if it is None, all stored pages are loaded. A page has `page_tokens`
    tokens and `page_bytes` bytes. `clock` returns seconds.
    """

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
        self._prompt: _Prompt | None = None  # the latest one
        self._lock = threading.Lock()

    def question_s(self, pages: int, prefix: Sequence[str] | None, longest_s: float) -> float:
        """Return the most seconds that the lookup of `pages` pages may take, at most `longest_s`. `prefix` are the
        pages before them, or None if SGLang does not name them.
        """
        if self._choice is None:
            return longest_s
        held = self._held(prefix)
        bounded_s = bounded_wait_s(self._choice, held, held + pages * self._page_tokens, longest_s)
        return longest_s if bounded_s is None else bounded_s

    def pages(self, keys: Sequence[str], found: Lookup, prefix: Sequence[str] | None, usable: int) -> int:
        """Return the number of leading pages of `keys` to load. The lookup `found` says that `usable` of them can be
        loaded. `prefix` are the pages before them, or None if SGLang does not name them.
        """
        if self._choice is None or not keys:
            return usable
        held = self._held(prefix)
        tokens = held + len(keys) * self._page_tokens + 1  # HiCache asks for whole pages: the rest is not known here
        hit = hit_of(
            found, 0, usable, block_tokens=self._page_tokens, block_bytes=self._page_bytes, tokens=tokens, held=held
        )
        may_go_on = usable == len(keys) == _BATCH_PAGES
        chosen = self._choice.choose(hit, all_or_none=may_go_on)
        with self._lock:
            prompt = self._prompt = self._continued(prefix) or self._new_prompt(held)
            prompt.keys += keys
            prompt.since_s, prompt.goes_on = self._clock(), may_go_on and chosen.blocks == usable
            self._questions.pop(keys[0], None)
            if chosen.blocks:
                self._questions[keys[0]] = _Question(hit, chosen)
            if len(self._questions) > _MOST_QUESTIONS:
                del self._questions[next(iter(self._questions))]
        return chosen.blocks

    def load_s(self, keys: Sequence[str], longest_s: float) -> float:
        """Return the most seconds that loading the pages `keys` may take, at most `longest_s`."""
        with self._lock:
            question = self._questions.get(keys[0]) if keys else None
        return longest_s if question is None else min(longest_s, question.chosen.deadline_s)

    def loaded(self, keys: Sequence[str], pages: int, seconds: float) -> None:
        """Note that the first `pages` pages of `keys` were copied to the host pool in `seconds`."""
        if self._choice is None or not keys:
            return
        with self._lock:
            question, prompt = self._questions.pop(keys[0], None), self._prompt
            if prompt is not None and prompt.keys[prompt.loaded : prompt.loaded + 1] == [keys[0]]:
                prompt.loaded += pages
                prompt.since_s, prompt.goes_on = self._clock(), False
        # Other ranks may have wanted fewer, and long prefixes come in several loads.
        if question is not None and len(keys) == question.chosen.blocks:
            self._choice.observe_load(question.hit, question.chosen, pages, seconds)

    def stored(self, keys: Sequence[str], prefix: Sequence[str] | None) -> None:
        """Note that SGLang stores the pages `keys`, which it has computed behind the pages `prefix`. The time since the
        lookup of their prompt is learned as computing time, if nothing else was computed meanwhile. If `prefix` is
        None, the position of the pages is unknown, and nothing is learned.
        """
        with self._lock:
            prompt = self._prompt
            if prompt is None or not keys or keys[0] not in prompt.keys:
                return
            self._prompt = None
            rest = prompt.keys[prompt.loaded :]
            is_whole = bool(rest) and list(keys[: len(rest)]) == rest
            seconds = self._clock() - prompt.since_s
        if self._choice is not None and prefix is not None and is_whole and prompt.is_alone:
            self._choice.observe_compute(len(prefix) * self._page_tokens, len(rest) * self._page_tokens, seconds)

    def _held(self, prefix: Sequence[str] | None) -> int:
        """Return the number of tokens before the pages of a question, at least."""
        if prefix is not None:
            return len(prefix) * self._page_tokens
        with self._lock:
            prompt = self._continued(prefix)
            return 0 if prompt is None else prompt.first + len(prompt.keys) * self._page_tokens

    def _continued(self, prefix: Sequence[str] | None) -> _Prompt | None:
        """Return the prompt whose next batch follows `prefix`; None if there is none. The caller holds the lock."""
        prompt = self._prompt
        if prompt is None or not prompt.goes_on:
            return None
        if prefix is None:
            return prompt if self._clock() - prompt.since_s < _NEXT_BATCH_S else None
        return prompt if list(prefix[-1:]) == prompt.keys[-1:] else None

    def _new_prompt(self, held: int) -> _Prompt:
        before, now = self._prompt, self._clock()
        return _Prompt([], held, now, before is None or now - before.since_s > _FORGOTTEN_S)
