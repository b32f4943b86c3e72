"""Predicts the length of an answer from those that have ended, by tenant and length of prompt.

Owns histograms of answer lengths that fade. It never sees tokens. A prediction is the expected rest given that the
answer has not ended yet, so that an unusually long one is not expected to end at every next token.
"""

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

_EDGES = np.concatenate(([0.0], 2.0 ** (np.arange(0, 41) / 2)))  # two buckets an octave, up to a million tokens
_MIDDLES = (_EDGES[:-1] + _EDGES[1:]) / 2
_FADING = 0.99
_ENOUGH = 3.0
_UNKNOWN_TOKENS = 256.0
_MOST_KEYS = 4096
_Key = tuple[str, int] | str | None


class LengthPredictor:
    """Predicts from the closest kind with enough samples: tenant and prompt length, tenant, all."""

    def __init__(self) -> None:
        self._seen: OrderedDict[_Key, npt.NDArray[np.float64]] = OrderedDict()

    def observe(self, tenant: str, prompt_tokens: int, generated: int) -> None:
        """An answer ended by itself or at its limit, after `generated` tokens."""
        bucket = int(np.searchsorted(_EDGES, generated, side="right")) - 1
        for key in _keys(tenant, prompt_tokens):
            counts = self._seen.setdefault(key, np.zeros(len(_MIDDLES)))
            self._seen.move_to_end(key)
            counts *= _FADING
            counts[min(bucket, len(counts) - 1)] += 1.0
        while len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)

    def remaining(self, tenant: str, prompt_tokens: int, generated: int, limit: int) -> float:
        """Tokens still to come of an answer that has `generated` and may have `limit`; at least 1."""
        most = max(limit - generated, 1)
        for key in _keys(tenant, prompt_tokens):
            counts = self._seen.get(key)
            if counts is None:
                continue
            longer = counts * (generated < _EDGES[1:])
            weight = float(longer.sum())
            if weight >= _ENOUGH:
                rest = np.clip(_MIDDLES - generated, 1.0, most)
                return float(longer @ rest) / weight
        return float(min(most, max(_UNKNOWN_TOKENS, generated) / 2 + 1))


def _keys(tenant: str, prompt_tokens: int) -> tuple[_Key, ...]:
    return (tenant, prompt_tokens.bit_length()), tenant, None
