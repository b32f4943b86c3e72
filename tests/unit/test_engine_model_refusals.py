"""Models that the engine cannot run are refused by name, before ggml could abort."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_engine import GGUFFile, UnsupportedModel, load_model
from kvstore_engine.gguf import TENSOR_TYPES
from tests.reference.gguf_bytes import write_gguf
from tests.reference.make_gguf import TinyModel, write_model

_TINY = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, feed_forward=32)


def _refusal(path: Path) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        load_model(GGUFFile.open(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, ("'mamba'", "llama")),
        ({"llama.expert_count": 8}, ("mixture-of-experts",)),
        ({"llama.rope.scaling.type": "longrope"}, ("longrope", "yarn")),
        ({"llama.attention.head_count_kv": 3}, ("2 query heads", "3 K/V heads")),
        ({"llama.attention.value_length": 8}, ("differ",)),
        ({"llama.rope.dimension_count": 8}, ("8 of 16",)),
        ({"llama.block_count": 2}, ("blk.1.", "incomplete")),
        ({"llama.feed_forward_length": 64}, ("ffn_", "shape")),
        ({"llama.block_count": "many"}, ("llama.block_count", "positive integer")),
        ({"llama.attention.key_length": 12, "llama.attention.value_length": 12}, ("head size 12",)),
    ],
)
def test_metadata(tmp_path: Path, metadata: dict[str, object], words: tuple[str, ...]) -> None:
    message = _refusal(write_model(tmp_path / "m.gguf", replace(_TINY, metadata=metadata)))
    for word in words:
        assert word in message


def test_quantisations_name_what_would_do(tmp_path: Path) -> None:
    q6_k = next(number for number, kind in TENSOR_TYPES.items() if kind.name == "q6_k")
    path = write_gguf(
        tmp_path / "m.gguf",
        {"general.architecture": "llama"},
        {"token_embd.weight": (q6_k, (256, 2), bytes(420))},
    )
    message = _refusal(path)
    assert "q6_k" in message and "q8_0" in message and "token_embd.weight" in message


def test_a_bias_is_not_silently_dropped(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", _TINY)
    with GGUFFile.open(model) as file:
        tensors = {
            name: (info.ggml_type, info.shape, file.tensor_bytes(name).tobytes()) for name, info in file.tensors.items()
        }
        metadata = dict(file.metadata)
    tensors["blk.0.attn_q.bias"] = (0, (32,), bytes(128))
    assert "blk.0.attn_q.bias" in _refusal(write_gguf(tmp_path / "biased.gguf", metadata, tensors))


def test_weights_are_repacked_where_this_cpu_can_and_used_in_place_elsewhere(tmp_path: Path) -> None:
    for quantisation in ("q4_0", "f32"):
        path = write_model(tmp_path / f"{quantisation}.gguf", replace(_TINY, quantisation=quantisation))
        with load_model(GGUFFile.open(path), repack=False) as plain, load_model(GGUFFile.open(path)) as model:
            assert plain.repacked_bytes == 0
            repackable = quantisation == "q4_0" and bool(model.library.extra_buffer_types())
            assert (model.repacked_bytes > 0) == repackable
