"""A model for vLLM in the shape of Llama 3 8B, without weights: a configuration in a folder, for `load_format="dummy"`.

Dummy weights are numbers below 0.001 from a fixed seed, so every engine has the same. A Llama of such numbers answers
the same whatever its K/V are: attention adds less than bf16 can hold. Granite is a Llama with factors in its
configuration, the shapes and the work are the same; with these factors one other token in a prompt changes the answer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

HEAD_DIM, WIDTH, INNER, VOCABULARY, LAYERS = 128, 128, 448, 128_256, 32  # width and inner width for each layer
_WEIGHT_SQUARED = 1e-3**2 / 3  # the mean of a dummy weight's square
_SHARPNESS = 4.0  # of attention: the deviation of a key's score; a few keys of thousands then count
_SHARE = 30.0  # of what a layer adds, in units of the token's own embedding
_ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """`layers`: 32 is Llama 3 8B. With fewer all is narrower too: width, heads and vocabulary in proportion."""

    layers: int = LAYERS

    @property
    def kv_heads(self) -> int:
        return max(1, self.layers // 4)

    @property
    def vocabulary(self) -> int:
        return VOCABULARY * self.layers // LAYERS

    @property
    def token_bytes(self) -> int:
        """K and V of a token in all layers."""
        return 2 * self.layers * self.kv_heads * HEAD_DIM * _ELEMENT_BYTES

    @property
    def weights_bytes(self) -> int:
        width, keys = WIDTH * self.layers, 2 * self.kv_heads * HEAD_DIM
        layer = width * (2 * width + keys + 3 * INNER * self.layers)
        return _ELEMENT_BYTES * (2 * self.vocabulary * width + self.layers * layer)

    def write(self, folder: Path) -> None:
        """`config.json`, as vLLM reads a model's folder."""
        width = WIDTH * self.layers
        value = math.sqrt(width) * _WEIGHT_SQUARED  # what an element of Q, K or V is like, behind a normalisation
        described = {
            "architectures": ["GraniteForCausalLM"], "model_type": "granite", "torch_dtype": "bfloat16",
            "hidden_size": width, "intermediate_size": INNER * self.layers, "num_hidden_layers": self.layers,
            "num_attention_heads": self.layers, "num_key_value_heads": self.kv_heads, "head_dim": HEAD_DIM,
            "vocab_size": self.vocabulary, "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-12, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
            "mlp_bias": False, "bos_token_id": 0, "eos_token_id": 1, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
            "attention_multiplier": _SHARPNESS / (math.sqrt(HEAD_DIM) * value**2),
            "residual_multiplier": _SHARE / (math.sqrt(width) * value),
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(described))
