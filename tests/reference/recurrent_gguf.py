"""Random models with recurrent layers, for engines that llama.cpp computes for: Mamba, and Jamba, which has attention
in every other layer. The vocabulary is `make_gguf`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.reference.gguf_bytes import Tensor, write_gguf
from tests.reference.make_gguf import TinyModel, _tokenizer

_WIDTH, _INNER, _STATE, _CONVOLUTION, _RANK, _LAYERS = 32, 64, 8, 4, 4, 4
_HEADS, _HEAD = 2, 16
_VOCABULARY = TinyModel().vocabulary


def write_recurrent(path: Path, architecture: str, seed: int = 0) -> Path:
    """Write a "mamba" or a "jamba" of four layers to `path`, and return it."""
    is_hybrid = architecture == "jamba"
    attends = [layer % 2 == 1 and is_hybrid for layer in range(_LAYERS)]
    metadata: dict[str, object] = {
        "general.architecture": architecture,
        "general.name": "tiny recurrent",
        f"{architecture}.context_length": 2048,
        f"{architecture}.embedding_length": _WIDTH,
        f"{architecture}.block_count": _LAYERS,
        f"{architecture}.feed_forward_length": 64 if is_hybrid else 0,
        f"{architecture}.attention.head_count": _HEADS if is_hybrid else 0,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.ssm.conv_kernel": _CONVOLUTION,
        f"{architecture}.ssm.inner_size": _INNER,
        f"{architecture}.ssm.state_size": _STATE,
        f"{architecture}.ssm.time_step_rank": _RANK,
        f"{architecture}.vocab_size": _VOCABULARY,
        **_tokenizer(_VOCABULARY),
        "tokenizer.chat_template": None,
    }
    if is_hybrid:
        metadata[f"{architecture}.attention.head_count_kv"] = np.array([_HEADS * each for each in attends], np.int32)
    return write_gguf(path, metadata, dict(_tensors(attends, is_hybrid, np.random.default_rng(seed))))


def _tensors(attends: list[bool], is_hybrid: bool, random: np.random.Generator) -> Iterator[tuple[str, Tensor]]:
    def f32(values: npt.NDArray[np.floating]) -> Tensor:
        return 0, values.shape[::-1], values.astype(np.float32).tobytes()

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> tuple[str, Tensor]:
        return f"{name}.weight", f32(random.standard_normal((rows, columns)) * gain / np.sqrt(columns))

    def ones(name: str, size: int) -> tuple[str, Tensor]:
        return f"{name}.weight", f32(1 + 0.1 * random.standard_normal(size))

    yield matrix("token_embd", _VOCABULARY, _WIDTH, np.sqrt(_WIDTH))
    yield ones("output_norm", _WIDTH)
    yield matrix("output", _VOCABULARY, _WIDTH)
    for layer, is_attention in enumerate(attends):
        prefix = f"blk.{layer}."
        yield ones(prefix + "attn_norm", _WIDTH)
        if is_attention:
            for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
                yield matrix(prefix + name, _WIDTH, _WIDTH, 1.5)
        else:
            yield matrix(prefix + "ssm_in", 2 * _INNER, _WIDTH, 1.5)
            yield prefix + "ssm_conv1d.weight", f32(random.standard_normal((_INNER, _CONVOLUTION)))
            yield prefix + "ssm_conv1d.bias", f32(0.1 * random.standard_normal(_INNER))
            yield matrix(prefix + "ssm_x", _RANK + 2 * _STATE, _INNER, 2.0)
            yield matrix(prefix + "ssm_dt", _INNER, _RANK)
            yield prefix + "ssm_dt.bias", f32(-2 + 0.1 * random.standard_normal(_INNER))
            yield prefix + "ssm_a", f32(-np.exp(0.5 * random.standard_normal((_INNER, _STATE))))
            yield prefix + "ssm_d", f32(random.standard_normal(_INNER))
            yield matrix(prefix + "ssm_out", _WIDTH, _INNER, 1.5)
            if is_hybrid:
                for name, size in (("ssm_dt_norm", _RANK), ("ssm_b_norm", _STATE), ("ssm_c_norm", _STATE)):
                    yield ones(prefix + name, size)
        if is_hybrid:
            yield ones(prefix + "ffn_norm", _WIDTH)
            yield matrix(prefix + "ffn_gate", 64, _WIDTH)
            yield matrix(prefix + "ffn_up", 64, _WIDTH)
            yield matrix(prefix + "ffn_down", _WIDTH, 64)
