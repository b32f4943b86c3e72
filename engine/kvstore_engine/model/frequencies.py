"""The angles of a rotation, as `ggml_rope_ext` computes them, for rotation by a table.

Pure: it takes a `RopeConfig` and returns one angle a token for each pair of channels, and the factor of the rotated
pair.
"""

import math

import numpy as np
import numpy.typing as npt

from kvstore_engine.model.rope import RopeConfig

FloatArray = npt.NDArray[np.float64]


def rotation(rope: RopeConfig, factors: npt.NDArray[np.float32] | None) -> tuple[FloatArray, float]:
    """Return the angles of a rotary embedding, and the factor of the rotated channels. The angles are the radians a
    token by which each pair of channels turns, float64 [dimensions / 2]. `factors`, if given, has a divisor for each
    angle.
    """
    pairs = np.arange(rope.dimensions // 2, dtype=np.float64)
    plain = rope.frequency_base ** (-2.0 * pairs / rope.dimensions)
    if factors is not None:
        plain = plain / factors
    scaled, magnitude = rope.frequency_scale * plain, rope.attention_factor
    if not rope.yarn_extrapolation:
        return scaled, magnitude
    first = max(0.0, math.floor(_turning_pair(rope, rope.yarn_beta_fast)))
    last = min(rope.dimensions - 1.0, math.ceil(_turning_pair(rope, rope.yarn_beta_slow)))
    ramp = 1.0 - np.clip((pairs - first) / max(0.001, last - first), 0.0, 1.0)
    share = ramp * rope.yarn_extrapolation
    return scaled * (1.0 - share) + plain * share, magnitude * (1.0 + 0.1 * math.log(1.0 / rope.frequency_scale))


def _turning_pair(rope: RopeConfig, turns: float) -> float:
    """Return the pair that makes `turns` turns in the original context (YaRN's correction dimension)."""
    tokens_a_turn = rope.original_context / (turns * 2 * math.pi)
    return rope.dimensions * math.log(tokens_a_turn) / (2 * math.log(rope.frequency_base))
