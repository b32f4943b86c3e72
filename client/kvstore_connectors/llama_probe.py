"""The real content of a `Llama`'s saved state, found at opening by computing a few fixed tokens.

llama.cpp's state says neither how K and V are rotated before they are stored (it multiplies quantised ones by a
Hadamard matrix, unless an environment variable says otherwise) nor which library made them. So this module makes a
sketch of K and V for the fingerprint, and tests whether restored blocks give the answers of the whole prompt. The
sketch holds signs of sums. Rounding and the numbers of threads and of tokens in a batch do not change it, since
attention over more than one token has no part in it. Another rotation, order or position changes half of its bits.

The module also records the leading positions whose tokens a `Llama` evaluated itself, or had restored: only their K and
V may be stored as belonging to these tokens. A `Llama` keeps ids beside the K/V cache, and other calls move its
position without writing ids: an image's chunk, a loaded state, a shift. Invariant of the record: `count` positions from
0 on hold K and V of exactly `ids`; any other event lowers `count`. Limit: direct calls of llama.cpp's C functions are
seen only if they shorten the sequence.

Of recurrent layers it keeps the state at the last boundaries between blocks: a prompt is evaluated in two parts.

The sketch costs 16 tokens and the test 160 more (with 64 tokens a block). The model's own state is unchanged
afterwards.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvstore_connectors.llama_state import SavedState, StateUnsupported, assemble_state, parse_state, plane_values

SKETCH_TOKENS = 16
COMPUTED_TOKENS = 16
_SIGNS = 16  # of each sum
_TOLERANCE = 0.3  # of logits, relative to their spread: two splits into passes round otherwise

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
_RECORD = "kvstore_evaluated"
_RECURRENT_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_STATE_HEAD_BYTES = 20
_KEPT_STATES = 2  # of the prompt's last boundary, and of the answer's
_FORGETTING = ("kv_cache_clear", "kv_cache_seq_cp", "kv_cache_seq_keep", "kv_cache_seq_shift", "set_state_data")


def probed_state(llm: llama_cpp.Llama) -> SavedState:
    """Compute a fixed short prompt with `llm` and return the saved state, for `sketch`. The model's own state is
    unchanged afterwards. Raises StateUnsupported if blocks cannot be cut from the state.
    """
    with _borrowed(llm):
        llm.eval(_tokens(llm, min(SKETCH_TOKENS, int(llm.n_ctx()))))
        return parsed(llm, llm.save_state().llama_state)


def parsed(llm: llama_cpp.Llama, data: bytes) -> SavedState:
    """Take a saved state of `llm` apart. Raises StateUnsupported."""
    model = llm._model.model
    is_pure = bool(llama_cpp.llama_model_is_recurrent(model))
    return parse_state(data, attends=not is_pure, recurs=is_pure or bool(llama_cpp.llama_model_is_hybrid(model)))


def sketch(state: SavedState) -> str:
    """Return a short text that sums up the numbers of K and V in a probed state: the first layer's for all tokens, and
    all layers' for the first token; and of recurrent layers. Models that compute other numbers get another text.
    """
    tokens, sums = len(state.positions), list[str]()
    if state.recurrent is not None:
        numbers = state.recurrent[: len(state.recurrent) // 4 * 4].copy().view("<f4").astype(np.float32)
        sums.append(_signs(np.clip(np.nan_to_num(numbers), -1e6, 1e6)))
    if not state.regions:
        return "".join(sums)
    planes = state.shape.planes
    step = 2 if state.shape.values else 1
    for kind in range(step):
        regions = list(zip(planes[kind::step], state.regions[kind::step], strict=True))
        first = plane_values(*regions[0], tokens)
        every = np.concatenate([_normed(plane_values(plane, region, tokens)[0]) for plane, region in regions])
        sums += [_signs(first.reshape(-1)), _signs(every)]
    return "".join(sums)


def why_not_restorable(llm: llama_cpp.Llama, block_tokens: int) -> str:
    """Compute a test prompt with `llm` twice: completely, and from a restored block of `block_tokens` tokens. If the
    answers differ, return a sentence that says so. Return "" if they agree, or if the context is too small for the
    test.
    """
    if llm.n_ctx() < block_tokens + COMPUTED_TOKENS:
        return ""
    tokens = _tokens(llm, block_tokens + COMPUTED_TOKENS)
    with _borrowed(llm):
        llm.eval(tokens)
        expected = _logits(llm)
        _empty(llm)
        llm.eval(tokens[:block_tokens])
        saved = parsed(llm, llm.save_state().llama_state)
        if saved.regions and not saved.holds(block_tokens):
            raise StateUnsupported("its cells are not those of the tokens, in order")
        payload = np.zeros(saved.shape.token_bytes * block_tokens, np.uint8)
        saved.write_block(0, block_tokens, payload)
        window, recurrent = [], None if saved.recurrent is None else (block_tokens, saved.recurrent)
        if saved.window is not None:
            window = [np.zeros(saved.window.shape.token_bytes * block_tokens, np.uint8)]
            saved.window.write_block(0, block_tokens, window[0])
        _empty(llm)
        if not take_state(llm, assemble_state(saved.shape, [payload], block_tokens, window, recurrent)):
            return "llama.cpp does not take back the state that it gave"
        llm.n_tokens = block_tokens
        llm.eval(tokens[block_tokens:])
        answered = _logits(llm)
    spread = float(np.linalg.norm(expected - expected.mean()))
    difference = float(np.linalg.norm(answered - expected)) / max(spread, 1e-9)
    if difference <= _TOLERANCE:  # not so where it is no number
        return ""
    return f"it answers from a restored block otherwise than from the whole prompt (logits differ by {difference:.0%})"


def take_state(llm: llama_cpp.Llama, state: npt.NDArray[np.uint8]) -> bool:
    """Make the saved `state` the content of the context of `llm`. Return False if llama.cpp does not accept it."""
    buffer = (ctypes.c_uint8 * len(state)).from_buffer(state.data)
    return bool(llama_cpp.llama_state_set_data(llm._ctx.ctx, buffer, len(state)) == len(state))


def window_of(llm: llama_cpp.Llama) -> int:
    """Return how many positions the windowed layers of a model see, their own included; 0 if it has none."""
    return max(int(llama_cpp.llama_model_n_swa(llm._model.model)), 0)


def may_cut(llm: llama_cpp.Llama, position: int) -> bool:
    """Return whether `llm` can go on at `position`, once what is behind it is removed: nothing if it has recurrent
    layers; and the window before it must be there. llama.cpp removes it without, and says that all is well.
    """
    if llm._is_recurrent or llm._is_hybrid:
        return bool(position == llm.n_tokens)
    return _may_cut(llm._ctx.ctx, window_of(llm), position)


def _may_cut(context: Any, window: int, position: int) -> bool:
    oldest = llama_cpp.llama_memory_seq_pos_min(llama_cpp.llama_get_memory(context), 0)
    return not window or oldest <= max(position - window + 1, 0)


def recurrent_state(llm: llama_cpp.Llama) -> bytes:
    """Return the state of the recurrent layers of `llm`, without K and V of its attention, as `SavedState.recurrent`.
    Raises StateUnsupported if llama.cpp gives it in another form.
    """
    context, only = llm._ctx.ctx, _RECURRENT_ONLY
    size = llama_cpp.llama_state_seq_get_size_ext(context, 0, only)
    buffer = (ctypes.c_uint8 * size)()
    data = bytes(buffer[: llama_cpp.llama_state_seq_get_data_ext(context, buffer, size, 0, only)])
    head = struct.unpack_from("<IIIiI", data) if len(data) > _STATE_HEAD_BYTES else ()
    if head[2:] != (1, llm.n_tokens - 1, 0):  # a cell, its position, no sequences behind the one asked for
        raise StateUnsupported("its recurrent layers do not keep one state of one sequence")
    return data[_STATE_HEAD_BYTES:]


@contextmanager
def _borrowed(llm: llama_cpp.Llama) -> Iterator[None]:
    """Yield the model, emptied; afterwards it holds its former state again."""
    kept = llm.save_state() if llm.n_tokens else None
    ids = llm.input_ids.copy()
    _empty(llm)
    try:
        yield
    finally:
        _empty(llm)
        llm.input_ids[:] = ids
        if kept is not None and take_state(llm, np.frombuffer(bytearray(kept.llama_state), np.uint8)):
            llm.n_tokens = kept.n_tokens
            watch(llm).restored(seen_in(kept))


def _empty(llm: llama_cpp.Llama) -> None:
    llm.reset()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm._ctx.ctx), True)


def _tokens(llm: llama_cpp.Llama, count: int) -> list[int]:
    return [(position * 7919 + 11) % int(llm.n_vocab()) for position in range(count)]


def _logits(llm: llama_cpp.Llama) -> Floats:
    """Return a copy of the logits behind the last token."""
    pointer = llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(int(llm.n_vocab()),)).astype(np.float32)


def _normed(values: Floats) -> Floats:
    return values / np.float32(max(float(np.linalg.norm(values)), 1e-9))


def _signs(values: Floats) -> str:
    """Return the signs of a few sums of `values`, each sum with its own signs for the numbers, as hexadecimal
    digits.
    """
    numbers = np.arange(len(values), dtype=np.uint64) + np.uint64(1)
    bits = 0
    with np.errstate(over="ignore"):
        mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    exact = np.nan_to_num(values.astype(np.float64))
    for bit in range(_SIGNS):
        chosen = (mixed >> np.uint64(bit)) & np.uint64(1) == 1
        bits = bits << 1 | int(exact[chosen].sum() > exact[~chosen].sum())
    return f"{bits:0{_SIGNS // 4}x}"


class Evaluated:
    """A record of the leading tokens that one `Llama` is known to hold. `positions` is the size of the context;
    `ids[:count]` are the tokens.
    """

    def __init__(self, positions: int) -> None:
        self.ids: Ids = np.zeros(positions, np.int32)
        self.count = 0
        self.is_evaluating = False
        self.block_tokens = 0  # recurrent layers: their state is kept at the last boundaries between blocks
        self.states = dict[int, bytes]()  # by position

    def seen(self) -> Ids:
        """Return a copy of the leading tokens that the model is known to hold, as int32."""
        return self.ids[: self.count].copy()

    def cut(self, position: int) -> None:
        """Forget the recorded tokens at `position` and behind it."""
        self.count = max(0, min(self.count, position))
        self.states = {at: state for at, state in self.states.items() if at <= self.count}

    def restored(self, tokens: Sequence[int] | Ids) -> None:
        """Record that the model holds exactly `tokens`, restored as a whole."""
        self.states = {}
        self.count = min(len(tokens), len(self.ids))
        self.ids[: self.count] = tokens[: self.count]

    def evaluated(self, first: int, tokens: Sequence[int]) -> None:
        """Record that the library computed `tokens` at the positions from `first` on. It counts only if the tokens
        before them are recorded.
        """
        if first > self.count:  # something else is before them
            return
        end = min(first + len(tokens), len(self.ids))
        self.ids[first:end] = tokens[: end - first]
        self.count = end

    def parts(self, first: int, tokens: Sequence[int]) -> list[Sequence[int]]:
        """Return `tokens`, to be evaluated from position `first` on, cut at the last boundary before their end."""
        if not self.block_tokens:
            return [tokens]
        boundary = (first + len(tokens) - 1) // self.block_tokens * self.block_tokens
        return [tokens[: boundary - first], tokens[boundary - first :]] if boundary > first else [tokens]

    def keep(self, llm: llama_cpp.Llama) -> None:
        """Keep the state of recurrent layers if `llm` is at a boundary between blocks."""
        if self.block_tokens and self.count and self.count == llm.n_tokens and self.count % self.block_tokens == 0:
            self.states[self.count] = recurrent_state(llm)
            for position in sorted(self.states)[:-_KEPT_STATES]:
                del self.states[position]

    def check(self, llm: llama_cpp.Llama) -> None:
        """Forget all recorded tokens if the memory of `llm` holds fewer positions than the library counts."""
        memory = llama_cpp.llama_get_memory(llm._ctx.ctx)
        if llama_cpp.llama_memory_seq_pos_max(memory, 0) + 1 < llm.n_tokens:
            self.cut(0)


def watch(llm: llama_cpp.Llama) -> Evaluated:
    """Return the record of the tokens that `llm` holds, which follows its calls from now on. The first call makes the
    record; tokens that the model held before are not in it.
    """
    record = llm.__dict__.get(_RECORD)
    if not isinstance(record, Evaluated):
        record = llm.__dict__[_RECORD] = Evaluated(int(llm.n_ctx()))
        position = llm.__dict__.pop("n_tokens")
        llm.__class__ = _watched(type(llm), record)
        llm.n_tokens = position
        llm._ctx.__class__ = _watched_context(type(llm._ctx), record, window_of(llm))
    return record


def seen_in(state: Any) -> Ids:
    """Return the leading tokens that the model was known to hold when `state` was saved. The array is empty if the
    `Llama` was not watched.
    """
    seen = getattr(state, "kvstore_seen", None)
    return seen if isinstance(seen, np.ndarray) else np.zeros(0, np.int32)


def _watched(kind: type, record: Evaluated) -> type:
    """Return a subclass of `kind`, for one `Llama`, that keeps `record`."""

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
            for part in record.parts(self.n_tokens, tokens):
                first, record.is_evaluating = self.n_tokens, True
                record.cut(first)
                try:
                    super().eval(part)
                finally:
                    record.is_evaluating = False
                    record.evaluated(first, part[: max(self.n_tokens - first, 0)])
                record.keep(self)

        def save_state(self) -> Any:
            record.check(self)
            state = super().save_state()
            state.kvstore_seen, state.kvstore_states = record.seen(), dict(record.states)
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


def _watched_context(kind: type, record: Evaluated, window: int) -> type:
    """Return a subclass of `kind`, for one context, that notes in `record` the changes made outside `Llama.eval`, and
    refuses to cut the sequence where the layers with a window of `window` tokens could not go on.
    """

    class WatchedContext(kind):  # type: ignore[misc,valid-type]
        def decode(self, *args: Any, **kwargs: Any) -> Any:
            if not record.is_evaluating:
                record.cut(0)
            return super().decode(*args, **kwargs)

        def kv_cache_seq_rm(self, sequence: int, begin: int, end: int) -> Any:
            if begin > 0 and not _may_cut(self.ctx, window, begin):
                return False  # as for a recurrent model: the caller computes the prompt again
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
