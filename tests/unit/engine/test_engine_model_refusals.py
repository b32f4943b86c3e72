"""Models that the engine cannot run are refused by name, before ggml could abort."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import TENSOR_TYPES, GGUFFile
from kvstore_engine.model.metadata import UnsupportedModel
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from tests.reference.gguf_bytes import Tensor, write_gguf
from tests.reference.make_gguf import TinyModel, write_model

_TINY = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, feed_forward=32)


def _refusal(path: Path) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        load_model(GGUFFile.open(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _contents(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    with GGUFFile.open(path) as file:
        tensors = {
            name: (info.ggml_type, info.shape, file.tensor_bytes(name).tobytes()) for name, info in file.tensors.items()
        }
        return dict(file.metadata), tensors


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, ("'mamba'", "llama", "Qwen3", "Gemma 2", "phi3")),
        ({"general.architecture": "clip"}, ("'clip'", "supported")),
        ({"general.architecture": "deepseek2", "deepseek2.attention.kv_lora_rank": 512}, ("'deepseek2'", "(MLA)")),
        ({"general.architecture": "falcon-h1", "falcon-h1.ssm.state_size": 16}, ("'falcon-h1'", "recurrent")),
        ({"general.architecture": "lfm2", "lfm2.shortconv.l_cache": 3}, ("'lfm2'", "recurrent")),
        ({"general.architecture": "t5", "t5.decoder_start_token_id": 0}, ("'t5'", "an encoder and a decoder")),
        ({"general.architecture": "gpt-oss"}, ("'gpt-oss'", "experts", "learned sinks", "supported")),
        ({"llama.expert_count": 8}, ("mixture-of-experts",)),
        ({"llama.rope.scaling.type": "dynamic"}, ("dynamic", "yarn", "longrope")),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -4.0},
            ("scaling factor of -4", "0.01 or more"),
        ),
        ({"llama.rope.dimension_count_swa": 8}, ("8 dimensions within windows", "16")),
        ({"llama.attention.key_length_swa": 8}, ("in windows",)),
        ({"llama.attention.sliding_window_pattern": "often"}, ("sliding_window_pattern", "often")),
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
    model = write_model(tmp_path / "m.gguf", replace(_TINY, quantisation="f32"))
    metadata, tensors = _contents(model)
    i32 = next(number for number, kind in TENSOR_TYPES.items() if kind.name == "i32")
    _, shape, raw = tensors["blk.0.ffn_up.weight"]
    tensors["blk.0.ffn_up.weight"] = (i32, shape, raw)
    message = _refusal(write_gguf(tmp_path / "odd.gguf", metadata, tensors))
    for word in ("i32", "blk.0.ffn_up.weight", "q8_0", "iq2_xs", "mxfp4"):
        assert word in message


def test_nothing_is_silently_dropped(tmp_path: Path) -> None:
    metadata, tensors = _contents(write_model(tmp_path / "m.gguf", _TINY))
    for extra in ("blk.0.attn_q_norm.weight", "blk.0.attn_norm.bias", "output.bias", "rope_factors_long.bias"):
        more = {**tensors, extra: (0, (32,), bytes(128))}
        assert extra in _refusal(write_gguf(tmp_path / "more.gguf", metadata, more))


def test_learned_sinks_are_refused_by_name(tmp_path: Path) -> None:
    """If they were left out, all answers would be wrong."""
    metadata, tensors = _contents(write_model(tmp_path / "m.gguf", _TINY))
    more = {**tensors, "blk.0.attn_sinks.weight": (0, (2,), bytes(8))}
    assert "blk.0.attn_sinks.weight: learned sinks" in _refusal(write_gguf(tmp_path / "sinks.gguf", metadata, more))


def test_half_of_a_projection_is_not_enough(tmp_path: Path) -> None:
    metadata, tensors = _contents(write_model(tmp_path / "m.gguf", _TINY))
    del tensors["blk.0.attn_v.weight"]
    assert "blk.0.attn_v.weight" in _refusal(write_gguf(tmp_path / "less.gguf", metadata, tensors))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_window_where_there_should_be_none_is_refused(tmp_path: Path, architecture: str) -> None:
    model = replace(_TINY, architecture=architecture, metadata={"llama.attention.sliding_window": 64})
    assert "sliding window (64)" in _refusal(write_model(tmp_path / "m.gguf", model))


def test_a_longer_context_than_the_rotation_was_chosen_for_is_refused(tmp_path: Path) -> None:
    longrope = {"llama.rope.scaling.original_context_length": 64}
    model = replace(_TINY, architecture="phi3", long_short=True, metadata=longrope)
    path = write_model(tmp_path / "m.gguf", model)
    with load_model(GGUFFile.open(path)) as short, pytest.raises(ValueError, match="up to 64 tokens, not 128"):
        Executor(short, BlockPool(short.config, 8), StepSizes(max_context=128))
    with (
        load_model(GGUFFile.open(path), context=128) as long,
        Executor(long, BlockPool(long.config, 8), StepSizes(max_context=128)),
    ):
        assert long.config.rope.factors == "rope_factors_long.weight"
