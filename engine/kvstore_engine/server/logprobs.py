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


def completion_entries(tokenizer: Tokenizer, events: Sequence[Token], offsets: list[int]) -> dict[str, Any]:
    """A completion's `logprobs`; `offsets`: for each event the place in the text of the character it belongs to."""
    return {
        "tokens": [_text(tokenizer, event.token) for event in events],
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
    """A part of a character is written by its bytes, as in OpenAI's API: else parts would look the same."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _floored(logprob: float | None) -> float:
    return FLOOR if logprob is None else max(FLOOR, logprob)
