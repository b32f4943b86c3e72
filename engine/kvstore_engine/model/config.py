"""Reads a model's hyperparameters from GGUF metadata and refuses models that the graph cannot run.

The module owns the names of the metadata keys and their defaults, which are llama.cpp's. It does not touch tensor
bytes. Invariant: a `ModelConfig` describes a model that `graph.decoder` can build; models that would silently compute
something else (experts, other architectures, unknown scalings) are refused by name.
"""

import math
from dataclasses import dataclass
from typing import Self

from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.architecture import ARCHITECTURES, Architecture
from kvstore_engine.model.metadata import Hyperparameters, UnsupportedModel
from kvstore_engine.model.rope import SHORT_FACTORS, RopeConfig, read_rope

MAX_HEAD_DIM = 256
# Hyperparameters by which files of other kinds are known, and what to call these.
_STATES = (
    (("attention.kv_lora_rank",), "with latent K and V (MLA)"),
    (("ssm.state_size", "ssm.conv_kernel", "wkv.head_size", "shortconv.l_cache"), "with recurrent layers"),
    (("decoder_start_token_id", "attention.relative_buckets_count", "decoder_block_count"), "an encoder and a decoder"),
    (("pooling_type",), "an encoder"),
)
_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and settings of a decoder model. `width` is the number of values of a hidden state, `kv_width` of one
    token's K (or V). `rope` is the rotation of layers that see everything, `local_rope` the rotation of layers with a
    window, if different. `windows` has for each layer the number of tokens that it sees, 0 for all; if it is empty, all
    layers see everything. `attention_scale` 0 means 1 / sqrt(head_dim); a soft cap of 0 means none. `longest_context`:
    for contexts of more tokens the model must be configured anew (LongRoPE); 0: never. `vocabulary` is the number of
    tokens. `padding` is the number of rows of the embeddings and the output matrix past the last token, which get no
    logits.
    """

    name: str
    architecture: str
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_epsilon: float
    context_length: int
    vocabulary: int
    tied_embeddings: bool
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    windows: tuple[int, ...] = ()
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    output_softcap: float = 0.0
    longest_context: int = 0
    padding: int = 0

    @property
    def family(self) -> Architecture:
        """The description of the architecture that this model belongs to."""
        return ARCHITECTURES[self.architecture]

    @property
    def kv_width(self) -> int:
        """The number of elements of one token's K, or V, in one layer."""
        return self.kv_heads * self.head_dim

    def window(self, layer: int) -> int:
        """Return how many tokens `layer` sees, the present one included; 0 means all."""
        return self.windows[layer] if self.windows else 0

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with a sliding window in a model whose other layers see everything. It is empty if
        all layers are alike.
        """
        windowed = tuple(layer for layer, window in enumerate(self.windows) if window)
        return windowed if len(windowed) < self.layers else ()

    @property
    def window_tokens(self) -> int:
        """The number of tokens that the layers in `windowed_layers` see; 0 if there are no such layers."""
        return max((self.window(layer) for layer in self.windowed_layers), default=0)

    def layer_rope(self, layer: int) -> RopeConfig:
        """Return the settings of the rotary position embedding of `layer`."""
        return self.local_rope if self.local_rope and self.window(layer) else self.rope

    def describe_attention(self) -> str:
        """Return one line of text about rotation, windows and the like. It differs for two models with equal weights
        whenever they compute different keys and values.
        """
        parts = [self.rope.describe()]
        windowed = {window for window in self.windows if window}
        if windowed and self.local_rope:
            parts.append(f"{self.local_rope.describe()} within windows")
        for window in sorted(windowed):
            layers = ",".join(str(layer) for layer, size in enumerate(self.windows) if size == window)
            parts.append(f"window={window} in {layers}")
        if self.attention_softcap:
            parts.append(f"softcap={self.attention_softcap:g}")
        if self.attention_scale:
            parts.append(f"scale={self.attention_scale:g}")
        return "; ".join(parts)

    @classmethod
    def from_gguf(cls, file: GGUFFile, context: int | None = None) -> Self:
        """Read and check the hyperparameters of `file`. `context` is the longest sequence in tokens, which matters to
        models with LongRoPE. Raises UnsupportedModel.
        """
        keys = Hyperparameters(file.metadata)
        family = _family(keys)
        heads, width = keys.count("attention.head_count"), keys.count("embedding_length")
        kv_heads = keys.count("attention.head_count_kv", heads)
        head_dim = keys.count("attention.key_length", width // heads)
        _check_heads(keys, heads, kv_heads, head_dim)
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise UnsupportedModel("the model has no tensor token_embd.weight: the file is incomplete")
        rows, tokens = embedding.shape[-1], file.metadata.get("tokenizer.ggml.tokens")
        vocabulary = min(rows, len(tokens)) if isinstance(tokens, list) and tokens else rows
        layers, context_length = keys.count("block_count"), keys.count("context_length")
        if layers > _MAX_LAYERS:
            raise UnsupportedModel(f"{layers} layers are more than the {_MAX_LAYERS} that are supported")
        rope, local_rope = read_rope(keys, family, file.tensors.keys(), head_dim, context)
        return cls(
            name=str(file.metadata.get("general.name", file.path.stem)),
            architecture=family.name,
            layers=layers,
            width=width,
            feed_forward=keys.count("feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rms_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
            context_length=context_length,
            vocabulary=vocabulary,
            tied_embeddings=family.output == "tied" or "output.weight" not in file.tensors,
            rope=rope,
            local_rope=None if local_rope == rope else local_rope,
            windows=_windows(keys, family, layers),
            attention_scale=(width // heads) ** -0.5 if layers == family.width_scaled_layers else 0.0,
            attention_softcap=_softcap(keys, "attn_logit_softcapping", family.attention_softcap),
            output_softcap=_softcap(keys, "final_logit_softcapping", family.output_softcap),
            longest_context=rope.original_context if rope.factors == SHORT_FACTORS else 0,
            padding=rows - vocabulary,
        )


def _family(keys: Hyperparameters) -> Architecture:
    family = ARCHITECTURES.get(keys.architecture)
    if family is None:
        supported = "; ".join(f"{known.name} ({known.models})" for known in ARCHITECTURES.values())
        raise UnsupportedModel(
            f"architecture {keys.architecture!r}{_state(keys)} is not supported; supported: {supported}"
        )
    if keys.get("expert_count"):
        raise UnsupportedModel(f"mixture-of-experts models are not supported; use a dense {family.models} model")
    return family


def _state(keys: Hyperparameters) -> str:
    """Return what a file of an unknown architecture says that its layers keep, where that is not K and V alone."""
    if keys.architecture == "gpt-oss":
        return ", with experts and learned sinks of attention,"
    for marks, state in _STATES:
        if any(keys.get(mark) is not None for mark in marks):
            return f", {state},"
    return ""


def _windows(keys: Hyperparameters, family: Architecture, layers: int) -> tuple[int, ...]:
    """Return for each layer the number of tokens that it sees, 0: all. `period` is llama.cpp's `set_swa_pattern`."""
    rule, named = family.windows, keys.get("attention.sliding_window")
    if rule is None:
        if named and not family.ignores_window:
            raise UnsupportedModel(f"a sliding window ({named!r}) is not supported in {family.models} models")
        return (0,) * layers
    period = _period(keys, rule.period)
    if not (rule.default_tokens if named is None else named):
        return (0,) * layers
    window = keys.count("attention.sliding_window", rule.default_tokens)
    return tuple(window if period == 0 or layer % period < period - 1 else 0 for layer in range(layers))


def _period(keys: Hyperparameters, default: int) -> int:
    named = keys.get("attention.sliding_window_pattern")
    if named is None:
        return default
    if isinstance(named, bool) or not isinstance(named, int) or named < 0:
        raise UnsupportedModel(
            f"metadata {keys.architecture}.attention.sliding_window_pattern must be a number of layers, is {named!r}"
        )
    return named


def _softcap(keys: Hyperparameters, key: str, default: float | None) -> float:
    if default is None:
        return 0.0
    cap = keys.number(key, default)
    if cap < 0 or math.isinf(cap):
        raise UnsupportedModel(f"metadata {keys.architecture}.{key} must not be negative, is {cap:g}")
    return cap


def _check_heads(keys: Hyperparameters, heads: int, kv_heads: int, head_dim: int) -> None:
    """Check everything that a kernel or GGML_ASSERT would otherwise fail on."""
    sizes = ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa")
    if any(keys.count(key, head_dim) != head_dim for key in sizes):
        raise UnsupportedModel("models whose K and V heads differ in size, or in windows, are not supported")
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise UnsupportedModel(f"head size {head_dim} must be a multiple of 8 up to {MAX_HEAD_DIM}")
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} query heads cannot share {kv_heads} K/V heads evenly")
