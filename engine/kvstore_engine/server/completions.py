"""`POST /v1/completions`: prompts as text or token ids, several at once.

The module owns the fields that only completions have.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from kvstore_engine.server.api_errors import invalid
from kvstore_engine.server.body import Flag, Integer, read, unsupported
from kvstore_engine.server.keys import KeyOwner
from kvstore_engine.server.messages import Ask, Int32Array
from kvstore_engine.server.renderers import CompletionRenderer, Renderer
from kvstore_engine.server.service import Service
from kvstore_engine.server.shared_body import MAX_LOGPROBS, SharedBody, check_length, read_grammar

MAX_PROMPTS = 64
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """The plan for one HTTP request: `asks`, the requests to the engine, and `renderer`, which writes the answer, as a
    stream or as a whole.
    """

    asks: list[Ask]
    renderer: Renderer
    stream: bool
    include_usage: bool


class CompletionBody(SharedBody):
    """The fields of a completion request. `prompt` is a text, a list of token ids, or a list of either."""

    prompt: Any
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Flag = False
    suffix: Annotated[Any, unsupported("this engine does not fill in the middle", "")] = None

    @model_validator(mode="after")
    def _combine_echo(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise invalid("echo with logprobs is not supported: a prompt's log probabilities are not computed", "echo")
        return self


async def plan(fields: dict[str, Any], caller: KeyOwner, service: Service) -> CompletionPlan:
    """Check the `fields` of a completion request, and return the requests to the engine and the writer of the response.
    `caller` is the owner of the API key. Raises ApiError if something cannot be done as asked.
    """
    body = read(CompletionBody, fields)
    service.model.check_name(body.model)
    grammar = await read_grammar(body.response_format, body.structured_outputs)
    body.check_grammar(grammar)
    prompts = await _prompts(body.prompt, service)
    if len(prompts) * body.n > MAX_PROMPTS:
        raise invalid(f"{len(prompts)} prompts with n = {body.n} are more than {MAX_PROMPTS} answers", "n")
    echoes = [_echo(text, tokens, service) if body.echo else "" for text, tokens in prompts for _ in range(body.n)]
    renderer = CompletionRenderer(service.model, echoes, with_logprobs=body.logprobs is not None)
    asks = [
        body.ask(
            f"{renderer.id}-{number}",
            tokens,
            service,
            caller,
            param="prompt",
            logprobs=body.logprobs,
            grammar=grammar,
            default_max_tokens=_DEFAULT_MAX_TOKENS,
        )
        for number, (_, tokens) in enumerate(prompts)
    ]
    return CompletionPlan(asks, renderer, body.stream, body.include_usage)


async def _prompts(value: Any, service: Service) -> list[tuple[str | None, Int32Array]]:
    many = value if isinstance(value, list) and value and not is_tokens(value) else [value]
    if len(many) > MAX_PROMPTS:
        raise invalid(f"at most {MAX_PROMPTS} prompts at once, got {len(many)}", "prompt")
    return await asyncio.gather(*(_prompt(one, service) for one in many))


async def _prompt(value: Any, service: Service) -> tuple[str | None, Int32Array]:
    if isinstance(value, str):
        check_length(value, service, "prompt")
        return value, await service.model.encode(value, add_special=True, parse_special=True)
    if is_tokens(value):
        return None, token_array(value, service, "prompt")
    raise invalid("prompt must be a string, a list of token ids, or a list of either", "prompt")


def _echo(text: str | None, tokens: Int32Array, service: Service) -> str:
    return service.model.tokenizer.decode(tokens.tolist()) if text is None else text


def is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def token_array(value: list[int], service: Service, param: str) -> Int32Array:
    """Return the token ids `value` as int32 [n]. Raises ApiError, which names the field `param`, if one is outside the
    vocabulary.
    """
    known = len(service.model.tokenizer.vocabulary.tokens)
    if not all(0 <= token < known for token in value):
        raise invalid(f"token ids must be 0 to {known - 1}", param)
    return np.array(value, np.int32)
