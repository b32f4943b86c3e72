"""The fields that completions and chats share, and the engine's request that they make of a prompt.

Owns their ranges and defaults, what cannot be combined, and which fields this server refuses or ignores.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvstore_engine.batching.request import MAX_ANSWERS
from kvstore_engine.constrain import Grammar
from kvstore_engine.sampler import SamplingSettings
from kvstore_engine.server.api_errors import invalid, too_long
from kvstore_engine.server.body import Flag, Integer, Number, Text, not_supported, unsupported
from kvstore_engine.server.frames import Int32Array
from kvstore_engine.server.grammars import ResponseFormat
from kvstore_engine.server.keys import Caller
from kvstore_engine.server.messages import Ask
from kvstore_engine.server.service import Service

MAX_STOPS = 16
MAX_LOGPROBS = 20
_MOST_TOKENS = 1 << 30
_SEEDS = 1 << 63
StopText = Annotated[Text, Field(min_length=1)]
_NO_PENALTIES = unsupported("this engine samples without penalties", 0)


def _listed(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    include_usage: Flag | None = None
    include_obfuscation: Annotated[Any, unsupported("chunks are as long as their text", False)] = None


class SharedBody(BaseModel):
    """`max_tokens` absent: as far as the context reaches, unless the endpoint has a default."""

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
        """ApiError 400 if an answer that follows `grammar` cannot be given as the other fields want it."""
        if grammar is not None and self.ignore_eos:
            raise invalid("ignore_eos cannot be combined with a constrained answer", "ignore_eos")

    def ask(
        self,
        request_id: str,
        tokens: Int32Array,
        service: Service,
        caller: Caller,
        *,
        param: str,
        logprobs: int | None,
        grammar: Grammar | None,
        default_max_tokens: int | None = None,
    ) -> Ask:
        """The engine's request for one prompt, which is the field `param`. ApiError if it does not fit the context."""
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
    """ApiError for a text that can be seen to be too long: to tokenise a whole library takes a minute."""
    least, context = service.model.least_tokens(text), service.engine.context
    if least >= context:
        raise too_long(least, context, param, at_least=True)
