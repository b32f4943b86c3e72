"""Beam search in the plainest way: every continuation of every beam, each beam's logits computed anew from its tokens.

What the engine's beams are compared with. The rules are those of Hugging Face's transformers (`BeamHypotheses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Answer = tuple[list[int], float]


def search(
    logits_of: Callable[[list[int]], Floats],
    prompt: Sequence[int],
    *,
    width: int,
    most_tokens: int,
    end_ids: frozenset[int] = frozenset(),
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
) -> list[Answer]:
    """The best `width` answers with their scores, the best first. `logits_of(tokens)` is the row after all `tokens`."""
    ended: list[Answer] = []

    def end(tokens: list[int], total: float, length: int) -> None:
        ended.append((tokens, total / length**length_penalty))
        if len(ended) > width:
            ended.remove(min(ended, key=lambda answer: answer[1]))

    beams: list[Answer] = [([], 0.0)]
    for length in range(1, most_tokens + 1):
        continued = [
            (tokens, token, total + logprob)
            for tokens, total in beams
            for token, logprob in enumerate(_log_softmax(logits_of([*prompt, *tokens])))
        ]
        continued.sort(key=lambda each: -each[2])
        beams = []
        for rank, (tokens, token, total) in enumerate(continued):
            if token in end_ids and rank < width:
                end(tokens, total, length)
            elif token not in end_ids:
                beams.append(([*tokens, token], total))
            if len(beams) == width:
                break
        best = max(total for _, total in beams)
        if len(ended) == width:
            reach = most_tokens if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or min(score for _, score in ended) >= best / reach**length_penalty:
                break
    else:
        for tokens, total in beams:
            end(tokens, total, most_tokens)
    return sorted(ended, key=lambda answer: -answer[1])


def _log_softmax(row: Floats) -> list[float]:
    wide = row.astype(np.float64)
    most = float(wide.max())
    total = most + math.log(float(np.exp(wide - most).sum()))
    values: list[float] = (wide - total).tolist()
    return values
