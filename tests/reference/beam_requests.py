"""Requests for a beam search over the twin model, and what a plain search says of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest

from kvstore_engine.batching import BeamSettings, Request
from tests.reference.batch_runs import Outcome, request
from tests.reference.plain_beam_search import search
from tests.reference.twin_compute import logits_alone, text_of

ENDS = frozenset({7, 21})


def prompt_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


def beams(
    name: str,
    prompt: Sequence[int],
    most_tokens: int,
    width: int,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    **changes: Any,
) -> Request:
    changes = {"n": width, "ignore_end": False, **changes}
    return request(name, prompt, most_tokens, beams=BeamSettings(width, length_penalty, early_stopping), **changes)


def assert_plain(outcome: Outcome, wanted: Request, ends: frozenset[int] = ENDS) -> None:
    """The answers are what a search that computes everything anew finds."""
    settings = wanted.settings
    assert settings.beams is not None
    plain = search(
        logits_alone,
        wanted.tokens.tolist(),
        width=settings.beams.width,
        most_tokens=settings.max_tokens,
        end_ids=frozenset() if settings.ignore_end else ends,
        length_penalty=settings.beams.length_penalty,
        early_stopping=settings.beams.early_stopping,
    )
    for index, (tokens, score) in enumerate(plain[: settings.n]):
        key = wanted.id, index
        assert outcome.tokens[key] == tokens
        assert outcome.text[key] == text_of(tokens)
        end = outcome.finished[key]
        assert end.score == pytest.approx(score, abs=1e-9)
        assert end.usage.generated_tokens == len(tokens)
        assert end.reason == ("end" if len(tokens) < settings.max_tokens else end.reason)
