"""The differences between families of decoders, as data that configuration, weights and graph read.

The module owns the list of supported architectures. It does not compute or read a file: a family is its tensors, its
rotation, its activation and a few constants, and the one graph builder puts them together. The common parts are not
listed here: RMSNorm before attention and before the feed-forward block, rotary positions, grouped-query attention, a
gated feed-forward block, causal order.

The names of tensors and the defaults are llama.cpp's (src/models/*.cpp); the papers are named below.
"""

from dataclasses import dataclass
from typing import Literal

Extent = Literal["width", "queries", "kv", "qkv", "head", "feed_forward", "gate_and_up"]


@dataclass(frozen=True, slots=True)
class Part:
    """The weight of a layer that files call `blk.N.{name}.weight`: its extents, the contiguous one first. `bias`: a
    file may have a tensor `blk.N.{name}.bias`, which is then added to the product.
    """

    name: str
    shape: tuple[Extent, ...]
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Windows:
    """The settings of layers that see only the last tokens (a sliding window). default_tokens: the window in tokens if
    the file names none; 0: then all layers see everything. period: the last of each `period` layers sees everything,
    unless the file names another number; 0: no layer does. local_base: the frequency base of the rotation in windowed
    layers if the file names none; these layers are then not scaled. None: they rotate as the other layers do.
    """

    default_tokens: int
    period: int
    local_base: float | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """The description of the models that have one value of `general.architecture`. models: their families, for people.
    parts: the weights of a layer; a file has either `attn_qkv` or q, k and v apart. rotation: "normal" rotates
    neighbouring channels as a pair, "neox" a channel of the first half with one of the second. partial_rotation: fewer
    channels than a head has may be rotated. rope_factors: names of tensors that may have a divisor for each frequency.
    activation: the function of the gate; with "swiglu_fused" one matrix computes gate and up.

    windows: the layers with a sliding window; ignores_window: a window that a file names is not used. output: "own" if
    a file may have an output matrix, "tied" if it is always the embeddings'. output_bias: a file may have
    `output.bias`. scaled_embedding: embeddings are multiplied by sqrt(width). width_scaled_layers: in models with this
    number of layers, scores are scaled by the width per head and not by head_dim. attention_softcap, output_softcap:
    the caps if the file names none; None: no cap.
    """

    name: str
    models: str
    parts: tuple[Part, ...]
    rotation: Literal["normal", "neox"]
    activation: Literal["swiglu", "geglu", "swiglu_fused"] = "swiglu"
    partial_rotation: bool = False
    rope_factors: frozenset[Literal["freqs", "long_short"]] = frozenset()
    windows: Windows | None = None
    ignores_window: bool = False
    output: Literal["own", "tied"] = "own"
    output_bias: bool = False
    scaled_embedding: bool = False
    width_scaled_layers: int = 0
    attention_softcap: float | None = None
    output_softcap: float | None = None


_NORMS = (Part("attn_norm", ("width",)), Part("ffn_norm", ("width",)))
_PROJECTIONS = (
    Part("attn_qkv", ("width", "qkv"), bias=True),
    Part("attn_q", ("width", "queries"), bias=True),
    Part("attn_k", ("width", "kv"), bias=True),
    Part("attn_v", ("width", "kv"), bias=True),
)
_ATTENTION = (*_NORMS, *_PROJECTIONS, Part("attn_output", ("queries", "width")))
_HEAD_NORMS = (Part("attn_q_norm", ("head",)), Part("attn_k_norm", ("head",)))
_BRANCH_NORMS = (Part("post_attention_norm", ("width",)), Part("post_ffw_norm", ("width",)))
_FEED_FORWARD = (
    Part("ffn_gate", ("width", "feed_forward")),
    Part("ffn_up", ("width", "feed_forward")),
    Part("ffn_down", ("feed_forward", "width")),
)

# Touvron et al., "LLaMA" (2023). Mistral (Jiang et al., 2023) is the same with a window over all layers.
_LLAMA = Architecture(
    name="llama",
    models="Llama 2 and 3, Mistral, SmolLM2",
    parts=(
        *_NORMS,
        *_PROJECTIONS,
        Part("attn_output", ("queries", "width"), bias=True),
        *(Part(part.name, part.shape, bias=True) for part in _FEED_FORWARD),
    ),
    rotation="normal",
    rope_factors=frozenset({"freqs", "long_short"}),
    windows=Windows(default_tokens=0, period=0),
)
# Yang et al., "Qwen2" (2024): biases of the projections.
_QWEN2 = Architecture(
    name="qwen2",
    models="Qwen2 and 2.5",
    parts=(*_ATTENTION, *_FEED_FORWARD),
    rotation="neox",
    output_bias=True,
)
# Yang et al., "Qwen3" (2025): heads are normed before they are rotated.
_QWEN3 = Architecture(
    name="qwen3",
    models="Qwen3",
    parts=(*_ATTENTION, *_HEAD_NORMS, *_FEED_FORWARD),
    rotation="neox",
)
# Gemma Team, "Gemma 2" (2024): norms after each block as well, soft caps, every other layer windowed.
_GEMMA2 = Architecture(
    name="gemma2",
    models="Gemma 2",
    parts=(*_ATTENTION, *_FEED_FORWARD, *_BRANCH_NORMS),
    rotation="neox",
    activation="geglu",
    windows=Windows(default_tokens=4096, period=2),
    output="tied",
    scaled_embedding=True,
    width_scaled_layers=46,  # the 27B model
    attention_softcap=50.0,
    output_softcap=30.0,
)
# Gemma Team, "Gemma 3" (2025): norms of the heads instead of caps, five windowed layers to a full one.
_GEMMA3 = Architecture(
    name="gemma3",
    models="Gemma 3 (text)",
    parts=(*_ATTENTION, *_HEAD_NORMS, *_FEED_FORWARD, *_BRANCH_NORMS),
    rotation="neox",
    activation="geglu",
    windows=Windows(default_tokens=0, period=6, local_base=10000.0),
    scaled_embedding=True,
    width_scaled_layers=62,  # the 27B model
    output_softcap=0.0,
)
# Abdin et al., "Phi-3" (2024); LongRoPE (Ding et al., 2024). llama.cpp ignores the window that files name,
# because converters have written wrong ones (https://github.com/ggml-org/llama.cpp/pull/13676); so do we.
_PHI3 = Architecture(
    name="phi3",
    models="Phi-3, 3.5 and 4 mini",
    parts=(
        *_ATTENTION,
        Part("ffn_up", ("width", "gate_and_up")),
        Part("ffn_down", ("feed_forward", "width")),
    ),
    rotation="neox",
    activation="swiglu_fused",
    partial_rotation=True,
    rope_factors=frozenset({"long_short"}),
    ignores_window=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    family.name: family for family in (_LLAMA, _QWEN2, _QWEN3, _GEMMA2, _GEMMA3, _PHI3)
}
