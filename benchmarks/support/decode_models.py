"""The models that decode is compared on: a GGUF file, and the same weights in Transformers.

Owns the shapes. Weights that no file has are random, of a seed, and written by the tests' own writer. Nothing is
downloaded: SmolLM2 is taken where `kvengine fetch` has put it. Both sides read one file and round what it holds to
bf16. Random models keep their output matrix apart: a tied random one repeats the last token of its prompt, whatever is
between.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvstore_engine.ggml import load_library
from kvstore_engine.ggml.dequantise import dequantised
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model import ModelConfig
from kvstore_engine.models.cache import models_directory
from kvstore_engine.models.known import KNOWN_MODELS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests' writer
from tests.reference.make_gguf import TinyModel, write_model  # needs the line above

SMOLLM2 = "smollm2-135m-instruct"
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to compare on: its file if there is one, else the shape of which one is written."""

    name: str
    shape: TinyModel
    known: str = ""

    @contextmanager
    def file(self) -> Iterator[tuple[Path, str]]:
        """The path of its GGUF file, until the block ends, and what it is."""
        path = models_directory() / KNOWN_MODELS[self.known].file_name if self.known else None
        if path is not None and path.exists():
            yield path, self.name
            return
        what = f"{self.name} in shape, random weights" if self.known else f"{self.name}, random weights"
        with TemporaryDirectory() as folder:
            yield write_model(Path(folder) / "random.gguf", self.shape), what


def _shape(layers: int, width: int, feed_forward: int, heads: int, kv_heads: int, vocabulary: int) -> TinyModel:
    return TinyModel(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, head_dim=64, feed_forward=feed_forward,
        vocabulary=vocabulary, quantisation="bf16",
    )  # fmt: skip


SMOLLM2_135M = Subject("SmolLM2-135M", _shape(30, 576, 1536, 9, 3, 49152), SMOLLM2)
ONE_BILLION = Subject("16 layers of Llama 3.2 1B", _shape(16, 2048, 8192, 32, 8, 128256))
SMALL_MODEL = Subject("a small decoder", _shape(2, 128, 192, 4, 2, 512))


def in_transformers(path: Path, device: str) -> Any:
    """The model of a GGUF file as Transformers' own Llama, bf16 on torch's `device`. ImportError without it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with GGUFFile.open(path) as file, torch.device(device), torch.no_grad():
        shape = ModelConfig.from_gguf(file)
        rope = {"rope_type": "default", "rope_theta": shape.rope.frequency_base}
        config = LlamaConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.feed_forward,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, rms_norm_eps=shape.rms_epsilon, rope_parameters=rope,
            max_position_embeddings=shape.context_length, tie_word_embeddings=shape.tied_embeddings,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_weights(file, shape, name).reshape(parameter.shape)))
    return model


def _weights(file: GGUFFile, shape: ModelConfig, name: str) -> Any:
    """float32, of the parameter that Transformers calls `name`."""
    of, _, _ = name.rpartition(".weight")
    if of in _WHOLE:
        ours = _WHOLE[of]
    else:
        _, _, layer, part = of.split(".", 3)
        ours = f"blk.{layer}.{_PARTS[part]}"
    info = file.tensors[f"{ours}.weight"]
    raw = np.ascontiguousarray(file.tensor_bytes(info.name)).reshape(-1).view(np.uint8)
    values = dequantised(load_library(), info.ggml_type, raw).copy()
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(ours.rpartition(".")[2])
    if heads is None or shape.rope.neox:
        return values
    # GGUF has the channels that rotate together side by side, Transformers half a head apart.
    return values.reshape(heads, shape.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(-1)
