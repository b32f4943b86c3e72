"""What a `Llama` really writes into its saved state, found out at opening by computing a few fixed tokens.

llama.cpp says in its state neither how K and V are turned before they are stored (it multiplies quantised ones by a
Hadamard matrix, unless an environment variable says otherwise) nor by which library they were made. Owns two answers: a
sketch of K and V for the fingerprint, and whether blocks that are restored answer as the whole prompt does. The sketch
is of signs of sums. Rounding does not reach it, nor do the numbers of threads and of tokens a batch: attention over
more than one token has no part in it. Another rotation, order or position changes half of its bits.
Costs 16 tokens for the sketch and 160 more (with 64 tokens a block) for the test. Never does: leave the model otherwise
than it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvstore_connectors.llama_evaluated import seen_in, watch
from kvstore_connectors.llama_state import SavedState, StateUnsupported, assemble_state, parse_state
from kvstore_connectors.llama_values import plane_values

SKETCH_TOKENS = 16
COMPUTED_TOKENS = 16
_SIGNS = 16  # of each sum
_TOLERANCE = 0.3  # of logits, relative to their spread: two splits into passes round otherwise

Floats = npt.NDArray[np.float32]


def probed_state(llm: llama_cpp.Llama) -> SavedState:
    """Return the state of the first probe tokens. Raises StateUnsupported where blocks cannot be cut from it."""
    with _borrowed(llm):
        llm.eval(_tokens(llm, min(SKETCH_TOKENS, int(llm.n_ctx()))))
        return parse_state(llm.save_state().llama_state)


def sketch(state: SavedState) -> str:
    """Return a sketch of K and V of a probed state: the first layer's of all tokens, and all layers' of the first."""
    tokens, sums = len(state.positions), []
    planes = state.shape.planes
    step = 2 if state.shape.values else 1
    for kind in range(step):
        regions = list(zip(planes[kind::step], state.regions[kind::step], strict=True))
        first = plane_values(*regions[0], tokens)
        every = np.concatenate([_normed(plane_values(plane, region, tokens)[0]) for plane, region in regions])
        sums += [_signs(first.reshape(-1)), _signs(every)]
    return "".join(sums)


def why_not_restorable(llm: llama_cpp.Llama, block_tokens: int) -> str:
    """Return why `llm` does not answer from a restored block as from the whole prompt; empty if it does, or if its
    context has no room for a block and what follows."""
    if llm.n_ctx() < block_tokens + COMPUTED_TOKENS:
        return ""
    tokens = _tokens(llm, block_tokens + COMPUTED_TOKENS)
    with _borrowed(llm):
        llm.eval(tokens)
        expected = _logits(llm)
        _empty(llm)
        llm.eval(tokens[:block_tokens])
        saved = parse_state(llm.save_state().llama_state)
        if not saved.holds(block_tokens):
            raise StateUnsupported("its cells are not those of the tokens, in order")
        payload = np.zeros(saved.shape.token_bytes * block_tokens, np.uint8)
        saved.write_block(0, block_tokens, payload)
        _empty(llm)
        if not take_state(llm, assemble_state(saved.shape, [payload], block_tokens)):
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
    """Make `state` what the context of `llm` holds: whether llama.cpp accepts it."""
    buffer = (ctypes.c_uint8 * len(state)).from_buffer(state.data)
    return bool(llama_cpp.llama_state_set_data(llm._ctx.ctx, buffer, len(state)) == len(state))


@contextmanager
def _borrowed(llm: llama_cpp.Llama) -> Iterator[None]:
    """The model, empty; afterwards it holds what it held."""
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
    """Return the signs of some sums of `values`, each with signs of its own for the numbers, as hexadecimal digits."""
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
