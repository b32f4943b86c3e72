"""Arrays of K and V are, number for number, what the order of bytes says, whatever library takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_client.slot_arrays import by_arrays
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.kv_layout import (
    ENGINE_ORDER,
    HEAD_PAIRS_ORDER,
    HEADS_ORDER,
    PAIRS_ORDER,
    TOKENS_ORDER,
)
from kvstore_proto.number_types import NUMBER_TYPES
from tests.reference.examples import examples
from tests.reference.leased_memory import lease_over

try:
    import torch
except ImportError:  # the extra `torch`
    torch = None

# Axes of [layer, pair, token, head, number, byte] in the order of the payload.
IN_PAYLOAD = {
    ENGINE_ORDER: (0, 1, 2, 3, 4, 5),
    HEADS_ORDER: (0, 1, 3, 2, 4, 5),
    TOKENS_ORDER: (0, 2, 1, 3, 4, 5),
    PAIRS_ORDER: (0, 2, 3, 1, 4, 5),
    HEAD_PAIRS_ORDER: (0, 3, 2, 1, 4, 5),
}
UNNAMED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # by NumPy


@dataclass(frozen=True)
class Case:
    fingerprint: Fingerprint
    payload: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.uint8]  # [layer, pair, token, head, number, byte]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    order, kv_dtype = draw(st.sampled_from(list(IN_PAYLOAD))), draw(st.sampled_from(list(NUMBER_TYPES)))
    layers, heads, width = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 9))
    tokens, nbytes = draw(st.sampled_from((1, 8, 16, 64))), NUMBER_TYPES[kv_dtype].nbytes
    numbers = np.random.default_rng(draw(st.integers(0, 99))).integers(
        0, 256, (layers, 2, tokens, heads, width, nbytes), dtype=np.uint8
    )
    group = LayerGroup(0, "full", 0, tuple(range(layers)), 2 * heads * width * nbytes, heads)
    layout = draw(st.sampled_from((order, f'{{"engine":"another","order":"{order}"}}')))
    fingerprint = Fingerprint(
        "m", "w", kv_dtype=kv_dtype, layout=layout, block_tokens=tokens, engine_block_tokens=tokens, groups=(group,)
    )
    return Case(fingerprint, numbers.transpose(IN_PAYLOAD[order]).reshape(-1), numbers)


def raw(array: Any) -> npt.NDArray[np.uint8]:
    """The bytes of an array's numbers, in the order of its axes, with one axis for them."""
    whole = np.ascontiguousarray(array)
    return whole.view(np.uint8).reshape(*whole.shape, whole.itemsize)


@given(case=cases(), data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_each_library_sees_the_numbers_that_the_layout_names(case: Case, data: st.DataObject) -> None:
    lease, _ = lease_over(case.fingerprint, [np.zeros_like(case.payload), case.payload])
    layer = data.draw(st.none() | st.integers(0, len(case.numbers) - 1))
    for pair, kind in enumerate("kv"):
        expected = case.numbers[:, pair] if layer is None else case.numbers[layer, pair]
        array = lease.array(1, layer, kind=kind)  # type: ignore[arg-type]
        assert (array.shape, array.readonly) == (expected.shape[:-1], True)
        shown = np.asarray(array)
        assert np.array_equal(raw(shown), expected) and not shown.flags.writeable
        if array.dtype not in UNNAMED:
            taken = np.from_dlpack(array)
            assert np.shares_memory(taken, lease.payload(1)) and np.array_equal(raw(taken), expected)
        if torch is not None:
            tensor = torch.from_dlpack(array)
            assert str(tensor.dtype) == f"torch.{array.dtype}"
            assert tensor.data_ptr() == array.address
            assert np.array_equal(raw(tensor.contiguous().view(torch.uint8).numpy()).reshape(expected.shape), expected)
    assert np.array_equal(np.asarray(lease.array(1, layer, kind="bytes")).reshape(-1), parts(case, layer))


def parts(case: Case, layer: int | None) -> npt.NDArray[np.uint8]:
    size = len(case.payload) // len(case.numbers)
    return case.payload if layer is None else case.payload[layer * size : (layer + 1) * size]


@given(case=cases())
@settings(max_examples=examples(200), deadline=None)
def test_k_and_v_of_each_layer_begin_at_64_bytes_where_a_layer_of_k_is_a_multiple_of_64(case: Case) -> None:
    """K and V of a layer lie apart in each part; always so in blocks of 64 tokens."""
    lease, _ = lease_over(case.fingerprint, [case.payload])
    layers = len(case.numbers)
    size = len(case.payload) // layers // 2
    is_apart = any(case.fingerprint.layout.find(order) >= 0 for order in (ENGINE_ORDER, HEADS_ORDER))
    for layer in range(layers):
        k, v = lease.array(0, layer, kind="k"), lease.array(0, layer, kind="v")
        if size % 64 == 0:
            assert k.address % 64 == 0 and (not is_apart or v.address % 64 == 0)
    if case.fingerprint.block_tokens == 64:
        assert size % 64 == 0


@given(case=cases(), in_layers=st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_a_payload_that_is_filled_by_arrays_is_the_one_that_is_read(case: Case, in_layers: bool) -> None:
    stored = np.zeros_like(case.payload)

    def write(slot: Any) -> None:
        for layer in range(len(case.numbers)) if in_layers else (None,):
            for pair, kind in enumerate("kv"):
                target = np.asarray(slot.array(layer, kind=kind))
                numbers = case.numbers[:, pair] if layer is None else case.numbers[layer, pair]
                target[...] = np.ascontiguousarray(numbers).view(target.dtype)[..., 0]

    assert by_arrays(case.fingerprint, write)(stored) is None
    assert np.array_equal(stored, case.payload)
