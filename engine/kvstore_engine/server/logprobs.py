"""Log probabilities in the two forms of OpenAI's API.

Owns the spelling of tokens in JSON. A value is never below `FLOOR`: JSON has no infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore_engine.batching import Token
from kvstore_engine.tokenizer import Tokenizer

FLOOR = -9999.0


def chat_entry(tokenizer: Tokenizer, event: Token) -> dict[str, Any]:
    """One token of a chat's `logprobs.content`."""
    return {
        **_entry(tokenizer, event.token, event.logprob),
        "top_logprobs": [_entry(tokenizer, token, value) for token, value in event.top],
    }


def completion_entries(tokenizer: Tokenizer, events: Sequence[Token], offset: int) -> dict[str, Any]:
    """A completion's `logprobs`; `offset` is where the first token's text begins in the answer."""
    texts = [_text(tokenizer, event.token) for event in events]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_floored(event.logprob) for event in events],
        "top_logprobs": [_top(tokenizer, event) for event in events],
        "text_offset": offsets,
    }


def _top(tokenizer: Tokenizer, event: Token) -> dict[str, float]:
    """The likeliest tokens first, and the chosen one even if it is not one of them, as in OpenAI's API."""
    values: dict[str, float] = {}
    for token, value in (*event.top, (event.token, event.logprob)):
        values.setdefault(_text(tokenizer, token), _floored(value))  # two tokens may look the same
    return values


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    piece = tokenizer.piece(token)
    return {"token": piece.decode(errors="replace"), "logprob": _floored(logprob), "bytes": list(piece)}


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.piece(token).decode(errors="replace")


def _floored(logprob: float | None) -> float:
    return FLOOR if logprob is None else max(FLOOR, logprob)
