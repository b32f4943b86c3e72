"""Which tokens a `Llama` evaluated itself: only those have K and V that a block may claim to be of them.

A `Llama` keeps ids beside the K/V cache, and others move its position without writing ids: an image's chunk, a loaded
state, a shift. Owns the record of leading positions whose tokens were seen in `eval`, or restored, and the hooks on one
`Llama` and its context, by which it is kept. Never does: change what the library does.
Invariant: `count` positions from 0 on hold K and V of exactly `ids`; anything else that happens lowers `count`.
Bound: calls of llama.cpp's C functions with the context itself are seen only where they shorten the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
_RECORD = "kvstore_evaluated"
_FORGETTING = ("kv_cache_clear", "kv_cache_seq_cp", "kv_cache_seq_keep", "kv_cache_seq_shift", "set_state_data")


class Evaluated:
    """The record of one `Llama`."""

    def __init__(self, positions: int) -> None:
        self.ids: Ids = np.zeros(positions, np.int32)
        self.count = 0
        self.is_evaluating = False

    def seen(self) -> Ids:
        """Return a copy of the leading tokens that were seen."""
        return self.ids[: self.count].copy()

    def cut(self, position: int) -> None:
        """Forget the tokens at `position` and behind it."""
        self.count = max(0, min(self.count, position))

    def restored(self, tokens: Sequence[int] | Ids) -> None:
        """The model holds exactly `tokens`, put there whole."""
        self.count = min(len(tokens), len(self.ids))
        self.ids[: self.count] = tokens[: self.count]

    def evaluated(self, first: int, tokens: Sequence[int]) -> None:
        """The library evaluated `tokens` from position `first` on."""
        if first > self.count:  # something else is before them
            return
        end = min(first + len(tokens), len(self.ids))
        self.ids[first:end] = tokens[: end - first]
        self.count = end

    def check(self, llm: llama_cpp.Llama) -> None:
        """Forget all where the memory of `llm` holds fewer positions than the library counts."""
        memory = llama_cpp.llama_get_memory(llm._ctx.ctx)
        if llama_cpp.llama_memory_seq_pos_max(memory, 0) + 1 < llm.n_tokens:
            self.cut(0)


def watch(llm: llama_cpp.Llama) -> Evaluated:
    """Return the record of `llm`, which begins with the first call: what it holds by then was not seen."""
    record = llm.__dict__.get(_RECORD)
    if not isinstance(record, Evaluated):
        record = llm.__dict__[_RECORD] = Evaluated(int(llm.n_ctx()))
        position = llm.__dict__.pop("n_tokens")
        llm.__class__ = _watched(type(llm), record)
        llm.n_tokens = position
        llm._ctx.__class__ = _watched_context(type(llm._ctx), record)
    return record


def seen_in(state: Any) -> Ids:
    """Return the leading tokens of a saved state that its `Llama` had evaluated: none if it was not watched."""
    seen = getattr(state, "kvstore_seen", None)
    return seen if isinstance(seen, np.ndarray) else np.zeros(0, np.int32)


def _watched(kind: type, record: Evaluated) -> type:
    """Return the class of one `Llama`, a subclass of its own that keeps `record`."""

    class Watched(kind):  # type: ignore[misc,valid-type]
        @property
        def n_tokens(self) -> int:
            return int(self.__dict__["_position"])

        @n_tokens.setter
        def n_tokens(self, position: int) -> None:
            self.__dict__["_position"] = int(position)
            if not record.is_evaluating:
                record.cut(int(position))

        def eval(self, tokens: Sequence[int]) -> None:
            record.check(self)
            first, record.is_evaluating = self.n_tokens, True
            record.cut(first)
            try:
                super().eval(tokens)
            finally:
                record.is_evaluating = False
                record.evaluated(first, tokens[: max(self.n_tokens - first, 0)])

        def save_state(self) -> Any:
            record.check(self)
            state = super().save_state()
            state.kvstore_seen = record.seen()
            return state

        def load_state(self, state: Any) -> None:
            record.cut(0)
            super().load_state(state)
            record.restored(seen_in(state))

        def embed(self, *args: Any, **kwargs: Any) -> Any:
            record.cut(0)
            return super().embed(*args, **kwargs)

        def __reduce__(self) -> Any:  # a copy is of the class that the user knows, and not watched
            return kind.__new__, (kind,), self.__getstate__()

    Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Watched


def _watched_context(kind: type, record: Evaluated) -> type:
    """Return the class of one context, which notes in `record` what is done to it beside `Llama.eval`."""

    class WatchedContext(kind):  # type: ignore[misc,valid-type]
        def decode(self, *args: Any, **kwargs: Any) -> Any:
            if not record.is_evaluating:
                record.cut(0)
            return super().decode(*args, **kwargs)

        def kv_cache_seq_rm(self, sequence: int, begin: int, end: int) -> Any:
            record.cut(max(begin, 0))
            return super().kv_cache_seq_rm(sequence, begin, end)

    def forgetting(name: str) -> Any:
        original = getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            record.cut(0)
            return original(self, *args, **kwargs)

        return call

    for name in _FORGETTING:
        if hasattr(kind, name):
            setattr(WatchedContext, name, forgetting(name))
    return WatchedContext
