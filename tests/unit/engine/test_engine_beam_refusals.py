"""Beam searches that cannot be done are refused by name before they begin."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore_engine.errors import UsageError
from kvstore_engine.sampler import SamplingSettings
from tests.reference.batch_runs import twin_engine
from tests.reference.beam_requests import beams, prompt_of


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n": 5}, "finds no 5 answers"),
        ({"stop": ("x",)}, "stop strings"),
        ({"constraint": lambda: None}, "a constraint"),
        ({"sampling": SamplingSettings(temperature=0.5)}, "draws nothing"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"width": 17}, "16 sequences that run"),
        ({"width": 0}, "1 to 64 beams"),
        ({"most_tokens": 3000}, "larger pool"),
        ({"early_stopping": "maybe"}, "early_stopping"),
    ],
)
def test_a_search_that_cannot_be_done_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    engine = twin_engine()
    settings: dict[str, Any] = {"width": 4, "most_tokens": 10, **changes}
    settings.setdefault("n", max(1, min(settings["width"], 4)))
    with pytest.raises(UsageError, match=why):
        engine.add(beams("b", prompt_of(1, 20), settings.pop("most_tokens"), settings.pop("width"), **settings))
    assert not engine.has_work


def test_a_search_needs_prefix_sharing() -> None:
    with pytest.raises(UsageError, match="prefix sharing"):
        twin_engine(prefix_sharing=False).add(beams("b", prompt_of(1, 20), 5, 2))
