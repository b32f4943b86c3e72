"""The fields of a request that asks for a beam search: those of vLLM's OpenAI server.

Owns `use_beam_search`, `best_of`, `length_penalty` and `early_stopping`, and what they cannot be combined with.
"""

from __future__ import annotations

from kvstore_engine.batching import BeamSettings
from kvstore_engine.batching.request import MAX_ANSWERS, MAX_LENGTH_PENALTY
from kvstore_engine.constrain import Grammar
from kvstore_engine.sampler import SamplingSettings
from kvstore_engine.server.api_errors import invalid
from kvstore_engine.server.body import Body


def read_beams(body: Body, n: int, *, stream: bool) -> BeamSettings | None:
    """The search that is asked for: `best_of` beams, `n` unless that is given. ApiError 400 for what cannot be."""
    if not body.flag("use_beam_search"):
        body.refuse("best_of", (1, n), "ask for n answers and choose, or for use_beam_search")
        body.refuse("length_penalty", (1, 1.0), "it is for use_beam_search")
        body.refuse("early_stopping", (False,), "it is for use_beam_search")
        return None
    if stream:
        raise invalid(
            "use_beam_search cannot be streamed: which answer is best is known at its end only; leave stream out",
            "stream",
        )
    width = body.integer("best_of", 1, MAX_ANSWERS) or n
    if width < n:
        raise invalid(f"best_of must be at least n = {n}: it is the number of beams, got {width}", "best_of")
    length_penalty = body.number("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, 1.0)
    early = body.take("early_stopping")
    if early is None or early is False:
        return BeamSettings(width, length_penalty)
    if early is True or early == "never":
        return BeamSettings(width, length_penalty, early)
    raise invalid("early_stopping must be true, false or 'never'", "early_stopping")


def check_beams(sampling: SamplingSettings, stop: tuple[str, ...], grammar: Grammar | None) -> None:
    """ApiError 400 if a search is asked for together with what it cannot do."""
    if grammar is not None:
        raise invalid("use_beam_search cannot be combined with a constrained answer", "use_beam_search")
    if stop:
        raise invalid("use_beam_search cannot be combined with stop", "stop")
    if sampling.temperature not in (0, 1):
        raise invalid("use_beam_search draws nothing: temperature must be left out, 0 or 1", "temperature")
    if sampling.top_k or sampling.top_p < 1:
        name = "top_k" if sampling.top_k else "top_p"
        raise invalid(f"use_beam_search draws nothing: leave {name} out", name)
