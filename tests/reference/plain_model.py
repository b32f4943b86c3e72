"""A decoder in double precision: a sequence's logits, without cache, blocks or batches. What every executor must agree
with.

It shares only the reader of files with the engine; the rest is written from the architectures' papers for the models of
`make_gguf`, whose matrices are f16 or f32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore_engine.gguf import GGUFFile
from tests.reference.make_gguf import TinyModel

Floats = npt.NDArray[np.float64]
_TYPES = {"f32": np.float32, "f16": np.float16}
_WINDOW_PERIODS = {"llama": 0, "gemma2": 2, "gemma3": 6}  # the last layer of each period sees everything
_CAPS = {"gemma2": (50.0, 30.0)}


class PlainModel:
    """The model that `write_model` wrote to `path`."""

    def __init__(self, path: Path, model: TinyModel) -> None:
        self._model = model
        with GGUFFile.open(path) as file:
            self._tensors = {
                name: file.tensor_bytes(name).view(_TYPES[info.type_name]).reshape(info.shape[::-1]).astype(np.float64)
                for name, info in file.tensors.items()
            }

    def logits(self, tokens: npt.NDArray[np.int32]) -> Floats:
        """Return the logits of every token, float64 [tokens, vocabulary]."""
        model, weight = self._model, self._tensors
        is_gemma = model.architecture.startswith("gemma")
        hidden = weight["token_embd.weight"][tokens] * (model.width**0.5 if is_gemma else 1.0)
        for layer in range(model.layers):
            prefix = f"blk.{layer}."
            attended = self._attended(layer, prefix, self._normed(hidden, prefix + "attn_norm"))
            hidden = hidden + self._normed(
                self._linear(attended, prefix + "attn_output"), prefix + "post_attention_norm"
            )
            gated = self._gated(prefix, self._normed(hidden, prefix + "ffn_norm"))
            hidden = hidden + self._normed(self._linear(gated, prefix + "ffn_down"), prefix + "post_ffw_norm")
        name = "output" if "output.weight" in weight else "token_embd"
        return self._capped(self._linear(self._normed(hidden, "output_norm"), name), "final_logit_softcapping", 1)

    def _attended(self, layer: int, prefix: str, rows: Floats) -> Floats:
        """The heads' results, [tokens, heads * head_dim]."""
        model, count = self._model, len(rows)
        widths = np.cumsum([model.heads, model.kv_heads]) * model.head_dim
        if prefix + "attn_qkv.weight" in self._tensors:
            parts = np.split(self._linear(rows, prefix + "attn_qkv"), widths, 1)
        else:
            parts = [self._linear(rows, f"{prefix}attn_{name}") for name in "qkv"]
        queries, keys, values = (part.reshape(count, -1, model.head_dim) for part in parts)
        queries = self._rotated(layer, self._normed(queries, prefix + "attn_q_norm"))
        keys = self._rotated(layer, self._normed(keys, prefix + "attn_k_norm"))
        seen = np.tril(np.ones((count, count), bool))
        if window := self._window(layer):
            seen &= ~np.tril(seen, -window)
        heads = []
        for head in range(model.heads):
            shared = head // (model.heads // model.kv_heads)
            scores = queries[:, head] @ keys[:, shared].T / model.head_dim**0.5
            scores = np.where(seen, self._capped(scores, "attn_logit_softcapping", 0), -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(weights / weights.sum(1, keepdims=True) @ values[:, shared])
        return np.concatenate(heads, 1)

    def _gated(self, prefix: str, rows: Floats) -> Floats:
        if prefix + "ffn_gate.weight" in self._tensors:
            gate, up = self._linear(rows, prefix + "ffn_gate"), self._linear(rows, prefix + "ffn_up")
        else:
            gate, up = np.split(self._linear(rows, prefix + "ffn_up"), 2, 1)
        if self._model.architecture.startswith("gemma"):
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            return gate / 2 * (1 + np.tanh(inner)) * up
        return gate / (1 + np.exp(-gate)) * up

    def _rotated(self, layer: int, heads: Floats) -> Floats:
        """Return rows rotated by position, the index of the first dimension; Llama's pairs are neighbours, the others'
        are halves apart.
        """
        model, half = self._model, heads.shape[2] // 2
        is_local = model.architecture == "gemma3" and self._window(layer) > 0
        base = 1e4 if is_local else self._number("rope.freq_base", 1e4)
        turns = base ** (-np.arange(half) / half)
        if "rope_freqs.weight" in self._tensors:
            turns = turns / self._tensors["rope_freqs.weight"]
        angles = np.arange(len(heads))[:, None, None] * turns
        is_neighbours = model.architecture == "llama"
        first, second = (slice(0, None, 2), slice(1, None, 2)) if is_neighbours else (slice(half), slice(half, None))
        x, y, result = heads[..., first], heads[..., second], np.empty_like(heads)
        result[..., first] = x * np.cos(angles) - y * np.sin(angles)
        result[..., second] = y * np.cos(angles) + x * np.sin(angles)
        return result

    def _window(self, layer: int) -> int:
        """The tokens that the layer sees; 0: all."""
        period = _WINDOW_PERIODS.get(self._model.architecture)
        if period is None or (period and layer % period == period - 1):
            return 0
        return int(self._number("attention.sliding_window", 0))

    def _linear(self, rows: Floats, name: str) -> Floats:
        product: Floats = rows @ self._tensors[f"{name}.weight"].T
        return product + self._tensors.get(f"{name}.bias", 0.0)

    def _normed(self, values: Floats, name: str) -> Floats:
        """RMSNorm, where the model has this one."""
        if f"{name}.weight" not in self._tensors:
            return values
        mean = (values**2).mean(-1, keepdims=True)
        epsilon = self._number("attention.layer_norm_rms_epsilon", 1e-5)
        normed: Floats = values / np.sqrt(mean + epsilon) * self._tensors[f"{name}.weight"]
        return normed

    def _capped(self, values: Floats, key: str, which: int) -> Floats:
        default = _CAPS.get(self._model.architecture, (0.0, 0.0))[which]
        cap = self._number(key, default)
        return cap * np.tanh(values / cap) if cap else values

    def _number(self, key: str, default: float) -> float:
        value = self._model.metadata.get(f"llama.{key}", default)
        assert isinstance(value, (int, float))
        return float(value)
