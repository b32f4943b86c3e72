"""What costs are fitted to: features of the order of 1, and coefficients in seconds for each unit of them.

A step computes some tokens, which attend to pairs of a token and one before it or itself; a load has some bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_restore.costs import ComputeCost, LinkCost

_TOKENS, _ATTENDED, _BYTES = 512.0, 512.0 * 1024.0, 16.0 * 1024 * 1024
COMPUTE_PRIOR = (0.003, 0.5, 0.1)  # a small model on a laptop core; replaced by the first measurements
LINK_PRIOR = (0.001, 0.004)


def compute_features(tokens: float, attended: float) -> tuple[float, float, float]:
    return 1.0, tokens / _TOKENS, attended / _ATTENDED


def load_features(nbytes: float) -> tuple[float, float]:
    return 1.0, nbytes / _BYTES


def compute_cost(coefficients: Sequence[float]) -> ComputeCost:
    """A coefficient below 0 counts as 0."""
    fixed_s, token_s, attended_s = (max(0.0, value) for value in coefficients)
    return ComputeCost(fixed_s, token_s / _TOKENS, attended_s / _ATTENDED)


def link_cost(coefficients: Sequence[float]) -> LinkCost:
    """A coefficient below 0 counts as 0."""
    fixed_s, byte_s = (max(0.0, value) for value in coefficients)
    return LinkCost(fixed_s, byte_s / _BYTES)
