"""`POST /v1/completions`: prompts as text or token ids, several at once.

Owns the fields that only completions have.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore_engine.server.api_errors import invalid
from kvstore_engine.server.asking import check_length, read_shared
from kvstore_engine.server.body import Body
from kvstore_engine.server.forms import CompletionForm
from kvstore_engine.server.frames import Int32Array
from kvstore_engine.server.keys import Caller
from kvstore_engine.server.messages import Ask
from kvstore_engine.server.service import Service

MAX_PROMPTS = 64
MAX_LOGPROBS = 20
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request's JSON comes to: what the engine is asked, and the form of the answer."""

    asks: list[Ask]
    form: Any
    stream: bool
    include_usage: bool


async def plan(fields: dict[str, Any], caller: Caller, service: Service) -> Plan:
    """Read the body. ApiError for anything that cannot be done as asked."""
    body = Body(fields)
    shared = await read_shared(body, caller, service, default_max_tokens=_DEFAULT_MAX_TOKENS)
    prompts = await _prompts(body.require("prompt"), service)
    logprobs = body.integer("logprobs", 0, MAX_LOGPROBS)
    echo = body.flag("echo")
    if echo and logprobs is not None:
        raise invalid("echo with logprobs is not supported: a prompt's log probabilities are not computed", "echo")
    body.refuse("suffix", ("",), "this engine does not fill in the middle")
    body.end()
    if len(prompts) * shared.n > MAX_PROMPTS:
        raise invalid(f"{len(prompts)} prompts with n = {shared.n} are more than {MAX_PROMPTS} answers", "n")
    decode = service.model.tokenizer.decode
    echoes = (
        [text if text is not None else decode(tokens.tolist()) for text, tokens in prompts]
        if echo
        else [""] * len(prompts)
    )
    form = CompletionForm(
        service.model, [text for text in echoes for _ in range(shared.n)], with_logprobs=logprobs is not None
    )
    asks = [
        shared.ask(f"{form.id}-{number}", tokens, service, logprobs, param="prompt")
        for number, (_, tokens) in enumerate(prompts)
    ]
    return Plan(asks, form, shared.stream, shared.include_usage)


async def _prompts(value: Any, service: Service) -> list[tuple[str | None, Int32Array]]:
    """A text, token ids, or a list of either."""
    if value is None:
        raise invalid("a prompt is needed", "prompt")
    many = value if isinstance(value, list) and value and not _is_tokens(value) else [value]
    if len(many) > MAX_PROMPTS:
        raise invalid(f"at most {MAX_PROMPTS} prompts at once, got {len(many)}", "prompt")
    return await asyncio.gather(*(_prompt(one, service) for one in many))


async def _prompt(value: Any, service: Service) -> tuple[str | None, Int32Array]:
    if isinstance(value, str):
        check_length(value, service, "prompt")
        return value, await service.model.encode(value, add_special=True, parse_special=True)
    if _is_tokens(value):
        return None, token_array(value, service, "prompt")
    raise invalid("prompt must be a string, a list of token ids, or a list of either", "prompt")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def token_array(value: list[int], service: Service, param: str) -> Int32Array:
    """Token ids as the engine takes them. ApiError if one is outside the vocabulary."""
    known = len(service.model.tokenizer.vocabulary.tokens)
    if not all(0 <= token < known for token in value):
        raise invalid(f"token ids must be 0 to {known - 1}", param)
    return np.array(value, np.int32)
