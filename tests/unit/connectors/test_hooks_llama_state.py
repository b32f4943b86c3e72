"""llama.cpp's saved state: blocks cut from it and joined again give the same bytes; what is not known is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_connectors.llama_state import StateUnsupported, assemble_state, parse_state
from tests.reference.llama_saved_state import SavedLayers, saved_state

BLOCK = 4


@given(
    layers=st.integers(1, 3),
    blocks=st.integers(1, 4),
    transposed=st.booleans(),
    values=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_what_is_cut_and_joined_is_the_same_state(
    layers: int, blocks: int, transposed: bool, values: bool, seed: int
) -> None:
    form = SavedLayers(layers, transposed=transposed, has_values=values)
    data = saved_state(form, blocks * BLOCK, seed)
    state = parse_state(data)
    assert state.holds(blocks * BLOCK) and not state.holds(blocks * BLOCK + 1)
    payloads = [np.empty(state.shape.token_bytes * BLOCK, np.uint8) for _ in range(blocks)]
    for block, payload in enumerate(payloads):
        state.write_block(block * BLOCK, BLOCK, payload)
    assert assemble_state(state.shape, payloads, BLOCK).tobytes() == data


@given(transposed=st.booleans(), oldest=st.integers(0, 9), seed=st.integers(0, 100))
def test_windowed_layers_are_a_ring_of_their_own(transposed: bool, oldest: int, seed: int) -> None:
    """Their cells are in any order, and the oldest are gone: blocks that are whole are the ones of all tokens."""
    form, tokens = SavedLayers(2, transposed=transposed), 5 * BLOCK + 2
    order = np.random.default_rng(seed).permutation(np.arange(oldest, tokens)).tolist()
    every = parse_state(saved_state(form, tokens, seed + 1))
    state = parse_state(saved_state(form, tokens, seed) + saved_state(form, tokens, seed + 1, order)[9:])
    assert state.window is not None and state.shape.window == state.window.shape
    there = state.window.whole_blocks(5, BLOCK)
    assert there == list(range(-(-oldest // BLOCK), 5))
    whole, window = (
        [np.zeros(state.shape.token_bytes * BLOCK, np.uint8) for _ in numbers] for numbers in (range(5), there)
    )
    for block, payload in enumerate(whole):
        state.write_block(block * BLOCK, BLOCK, payload)
    for block, payload in zip(there, window, strict=True):
        expected = np.zeros_like(payload)
        state.window.write_block(block * BLOCK, BLOCK, payload)
        every.write_block(block * BLOCK, BLOCK, expected)
        assert np.array_equal(payload, expected)
    joined = assemble_state(state.shape, whole, BLOCK, window).tobytes()
    kept = list(range(there[0] * BLOCK, 5 * BLOCK))
    assert joined == saved_state(form, 5 * BLOCK, seed) + saved_state(form, tokens, seed + 1, kept)[9:]


@given(transposed=st.booleans(), shared=st.integers(1, 3), seed=st.integers(0, 100))
def test_two_states_share_the_blocks_of_the_tokens_they_share(transposed: bool, shared: int, seed: int) -> None:
    """Also where one has a tail that fills no block: this is what makes turns of a conversation cheap to keep."""
    form = SavedLayers(2, transposed=transposed)
    short = parse_state(saved_state(form, shared * BLOCK + 1, seed))
    long = parse_state(saved_state(form, 5 * BLOCK + 3, seed))
    assert short.shape == long.shape
    for block in range(shared):
        ours, theirs = (np.zeros(short.shape.token_bytes * BLOCK, np.uint8) for _ in range(2))
        short.write_block(block * BLOCK, BLOCK, ours)
        long.write_block(block * BLOCK, BLOCK, theirs)
        assert np.array_equal(ours, theirs)


def test_the_shape_is_what_differs_between_models_and_not_between_prompts() -> None:
    shape = parse_state(saved_state(SavedLayers(2), 8, 1)).shape
    assert shape == parse_state(saved_state(SavedLayers(2), 20, 2)).shape
    assert shape != parse_state(saved_state(SavedLayers(3), 8, 1)).shape
    assert shape != parse_state(saved_state(SavedLayers(2, transposed=True), 8, 1)).shape
    assert (shape.architecture, shape.types) == (b"llama", "1/1")


@given(cut=st.integers(0, 400))
def test_a_state_that_is_cut_short_is_refused_or_has_another_shape(cut: int) -> None:
    """Cut just before its values it is a whole state of a model without any, which ours then is not."""
    data = saved_state(SavedLayers(2, transposed=True), BLOCK, 3)
    try:
        assert parse_state(data[: min(cut, len(data) - 1)]).shape != parse_state(data).shape
    except StateUnsupported as refused:
        assert "in the middle" in str(refused) or "empty" in str(refused)


@given(position=st.integers(0, 200), value=st.integers(0, 255))
def test_damaged_structure_never_raises_anything_else(position: int, value: int) -> None:
    data = bytearray(saved_state(SavedLayers(2), BLOCK, 3))
    data[min(position, len(data) - 1)] = value
    try:
        parse_state(data)
    except StateUnsupported as refused:
        assert str(refused)


def with_number(data: bytes, offset: int, value: int) -> bytes:
    return data[:offset] + struct.pack("<I", value) + data[offset + 4 :]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "in the middle"),
        (saved_state(SavedLayers(2), BLOCK, 3) + 2 * saved_state(SavedLayers(2), BLOCK, 3)[9:], "more than attention"),
        (with_number(saved_state(SavedLayers(2), BLOCK, 3), 9, 2), "2 streams"),
        (with_number(saved_state(SavedLayers(2), BLOCK, 3), 13, 0), "empty"),
        (with_number(saved_state(SavedLayers(2), BLOCK, 3), 21, 2), "one sequence"),
        (with_number(saved_state(SavedLayers(2), BLOCK, 3), 0, 1 << 30), "architecture"),
    ],
)
def test_a_refusal_says_what_was_found(data: bytes, why: str) -> None:
    with pytest.raises(StateUnsupported, match=why):
        parse_state(data)


def test_cells_out_of_order_hold_no_prefix() -> None:
    data = bytearray(saved_state(SavedLayers(1), 2 * BLOCK, 3))
    first, second = slice(17, 21), slice(29, 33)  # the positions of cells 0 and 1
    data[first], data[second] = data[second], data[first]
    assert not parse_state(data).holds(2)
