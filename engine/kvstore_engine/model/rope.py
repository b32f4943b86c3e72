"""Rotary position embedding: a file's settings in the terms of `ggml_rope_ext`.

The module reads the `rope.*` keys and makes the line that stands for the rotation in the cache's fingerprint. It does
not rotate.

Su et al., "RoFormer" (2021); linear interpolation by `frequency_scale`; YaRN (Peng et al., 2023) when
`yarn_extrapolation` is not 0, with the paper's constants: llama.cpp reads a file's `yarn_ext_factor`,
`yarn_attn_factor`, `yarn_beta_fast`, `yarn_beta_slow` and `yarn_log_multiplier` for other architectures only; a divisor
for each frequency (Llama 3; LongRoPE, Ding et al., 2024) by a tensor of the file.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from kvstore_engine.model.architecture import Architecture
from kvstore_engine.model.metadata import Hyperparameters, UnsupportedModel

FREQUENCY_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_LEAST_FACTOR = 0.01
_SCALINGS = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The settings of the rotary position embedding in some layers. With `neox`, channel i and channel i + dimensions /
    2 are rotated as a pair, otherwise neighbouring channels. `factors` is the name of the tensor with a divisor for
    each frequency, or "". `attention_factor` is the parameter of `ggml_rope_ext`, which multiplies it by 1 + 0.1 ln(1 /
    frequency_scale) for YaRN.
    """

    dimensions: int
    frequency_base: float
    frequency_scale: float
    original_context: int
    yarn_extrapolation: float
    attention_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    neox: bool = False
    factors: str = ""

    def describe(self) -> str:
        """Return one line of text that differs whenever two settings rotate keys differently. It is a part of the
        fingerprint under which blocks are stored.
        """
        line = f"{'neox' if self.neox else 'norm'}/{self.dimensions}"
        line += f"/base={_exact(self.frequency_base)}/scale={_exact(self.frequency_scale)}"
        if self.yarn_extrapolation:
            yarn = (self.yarn_extrapolation, self.attention_factor, self.yarn_beta_fast, self.yarn_beta_slow)
            line += f"/yarn={','.join(map(_exact, yarn))},{self.original_context}"
        elif self.attention_factor != 1.0:
            line += f"/magnitude={_exact(self.attention_factor)}"
        # A file has at most one set of Llama 3's factors, so the weights' digest distinguishes them.
        return line if self.factors in ("", FREQUENCY_FACTORS) else f"{line}/{self.factors.removesuffix('.weight')}"


def read_rope(
    keys: Hyperparameters, family: Architecture, tensors: Collection[str], head_dim: int, context: int | None
) -> tuple[RopeConfig, RopeConfig]:
    """Return two rotations, of the layers that see everything and of the layers with a sliding window, as the metadata
    `keys` of a model of `family` give them. `tensors` are the names of the file's tensors; `context` is the longest
    sequence in tokens. Raises UnsupportedModel.
    """
    scaling = keys.get("rope.scaling.type")
    if scaling is not None and scaling not in _SCALINGS:
        raise UnsupportedModel(f"RoPE scaling {scaling!r} is not supported; supported: {', '.join(_SCALINGS)}")
    factor = _factor(keys)
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    dimensions = keys.count("rope.dimension_count", head_dim)
    if dimensions > head_dim or dimensions % 2 or (dimensions < head_dim and not family.partial_rotation):
        raise UnsupportedModel(f"RoPE over {dimensions} of {head_dim} dimensions is not supported")
    if family.windows and (windowed := keys.count("rope.dimension_count_swa", dimensions)) != dimensions:
        raise UnsupportedModel(
            f"RoPE over {windowed} dimensions within windows and {dimensions} elsewhere is not supported"
        )
    is_yarn = scaling == "yarn"
    everywhere = RopeConfig(
        dimensions=dimensions,
        frequency_base=keys.number("rope.freq_base", 10000.0),
        frequency_scale=1.0 / factor if factor and scaling != "none" else 1.0,
        original_context=original,
        yarn_extrapolation=1.0 if is_yarn else 0.0,
        attention_factor=keys.number("rope.scaling.attn_factor", 1.0) * (_shrunk(factor) if is_yarn else 1.0),
        yarn_beta_fast=32.0,
        yarn_beta_slow=1.0,
        neox=family.rotation == "neox",
        factors=_factors(family, tensors, long=context is not None and context > original),
    )
    local_base = family.windows.local_base if family.windows else None
    local = replace(
        everywhere,
        frequency_base=keys.number(
            "rope.freq_base_swa", everywhere.frequency_base if local_base is None else local_base
        ),
        frequency_scale=everywhere.frequency_scale if local_base is None else 1.0,
    )
    return everywhere, local


def _factor(keys: Hyperparameters) -> float:
    """Return how many times longer contexts may be than in the first training; 0: not given. Raises
    UnsupportedModel.
    """
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0)
    if factor and factor < _LEAST_FACTOR:
        raise UnsupportedModel(
            f"a RoPE scaling factor of {factor:g} is not supported: it must be {_LEAST_FACTOR:g} or more"
        )
    return factor


def _shrunk(factor: float) -> float:
    """Return the value that undoes `ggml_rope_ext`'s factor for a shorter context: YaRN raises attention in longer ones
    alone.
    """
    return 1.0 / (1.0 + 0.1 * math.log(factor)) if 0 < factor < 1 else 1.0


def _factors(family: Architecture, tensors: Collection[str], *, long: bool) -> str:
    if "freqs" in family.rope_factors and FREQUENCY_FACTORS in tensors:
        return FREQUENCY_FACTORS
    chosen = LONG_FACTORS if long else SHORT_FACTORS
    return chosen if "long_short" in family.rope_factors and chosen in tensors else ""


def _exact(number: float) -> str:
    """Return `number` in the fewest digits that identify it."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)
