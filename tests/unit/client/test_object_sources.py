"""Sources of objects: what they say of files is what safetensors reads, byte for byte, whatever the pieces."""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_client import KVStoreError
from kvstore_client.memory import Bytes
from kvstore_client.objects.sources import SLACK_BYTES, ArraySource, Source, weights_source
from kvstore_proto.manifest import NUMPY_DTYPES, laid_out
from tests.reference.tiny_llama import write_tiny_llama


def safetensors_file(path: Path, tensors: dict[str, np.ndarray[Any, Any]], pad: int = 0) -> None:
    """Write a file as another writer may: the header padded to any length."""
    header, at = dict[str, Any](), 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": {"f4": "F32", "u1": "U8", "i8": "I64"}[array.dtype.str[1:]], "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }  # fmt: skip
        at += array.nbytes
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))


def read_in_pieces(source: Source, piece: int) -> Bytes:
    whole = np.zeros(source.nbytes, np.uint8)
    buffer = np.frombuffer(mmap.mmap(-1, piece + SLACK_BYTES), np.uint8)
    for first in range(0, source.nbytes, piece):
        buffer[:] = 0xFF  # of the part before
        wanted = whole[first : first + piece]
        begin = source.fill(first, len(wanted), buffer)
        wanted[:] = buffer[begin : begin + len(wanted)]
    return whole


def tensors_of(source: Source, whole: Bytes) -> dict[str, np.ndarray[Any, Any]]:
    return {
        each.name: whole[each.offset : each.offset + each.nbytes].view(NUMPY_DTYPES[each.dtype]).reshape(each.shape)
        for each in source.tensors
    }


def some_tensors(seed: int, count: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    kinds = ("f4", "u1", "i8")
    shapes = [tuple(rng.integers(0, 40, rng.integers(0, 4)).tolist()) for _ in range(count)]
    return {f"t{number}": rng.integers(0, 100, shape).astype(kinds[number % 3]) for number, shape in enumerate(shapes)}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.integers(1, 12), st.integers(0, 9), st.sampled_from([997, 4096, 12_288, 1 << 20]))
def test_a_sharded_model_is_read_as_it_lies(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, pad: int, piece: int
) -> None:
    directory = tmp_path_factory.mktemp("model")
    tensors = some_tensors(seed, count)
    names = list(tensors)
    shards = {"a.safetensors": names[: count // 2], "b.safetensors": names[count // 2 :]}
    for file, held in shards.items():
        safetensors_file(directory / file, {name: tensors[name] for name in held}, pad)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    with weights_source(directory) as source:
        found = tensors_of(source, read_in_pieces(source, piece))
        assert source.metadata == {"config.json": '{"model_type": "llama"}'}
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in tensors.items()
    }


@given(st.integers(0, 99), st.sampled_from([997, 4096, 1 << 20]))
def test_arrays_are_read_as_they_are(seed: int, piece: int) -> None:
    tensors = some_tensors(seed, 6)
    source = ArraySource(tensors)
    found = tensors_of(source, read_in_pieces(source, piece))
    assert all(np.array_equal(found[name], array) for name, array in tensors.items())


def test_what_is_no_file_of_weights_is_refused_in_one_line(tmp_path: Path) -> None:
    good = {"a": np.arange(9, dtype="f4")}
    safetensors_file(tmp_path / "short.safetensors", good)
    os.truncate(tmp_path / "short.safetensors", 90)
    (tmp_path / "huge.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "text.safetensors").write_bytes(struct.pack("<Q", 4) + b"no{}")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "no.gguf").write_bytes(b"GG")
    for path in [*tmp_path.iterdir(), tmp_path / "nothing"]:
        if path.name == "nothing":
            path.mkdir()
        with pytest.raises(KVStoreError) as refused:
            weights_source(path)
        assert path.name in refused.value.message and "\n" not in refused.value.message


@pytest.mark.parametrize(
    "described",
    [
        {"dtype": "F32", "shape": [4]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 32]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 1.5]},
        {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
        "no tensor",
        None,
    ],
)
def test_a_header_of_another_form_is_refused_in_one_line(described: object, tmp_path: Path) -> None:
    header = json.dumps({} if described is None else {"a": described}).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(KVStoreError, match=r"odd\.safetensors") as refused:
        weights_source(path)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors.index.json", b'{"weight_map": ["a"]}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}'),
        ("model.safetensors.index.json", b'{"a": "b"}'),
        ("model.safetensors.index.json", b"[" * 100_000),
        ("config.json", b"\xff\xfe"),
    ],
)
def test_a_spoilt_file_beside_the_weights_is_named(file: str, content: bytes, tmp_path: Path) -> None:
    safetensors_file(tmp_path / "a.safetensors", {"a": np.arange(9, dtype="f4")})
    (tmp_path / file).write_bytes(content)
    with pytest.raises(KVStoreError, match=file):
        weights_source(tmp_path)


def test_a_gguf_file_that_was_cut_short_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = write_tiny_llama(tmp_path / "whole.gguf", layers=1)
    with weights_source(whole) as source:
        assert source.nbytes == whole.stat().st_size
    content, cut = whole.read_bytes(), tmp_path / "cut.gguf"
    for nbytes in (4, 8, 23, 24, *range(100, len(content), 9973), len(content) - 1):
        cut.write_bytes(content[:nbytes])
        with pytest.raises(KVStoreError, match=r"cut\.gguf is no whole GGUF file.*fetch it again"):
            weights_source(cut)


def test_a_gguf_file_with_lengths_of_no_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    for counts in ((3, 2**63, 0), (3, 0, 2**63), (9, 1, 1), (3, 0, 0)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", *counts) + b"\xff" * 200)
        with pytest.raises(KVStoreError, match=r"odd\.gguf is no whole GGUF file"):
            weights_source(path)


def test_a_file_that_is_replaced_behind_its_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    safetensors_file(path, {"a": np.arange(9000, dtype="f4")})

    def replaced(*layout: Any) -> Any:
        safetensors_file(tmp_path / "new", {"b": np.arange(9000, dtype="f4")})
        os.replace(tmp_path / "new", path)
        return laid_out(*layout)

    monkeypatch.setattr("kvstore_client.objects.sources.laid_out", replaced)
    with pytest.raises(KVStoreError, match="changed while it was read"):
        weights_source(path)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors_file(path, {"a": np.arange(9000, dtype="f4")})
    with weights_source(path) as source:
        read_in_pieces(source, 4096)
        safetensors_file(path, {"a": np.arange(9001, dtype="f4")})
        with pytest.raises(KVStoreError, match="changed while it was read"):
            read_in_pieces(source, 4096)
