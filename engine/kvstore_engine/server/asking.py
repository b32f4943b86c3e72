"""From a request's JSON to what the engine is asked: the fields that completions and chats share.

Owns their ranges and defaults, and the list of those that this server refuses or may ignore.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from kvstore_engine.batching import BeamSettings
from kvstore_engine.constrain import ANY_OBJECT, Grammar, GrammarError, check_grammar
from kvstore_engine.sampler import SamplingSettings
from kvstore_engine.server.api_errors import invalid, too_long
from kvstore_engine.server.beam_fields import check_beams, read_beams
from kvstore_engine.server.body import Body
from kvstore_engine.server.frames import Int32Array
from kvstore_engine.server.keys import Caller
from kvstore_engine.server.messages import Ask
from kvstore_engine.server.service import Service

MAX_ANSWERS = 64
MAX_STOPS = 16
_MOST_TOKENS = 1 << 30
_SEEDS = 1 << 63
_IGNORED = (
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "verbosity",
    "reasoning_effort",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """How to answer, whatever the prompt is. `max_tokens` None: as far as the context reaches."""

    sampling: SamplingSettings
    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    ignore_end: bool
    grammar: Grammar | None
    beams: BeamSettings | None
    tenant: str
    priority: int
    stream: bool
    include_usage: bool

    def ask(
        self,
        request_id: str,
        tokens: Int32Array,
        service: Service,
        logprobs: int | None,
        grammar: Grammar | None = None,
        *,
        param: str,
    ) -> Ask:
        """For one prompt, which is the field `param`; `grammar` instead of that of the request. ApiError if it does
        not fit the context.
        """
        context, count = service.engine.context, len(tokens)
        if not count:
            raise invalid("the prompt is empty: there is nothing to continue", param)
        if count >= context:
            raise too_long(count, context, param)
        room = context - count + 1  # the last token of an answer is never computed
        return Ask(
            id=request_id,
            tokens=tokens,
            max_tokens=room if self.max_tokens is None else min(self.max_tokens, room),
            sampling=self.sampling,
            n=self.n,
            stop=self.stop,
            ignore_end=self.ignore_end,
            logprobs=logprobs,
            grammar=grammar or self.grammar,
            beams=self.beams,
            tenant=self.tenant,
            priority=self.priority,
        )


async def read_shared(body: Body, caller: Caller, service: Service, *, default_max_tokens: int | None) -> Asked:
    """Take the fields that both endpoints have. ApiError for any that cannot be honoured."""
    service.model.check_name(body.text("model"))
    limit = body.integer("max_completion_tokens", 1, _MOST_TOKENS)
    other = body.integer("max_tokens", 1, _MOST_TOKENS)
    stream = body.flag("stream")
    include_usage = _stream_options(body, stream)
    n = body.integer("n", 1, MAX_ANSWERS) or 1
    beams = read_beams(body, n, stream=stream)
    for name in ("presence_penalty", "frequency_penalty"):
        body.refuse(name, (0, 0.0), "this engine samples without penalties")
    body.refuse("logit_bias", ({},), "constrain the answer with response_format instead")
    body.refuse("store", (False,), "nothing is kept of a request")
    body.ignore(*_IGNORED)
    ignore_end = body.flag("ignore_eos")
    grammar = await _grammar(body)
    if grammar is not None and ignore_end:
        raise invalid("ignore_eos cannot be combined with a constrained answer", "ignore_eos")
    sampling, stop = _sampling(body), _stops(body)
    if beams is not None:
        check_beams(sampling, stop, grammar)
    return Asked(
        sampling=sampling,
        max_tokens=limit or other or default_max_tokens,
        n=n,
        stop=stop,
        ignore_end=ignore_end,
        grammar=grammar,
        beams=beams,
        tenant=caller.tenant,
        priority=caller.allowed(body.integer("priority", -_MOST_TOKENS, _MOST_TOKENS)),
        stream=stream,
        include_usage=include_usage,
    )


def check_length(text: str, service: Service, param: str) -> None:
    """ApiError for a text that can be seen to be too long: to tokenise a whole library takes a minute."""
    least, context = service.model.least_tokens(text), service.engine.context
    if least >= context:
        raise too_long(least, context, param, at_least=True)


async def check(grammar: Grammar, param: str) -> Grammar:
    """`grammar`, if answers can follow it. ApiError 400 if not. In a thread: a large one takes its time."""
    try:
        await asyncio.to_thread(check_grammar, grammar)
    except GrammarError as error:
        raise invalid(str(error), param) from None
    return grammar


def _sampling(body: Body) -> SamplingSettings:
    seed = body.integer("seed", -_SEEDS, _SEEDS - 1)
    return SamplingSettings(
        temperature=body.number("temperature", 0.0, 2.0, 1.0),
        top_k=max(0, body.integer("top_k", -1, _MOST_TOKENS) or 0),
        top_p=body.number("top_p", 0.0, 1.0, 1.0),
        seed=None if seed is None else seed % _SEEDS,
    )


def _stops(body: Body) -> tuple[str, ...]:
    stop = body.strings("stop", MAX_STOPS)
    if "" in stop:
        raise invalid("a stop string must not be empty", "stop")
    return stop


def _stream_options(body: Body, stream: bool) -> bool:
    options = Body(body.mapping("stream_options"))
    include_usage = options.flag("include_usage")
    options.ignore("include_obfuscation")
    options.end()
    if include_usage and not stream:
        raise invalid("stream_options needs stream", "stream_options")
    return include_usage


async def _grammar(body: Body) -> Grammar | None:
    """OpenAI's `response_format`, or vLLM's `structured_outputs` for what that has no word for."""
    form, other = body.mapping("response_format"), body.mapping("structured_outputs")
    if form and other:
        raise invalid("give response_format or structured_outputs, not both", "structured_outputs")
    if other:
        return await check(_structured(other), "structured_outputs")
    if not form:
        return None
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return await check(Grammar("json_schema", ANY_OBJECT), "response_format")
        case "json_schema":
            named = form.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if not isinstance(schema, dict):
                raise invalid("response_format.json_schema.schema must be a JSON schema", "response_format")
            return await check(Grammar("json_schema", json.dumps(schema)), "response_format")
    raise invalid("response_format.type must be 'text', 'json_object' or 'json_schema'", "response_format")


def _structured(fields: dict[str, Any]) -> Grammar:
    if len(fields) != 1:
        raise invalid("structured_outputs takes one of json, regex, choice, grammar", "structured_outputs")
    ((name, value),) = fields.items()
    if name == "json" and isinstance(value, dict | str):
        return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))
    if name == "regex" and isinstance(value, str):
        return Grammar("regex", value)
    if name == "grammar" and isinstance(value, str):
        return Grammar("lark", value)
    if name == "choice" and isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value))
    raise invalid(
        "structured_outputs takes one of: json (a schema), regex (a string), choice (a list of strings), "
        "grammar (a string in Lark's syntax)",
        "structured_outputs",
    )
