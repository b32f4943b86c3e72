"""The GGUF reader against files written by an independent writer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.gguf import GGUFError, GGUFFile
from tests.reference.gguf_bytes import write_gguf
from tests.reference.make_gguf import TinyModel, quantise, write_model


def test_metadata_and_tensors_come_back_as_written(tmp_path: Path) -> None:
    numbers = np.array([1.5, -2.0], np.float32)
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    metadata = {"a.flag": True, "a.count": 7, "a.ratio": 0.25, "a.name": "naïve", "a.list": ["x", "", "é"]}
    tensors = {
        "first": (0, (32, 2), quantise(values, "f32")),
        "second": (8, (32, 2), quantise(values, "q8_0")),
    }
    path = write_gguf(tmp_path / "m.gguf", {**metadata, "a.numbers": numbers}, tensors)
    with GGUFFile.open(path) as file:
        assert {key: file.metadata[key] for key in metadata} == metadata
        np.testing.assert_array_equal(file.metadata["a.numbers"], numbers)
        assert list(file.tensors) == ["first", "second"]
        assert file.tensors["first"].shape == (32, 2)
        assert file.tensors["second"].type_name == "q8_0"
        for name, (_, _, data) in tensors.items():
            assert file.tensor_bytes(name).tobytes() == data
            assert file.tensors[name].offset_bytes % 32 == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 not a model", "not a GGUF"),
        (b"GG", "truncated"),
        (b"GGUF\x01\0\0\0" + bytes(16), "version 1"),
        (b"GGUF\0\0\0\x03" + bytes(16), "big-endian"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "number of tensors"),
    ],
)
def test_refusals_are_one_line_and_name_the_file(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=reason) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(GGUFError, match="cannot be opened"):
            GGUFFile.open(path)


def test_digest_follows_what_the_cache_depends_on(tmp_path: Path) -> None:
    def digest(model: TinyModel) -> str:
        with GGUFFile.open(write_model(tmp_path / "m.gguf", model)) as file:
            return file.weights_digest()

    model = TinyModel(layers=1)
    original = digest(model)
    renamed = {"general.name": "renamed", "tokenizer.ggml.pre": "gpt-2"}
    assert digest(replace(model, metadata=renamed)) == original
    assert digest(replace(model, seed=1)) != original
    assert digest(replace(model, metadata={"llama.rope.freq_base": 500000.0})) != original
    assert digest(replace(model, quantisation="q8_0")) != original
