"""Manifests: one form, one digest, and nothing that is damaged or does not fit itself is taken for one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.arena import slot_bytes
from kvstore_proto.manifest import (
    ALIGNMENT_BYTES,
    DEFAULT_PART_BYTES,
    DTYPE_BITS,
    PART_CLASSES,
    Manifest,
    class_bytes,
    dtype_name,
    is_object_name,
    laid_out,
    manifest_digest,
    parse_manifest,
    part_digest,
    part_tokens,
    parts_of,
)

HELLO_DIGEST = "b5e9c1ad071b3e7fc779cfaa5e523818050000000000000" + "04b5670617274310" + "0"
SHAPES = st.lists(st.integers(0, 7), max_size=4)
TENSORS = st.lists(st.tuples(st.text(min_size=1, max_size=9), st.sampled_from(sorted(DTYPE_BITS)), SHAPES), max_size=9)


def made(tensors: list[tuple[str, str, list[int]]], part_bytes: int = PART_CLASSES[0]) -> Manifest:
    entries, nbytes = laid_out(tensors)
    parts = tuple(part_digest(bytes([at % 256])) for at in range(parts_of(nbytes, part_bytes)))
    return Manifest("tensors", nbytes, part_bytes, parts, entries, {"config.json": "{}"})


def test_a_part_has_one_digest_for_all_time() -> None:
    assert part_digest(b"hello").hex() == HELLO_DIGEST
    assert part_tokens(part_digest(b"hello")).tobytes() == part_digest(b"hello")


@given(TENSORS)
def test_what_was_packed_is_read_again_and_by_its_own_digest_alone(tensors: list[tuple[str, str, list[int]]]) -> None:
    manifest = made(tensors)
    packed = manifest.pack()
    assert parse_manifest(packed, manifest_digest(packed)) == manifest
    assert parse_manifest(packed + b" ", manifest_digest(packed)) is None


@given(TENSORS)
def test_tensors_lie_apart_and_aligned(tensors: list[tuple[str, str, list[int]]]) -> None:
    entries, nbytes = laid_out(tensors)
    end = 0
    for each in entries:
        assert each.offset % ALIGNMENT_BYTES == 0 and each.offset >= end
        end = each.offset + each.nbytes
    assert end <= nbytes < end + ALIGNMENT_BYTES


@pytest.mark.parametrize(
    "change",
    [{"parts": ""}, {"part_bytes": 4097}, {"bytes": 1 << 40}, {"format": 2}, {"tensors": [["a", "U8", [9], -64, 9]]}],
)
def test_a_manifest_that_does_not_fit_itself_is_none(change: dict[str, object]) -> None:
    raw = json.loads(made([("a", "F32", [3])]).pack()) | change
    packed = json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
    assert parse_manifest(packed, manifest_digest(packed)) is None


@given(st.integers(1, 40 << 20))
def test_a_part_fits_its_class_and_slots_fill_containers(nbytes: int) -> None:
    size = class_bytes(nbytes)
    assert size >= min(nbytes, DEFAULT_PART_BYTES) and size % 4096 == 0
    assert (64 << 20) // slot_bytes(size) * slot_bytes(size) > (64 << 20) * 0.99


@pytest.mark.parametrize("name", ["", "a@1", "a\n", "x" * 1025, "a\0b"])
def test_names_that_cannot_be_listed(name: str) -> None:
    assert not is_object_name(name)
    assert is_object_name("meta/Llama 3")


def test_arrays_without_numbers_have_no_type() -> None:
    assert dtype_name(np.dtype(">f4")) == "F32" and dtype_name("u2") == "U16"
    with pytest.raises(ValueError, match="cannot be stored"):
        dtype_name(np.dtype("M8[s]"))
