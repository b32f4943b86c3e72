"""Reads a model's hyperparameters from GGUF metadata and refuses what the graph cannot run.

Owns the names of the metadata keys and their defaults, which are llama.cpp's. It never touches tensor bytes.
Invariant: a `ModelConfig` that exists describes a model that `graph.llama` can build; whatever would silently
compute something else (experts, biases, other architectures) is refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from kvstore_engine.errors import UsageError
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.gguf.tensor_types import BF16, F16, F32, Q4_0, Q4_1, Q8_0, TENSOR_TYPES

SUPPORTED_ARCHITECTURES = ("llama",)
SUPPORTED_TYPES = (F32, F16, BF16, Q8_0, Q4_0, Q4_1)
MAX_HEAD_DIM = 256
_MAX_LAYERS = 1024


class UnsupportedModel(UsageError):
    """A sound GGUF file whose model this engine does not run; the message names what, and what would do."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, in the terms of `ggml_rope_ext`.

    Su et al., "RoFormer" (2021); linear interpolation by `frequency_scale`; YaRN (Peng et al., 2023) when
    `yarn_extrapolation` is not 0. Llama 3's per-frequency factors come as the tensor `rope_freqs.weight`.
    """

    dimensions: int
    frequency_base: float
    frequency_scale: float
    original_context: int
    yarn_extrapolation: float
    yarn_attention_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float

    def describe(self) -> str:
        """One line that differs whenever rotated keys would differ; part of the cache fingerprint."""
        line = f"norm/{self.dimensions}/base={self.frequency_base:g}/scale={self.frequency_scale:g}"
        if self.yarn_extrapolation:
            line += (
                f"/yarn={self.yarn_extrapolation:g},{self.yarn_attention_factor:g},{self.yarn_beta_fast:g},"
                f"{self.yarn_beta_slow:g},{self.original_context}"
            )
        return line


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama decoder. `width` is the residual stream, `kv_width` one token's K (or V)."""

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

    @property
    def kv_width(self) -> int:
        """Elements of one token's K, or V, in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one K/V head (1 without GQA)."""
        return self.heads // self.kv_heads

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        """Read and check the hyperparameters of `file`. Raises UnsupportedModel."""
        keys = _Keys(file.metadata)
        _refuse_unsupported(file, keys)
        heads = keys.count("attention.head_count")
        width = keys.count("embedding_length")
        head_dim = keys.count("attention.key_length", width // heads)
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise UnsupportedModel("the model has no tensor token_embd.weight: the file is incomplete")
        config = cls(
            name=str(file.metadata.get("general.name", file.path.stem)),
            architecture=keys.architecture,
            layers=keys.count("block_count"),
            width=width,
            feed_forward=keys.count("feed_forward_length"),
            heads=heads,
            kv_heads=keys.count("attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
            context_length=keys.count("context_length"),
            vocabulary=embedding.shape[-1],
            tied_embeddings="output.weight" not in file.tensors,
            rope=_rope(keys, head_dim),
        )
        _check_shape(config, keys)
        return config


class _Keys:
    """Typed access to `{architecture}.*` metadata; a missing or ill-typed key is an UnsupportedModel."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture", ""))

    def get(self, key: str) -> object:
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise UnsupportedModel(f"metadata {self.architecture}.{key} must be a positive integer, is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UnsupportedModel(f"metadata {self.architecture}.{key} must be a number, is {value!r}")
        return float(value)


def _refuse_unsupported(file: GGUFFile, keys: _Keys) -> None:
    if keys.architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UnsupportedModel(f"architecture {keys.architecture!r} is not supported; supported: {supported}")
    if keys.get("expert_count"):
        raise UnsupportedModel("mixture-of-experts models are not supported; use a dense Llama model")
    for tensor in file.tensors.values():
        if tensor.ggml_type not in SUPPORTED_TYPES:
            supported = ", ".join(TENSOR_TYPES[number].name for number in SUPPORTED_TYPES)
            raise UnsupportedModel(
                f"quantisation {tensor.type_name} ({tensor.name}) is not supported; supported: {supported}"
            )


def _rope(keys: _Keys, head_dim: int) -> RopeConfig:
    scaling = keys.get("rope.scaling.type")
    if scaling is not None and scaling not in ("none", "linear", "yarn"):
        raise UnsupportedModel(f"RoPE scaling {scaling!r} is not supported; supported: none, linear, yarn")
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0)
    return RopeConfig(
        dimensions=keys.count("rope.dimension_count", head_dim),
        frequency_base=keys.number("rope.freq_base", 10000.0),
        frequency_scale=1.0 / factor if factor and scaling != "none" else 1.0,
        original_context=keys.count("rope.scaling.original_context_length", keys.count("context_length")),
        yarn_extrapolation=keys.number("rope.scaling.yarn_ext_factor", 1.0) if scaling == "yarn" else 0.0,
        yarn_attention_factor=keys.number("rope.scaling.attn_factor", 1.0),
        yarn_beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        yarn_beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _check_shape(config: ModelConfig, keys: _Keys) -> None:
    """Everything that a kernel or GGML_ASSERT would otherwise meet first."""
    if keys.count("attention.value_length", config.head_dim) != config.head_dim:
        raise UnsupportedModel("models whose K and V heads differ in size are not supported")
    if config.head_dim % 8 or not 8 <= config.head_dim <= MAX_HEAD_DIM:
        raise UnsupportedModel(f"head size {config.head_dim} must be a multiple of 8 up to {MAX_HEAD_DIM}")
    if config.heads % config.kv_heads:
        raise UnsupportedModel(f"{config.heads} query heads cannot share {config.kv_heads} K/V heads evenly")
    if config.rope.dimensions != config.head_dim:  # llama.cpp refuses it for this architecture, too
        raise UnsupportedModel(f"RoPE over {config.rope.dimensions} of {config.head_dim} dimensions is not supported")
    if config.layers > _MAX_LAYERS:
        raise UnsupportedModel(f"{config.layers} layers are more than the {_MAX_LAYERS} that are supported")
