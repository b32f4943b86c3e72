"""Models that the engine cannot run are refused by name, before ggml could abort."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_engine import BlockPool, Executor, GGUFFile, UnsupportedModel, load_model
from kvstore_engine.gguf import TENSOR_TYPES
from kvstore_engine.kernels import select_kernels
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
        ({"llama.expert_count": 8}, ("mixture-of-experts",)),
        ({"llama.rope.scaling.type": "dynamic"}, ("dynamic", "yarn", "longrope")),
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
        Executor(short, BlockPool(short.config, 8), max_context=128)
    with (
        load_model(GGUFFile.open(path), context=128) as long,
        Executor(long, BlockPool(long.config, 8), max_context=128),
    ):
        assert long.config.rope.factors == "rope_factors_long.weight"


def test_weights_are_repacked_where_this_cpu_can_and_used_in_place_elsewhere(tmp_path: Path) -> None:
    for quantisation in ("q4_0", "q8_0", "f32"):
        path = write_model(tmp_path / f"{quantisation}.gguf", replace(_TINY, quantisation=quantisation))
        with load_model(GGUFFile.open(path), repack=False) as plain, load_model(GGUFFile.open(path)) as model:
            assert plain.repacked_bytes == 0
            repackable = {
                "q4_0": bool(model.library.extra_buffer_types()),
                "q8_0": bool(select_kernels().q8_product_address),
                "f32": False,
            }
            assert (model.repacked_bytes > 0) == repackable[quantisation]


def test_a_matrix_that_does_not_go_into_groups_of_eight_rows_stays_in_place(tmp_path: Path) -> None:
    path = write_model(tmp_path / "odd.gguf", replace(_TINY, quantisation="q8_0", vocabulary=321))
    with load_model(GGUFFile.open(path)) as model:
        assert not model.output.interleaved
        assert model.layers[0].ffn_down.interleaved == bool(select_kernels().q8_product_address)


def test_what_was_repacked_is_not_resident_twice(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", replace(_TINY, quantisation="q8_0", width=256, feed_forward=512))
    with GGUFFile.open(path) as plain:
        plain.weights_digest()  # reads all of it
        assert _resident_bytes(path) >= 0.9 * plain.data.size
        with load_model(GGUFFile.open(path)) as model:
            expected = model.file.data.size - model.repacked_bytes
            plain.release()
            assert _resident_bytes(path) <= expected + 0.1 * model.file.data.size


def _resident_bytes(path: Path) -> int:
    """Of all maps of the file in this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line.endswith(str(path))]
    return sum(int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1]) * 1024 for at in starts)
