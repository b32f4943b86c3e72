"""The fields that completions and chats share, and the engine's request that they make of a prompt.

The module owns their ranges and defaults, the invalid combinations, and the fields that this server refuses or ignores;
and the forms of a grammar that an answer has to follow, OpenAI's `response_format` and vLLM's `structured_outputs`,
each member of which is done or refused. `constrain` checks the content of a schema or a grammar.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvstore_engine.batching.request import MAX_ANSWERS
from kvstore_engine.constrain import ANY_OBJECT, Grammar, GrammarError, check_grammar
from kvstore_engine.sampler import SamplingSettings
from kvstore_engine.server.api_errors import invalid, too_long
from kvstore_engine.server.body import Flag, Integer, Number, Text, not_supported, unsupported
from kvstore_engine.server.keys import KeyOwner
from kvstore_engine.server.messages import Ask, Int32Array
from kvstore_engine.server.service import Service

Schema = dict[str, Any]
MAX_STOPS = 16
MAX_LOGPROBS = 20
_MOST_TOKENS = 1 << 30
_SEEDS = 1 << 63
StopText = Annotated[Text, Field(min_length=1)]
_NO_PENALTIES = unsupported("this engine samples without penalties", 0)


class NamedSchema(BaseModel):
    """A JSON schema in a request, which every answer follows exactly. The schema's name, its description and `strict`
    have no effect.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Text | None = None
    description: Text | None = None
    strict: Flag | None = None
    text: Schema | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """The field `response_format` of a request: free text, any JSON object, or JSON by a schema."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Literal["text", "json_object", "json_schema"]
    text: Schema | None = Field(None, alias="schema")
    json_schema: NamedSchema | None = None


async def read_grammar(response_format: ResponseFormat | None, structured_outputs: dict[str, Any]) -> Grammar | None:
    """Return the grammar that an answer must follow, from one of these two request fields; None if neither asks for
    one. Raises ApiError 400 if answers cannot follow it, or if both fields are given.
    """
    if response_format and structured_outputs:
        raise invalid("give response_format or structured_outputs, not both", "structured_outputs")
    if structured_outputs:
        return await checked(_structured(structured_outputs), "structured_outputs")
    if response_format is None:
        return None
    kind, beside, named = response_format.type, response_format.text, response_format.json_schema
    if beside is not None and kind != "json_object":
        raise invalid("response_format.schema is for the type 'json_object'", "response_format")
    if named is not None and kind != "json_schema":
        raise invalid("response_format.json_schema is for the type 'json_schema'", "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        text = ANY_OBJECT if beside is None else json.dumps(beside)
        return await checked(Grammar("json_schema", text), "response_format")
    if named is None or named.text is None:
        raise invalid("response_format.json_schema.schema must be a JSON schema", "response_format")
    return await checked(Grammar("json_schema", json.dumps(named.text)), "response_format")


async def checked(grammar: Grammar, param: str) -> Grammar:
    """Return `grammar` if answers can follow it. Raises ApiError 400, which names the field `param`, if they cannot.
    The check runs in another thread.
    """
    try:
        await asyncio.to_thread(check_grammar, grammar)
    except GrammarError as error:
        raise invalid(str(error), param) from None
    return grammar


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


def _listed(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    include_usage: Flag | None = None
    include_obfuscation: Annotated[Any, unsupported("chunks are as long as their text", False)] = None


class SharedBody(BaseModel):
    """The fields that completion and chat requests have in common. Without `max_tokens` an answer may fill the context,
    unless the endpoint sets a default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Text | None = None
    max_completion_tokens: Annotated[Integer, Field(ge=1, le=_MOST_TOKENS)] | None = None
    max_tokens: Annotated[Integer, Field(ge=1, le=_MOST_TOKENS)] | None = None
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[Integer, Field(ge=1, le=MAX_ANSWERS)] = 1
    seed: Annotated[Integer, Field(ge=-_SEEDS, le=_SEEDS - 1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1, le=_MOST_TOKENS)] = 0
    top_p: Annotated[Number, Field(ge=0, le=1)] = 1.0
    stop: Annotated[list[StopText], Field(max_length=MAX_STOPS), BeforeValidator(_listed)] = []
    ignore_eos: Flag = False
    priority: Annotated[Integer, Field(ge=-_MOST_TOKENS, le=_MOST_TOKENS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] = {}

    best_of: Annotated[Integer, Field(ge=1, le=MAX_ANSWERS)] | None = None

    use_beam_search: Annotated[Any, unsupported("answers are sampled; ask for n of them", False)] = None
    length_penalty: Annotated[Any, unsupported("there is no beam search", 1)] = None
    early_stopping: Annotated[Any, unsupported("there is no beam search", False)] = None
    presence_penalty: Annotated[Any, _NO_PENALTIES] = None
    frequency_penalty: Annotated[Any, _NO_PENALTIES] = None
    logit_bias: Annotated[Any, unsupported("constrain the answer with response_format instead", {})] = None
    store: Annotated[Any, unsupported("nothing is kept of a request", False)] = None

    service_tier: Annotated[Any, unsupported("there is one; priority orders requests", "auto", "default")] = None
    min_p: Annotated[Any, unsupported("temperature, top_k and top_p choose", 0)] = None
    repetition_penalty: Annotated[Any, unsupported("this engine samples without penalties", 1)] = None
    min_tokens: Annotated[Any, unsupported("an answer ends where the model ends it; ignore_eos never ends it", 0)] = (
        None
    )
    skip_special_tokens: Annotated[Any, unsupported("control tokens are never shown", True)] = None

    # These change no answer.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @model_validator(mode="after")
    def _combine(self) -> SharedBody:
        if self.include_usage and not self.stream:
            raise invalid("stream_options needs stream", "stream_options")
        if self.best_of not in (None, 1, self.n):
            raise not_supported("best_of", "ask for n answers and choose")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options.include_usage)

    def check_grammar(self, grammar: Grammar | None) -> None:
        """Raise ApiError 400 if `grammar` cannot be combined with the other fields of this request."""
        if grammar is not None and self.ignore_eos:
            raise invalid("ignore_eos cannot be combined with a constrained answer", "ignore_eos")

    def ask(
        self,
        request_id: str,
        tokens: Int32Array,
        service: Service,
        caller: KeyOwner,
        *,
        param: str,
        logprobs: int | None,
        grammar: Grammar | None,
        default_max_tokens: int | None = None,
    ) -> Ask:
        """Return the request to the engine for one prompt of `tokens`, which came in the request field `param`.
        `caller` is the owner of the API key. Raises ApiError if the prompt is empty or does not fit the context.
        """
        context, count = service.engine.context, len(tokens)
        if not count:
            raise invalid("the prompt is empty: there is nothing to continue", param)
        if count >= context:
            raise too_long(count, context, param)
        room = context - count + 1  # the last token of an answer is never computed
        asked = [most for most in (self.max_completion_tokens, self.max_tokens) if most is not None]
        wanted = min(asked) if asked else default_max_tokens
        return Ask(
            id=request_id,
            tokens=tokens,
            max_tokens=room if wanted is None else min(wanted, room),
            sampling=SamplingSettings(
                temperature=self.temperature,
                top_k=max(0, self.top_k),
                top_p=self.top_p,
                seed=None if self.seed is None else self.seed % _SEEDS,
            ),
            n=self.n,
            stop=tuple(self.stop),
            ignore_end=self.ignore_eos,
            logprobs=logprobs,
            grammar=grammar,
            tenant=caller.tenant,
            priority=caller.allowed(self.priority),
        )


def check_length(text: str, service: Service, param: str) -> None:
    """Raise ApiError if `text`, from the request field `param`, certainly has more tokens than the context. The length
    of the text alone decides; it is not tokenised.
    """
    least, context = service.model.least_tokens(text), service.engine.context
    if least >= context:
        raise too_long(least, context, param, at_least=True)
