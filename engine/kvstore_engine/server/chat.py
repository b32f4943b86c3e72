"""`POST /v1/chat/completions`: a conversation through the model's own template, with tools.

The module owns the fields that only chats have: messages, which keep their original form, since
`kvstore_engine.template` finds out what the chat template reads of them; tools; and the forms of `tool_choice`, each
member of which is read or refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvstore_engine.constrain import Grammar
from kvstore_engine.server.api_errors import invalid
from kvstore_engine.server.body import Flag, Integer, Text, not_supported, read, unsupported
from kvstore_engine.server.completions import CompletionPlan
from kvstore_engine.server.keys import KeyOwner
from kvstore_engine.server.renderers import ChatRenderer
from kvstore_engine.server.service import Service
from kvstore_engine.server.shared_body import MAX_LOGPROBS, SharedBody, check_length, checked, read_grammar
from kvstore_engine.server.tools import THOUGHT, Turn, call_grammar, strict_grammar
from kvstore_engine.template import MAY_BE_BARE

MAX_MESSAGES = 4096
Tool = dict[str, Any]
_FORMS = "tool_choice must be none, auto, required, name one of the tools, or list allowed_tools"
MAX_TOOLS = 128
_LOST_MEMBERS = ("audio", "function_call", "refusal", "prefix", "partial")


def _content(content: Any) -> Any:
    """Return a text, a list of text parts, or None, also for an empty list."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of text parts")
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise ValueError("must be text: this model reads nothing else")
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("must have a text in each part")
    return [{"type": "text", "text": text} for text in texts] or None


def _arguments(value: Any) -> Any:
    """Return JSON text, as OpenAI's API has it, or the value itself. Raises ValueError for another text."""
    try:
        if isinstance(value, str) and value:
            json.loads(value, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise ValueError("must be JSON with finite numbers") from None
    return value or {}


def _finite(text: str) -> float:
    """Return the number, which a template prints again. Raises ValueError for one that no float holds."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


class CalledFunction(BaseModel):
    name: Text
    arguments: Annotated[Any, BeforeValidator(_arguments)] = {}


class MadeCall(BaseModel):
    id: Any = None
    function: CalledFunction

    def for_template(self) -> dict[str, object]:
        named = {} if self.id is None else {"id": self.id}
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**named, "type": "function", "function": function}


class ChatMessage(BaseModel):
    """One message of a chat request. Further fields, such as `reasoning_content`, are passed on to the chat
    template.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, BeforeValidator(_content)] = None
    tool_calls: list[MadeCall] | None = None

    @model_validator(mode="after")
    def _combine(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("must be an assistant's, since it has tool_calls")
        if self.content is None and self.role not in MAY_BE_BARE:
            raise ValueError("needs a content: a string or a list of text parts")
        return self

    def for_template(self) -> dict[str, object]:
        read: dict[str, object] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            read["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return read | {name: value for name, value in (self.model_extra or {}).items() if value is not None}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The meaning of a request's field `tool_choice`. If `is_forced`, the answer must be a call of one of the tools in
    `names` (None: of any tool). With `shows_others` the prompt also lists the tools that are not in `names`.
    """

    is_forced: bool = False
    names: tuple[str, ...] | None = None
    shows_others: bool = True

    def among(self, tools: list[Tool]) -> tuple[list[Tool], list[Tool]]:
        """Return two lists of `tools`: the tools that the prompt shows, and the tools of which the answer must call one
        (an empty list if it need not call any). Raises ApiError if a chosen name is not in `tools`.
        """
        chosen = tools
        if self.names is not None:
            by_name = {tool["function"]["name"]: tool for tool in tools}
            if not by_name.keys() >= set(self.names):
                raise invalid(_FORMS, "tool_choice")
            chosen = [tool for tool in tools if tool["function"]["name"] in self.names]
        if self.is_forced and not chosen:
            raise invalid(_FORMS, "tool_choice")
        return tools if self.shows_others else chosen, chosen if self.is_forced else []


def read_choice(value: Any) -> ToolChoice:
    """Return the meaning of the request's field `tool_choice`, which has the given `value`. Raises ApiError for an
    unknown form.
    """
    match value:
        case ToolChoice():
            return value
        case "none":
            return ToolChoice(names=(), shows_others=False)
        case "auto" | "required":
            return ToolChoice(is_forced=value == "required")
        case {"type": "function", "function": {"name": str(name), **more}, **beside} if not (more or beside):
            return ToolChoice(is_forced=True, names=(name,))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": list(tools), **more},
            **beside,
        } if tools and not (more or beside):
            return ToolChoice(mode == "required", tuple(map(_tool_name, tools)), shows_others=False)
    raise invalid(_FORMS, "tool_choice")


def _tool_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name), **more}, **beside} if not (more or beside):
            return name
    raise invalid(_FORMS, "tool_choice")


def _functions(tools: list[Any]) -> list[Tool]:
    """Return `tools` unchanged: the template gives them their form."""
    if not all(map(_is_function, tools)):
        raise ValueError("must be a list of functions, each with a name")
    return tools


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        return False
    parameters, strict = function.get("parameters"), function.get("strict")
    if not (strict is None or isinstance(strict, bool)):
        return False
    return isinstance(function.get("name"), str) and (parameters is None or isinstance(parameters, dict))


def _no_lost_members(messages: Any) -> Any:
    """Refuse messages with content in a member that no template is given."""
    for message in messages if isinstance(messages, list) else []:
        lost = [name for name in _LOST_MEMBERS if isinstance(message, dict) and message.get(name)]
        if lost:
            raise ValueError(f"has a message with {lost[0]}, which this server does not pass on: leave it out")
    return messages


class ChatBody(SharedBody):
    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(_no_lost_members)
    ]
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS), AfterValidator(_functions)] = Field([])
    tool_choice: Annotated[ToolChoice, BeforeValidator(read_choice)] = ToolChoice()
    parallel_tool_calls: Flag = True
    logprobs: Flag = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] = 0
    chat_template_kwargs: dict[str, Any] = Field({})

    modalities: Annotated[Any, unsupported("this model answers in text", ["text"])] = None
    audio: Annotated[Any, unsupported("this model answers in text")] = None
    prediction: Annotated[Any, unsupported("every token is computed")] = None
    web_search_options: Annotated[Any, unsupported("this server searches nothing")] = None
    functions: Annotated[Any, unsupported("send tools instead", [])] = None
    function_call: Annotated[Any, unsupported("send tool_choice instead", "auto", "none")] = None
    verbosity: Annotated[Any, unsupported("ask for it in a message", "medium")] = None
    add_generation_prompt: Annotated[Any, unsupported("an answer is a new message", True)] = None
    continue_final_message: Annotated[Any, unsupported("an answer is a new message", False)] = None
    reasoning_effort: Any = None

    @model_validator(mode="after")
    def _combine_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs", "top_logprobs")
        return self


async def plan(fields: dict[str, Any], caller: KeyOwner, service: Service) -> CompletionPlan:
    """Check the `fields` of a chat request, and return the requests to the engine and the writer of the response.
    `caller` is the owner of the API key. Raises ApiError if something cannot be done as asked.
    """
    body = read(ChatBody, fields)
    service.model.check_name(body.model)
    grammar = await read_grammar(body.response_format, body.structured_outputs)
    body.check_grammar(grammar)
    tools, called = body.tool_choice.among(body.tools)
    if called:
        grammar = await _call_grammar(body, called, grammar, service)
    elif grammar is None and any(tool["function"].get("strict") for tool in tools):
        grammar = await _strict_grammar(body, tools, service)
    messages = [message.for_template() for message in body.messages]
    text = service.model.render(messages, tools or None, body.chat_template_kwargs, body.reasoning_effort)
    check_length(text, service, "messages")
    # The template has written its own special tokens.
    tokens = await service.model.encode(text, add_special=False, parse_special=True)
    reads_calls = bool(tools) and service.model.calls_tools
    in_thought = text.rstrip().endswith(THOUGHT) and not called  # a forced answer is the call alone
    renderer = ChatRenderer(
        service.model, body.n, with_logprobs=body.logprobs, reads_calls=reads_calls, in_thought=in_thought
    )
    logprobs = body.top_logprobs if body.logprobs else None
    ask = body.ask(renderer.id, tokens, service, caller, param="messages", logprobs=logprobs, grammar=grammar)
    after_call: Turn = "tool_after_thought" if in_thought else "tool"
    # A call that we cannot read looks like text.
    turn: Turn = after_call if reads_calls else "unknown" if tools else "person"
    one_call = bool(tools) and not called and not body.parallel_tool_calls
    if one_call:
        _check_one_call(body, service)
    return CompletionPlan([replace(ask, turn=turn, one_call=one_call)], renderer, body.stream, body.include_usage)


def _check_one_call(body: ChatBody, service: Service) -> None:
    if not service.model.calls_tools:
        why = "how this model calls tools is not known from its chat template, so calls cannot be counted"
        raise not_supported("parallel_tool_calls", why)


async def _strict_grammar(body: ChatBody, tools: list[Tool], service: Service) -> Grammar:
    """Return the grammar that keeps calls to the schemas of strict tools. Raises ApiError 400 if it cannot be
    followed.
    """
    if not service.model.calls_tools:
        raise not_supported("tools", "strict, as how this model calls tools is not known from its chat template")
    grammar = Grammar("lark", strict_grammar([tool["function"] for tool in tools], service.model.call_marks))
    body.check_grammar(grammar)
    return await checked(grammar, "tools")


async def _call_grammar(body: ChatBody, called: list[Tool], other: Grammar | None, service: Service) -> Grammar:
    """Return the grammar of one call of one of the tools `called`. Raises ApiError 400 if it cannot be followed."""
    if not service.model.calls_tools:
        raise invalid("tool_choice: how this model calls tools is not known from its chat template", "tool_choice")
    if other is not None:
        raise invalid("tool_choice cannot be combined with response_format", "tool_choice")
    grammar = Grammar("lark", call_grammar([tool["function"] for tool in called], service.model.call_marks))
    return await checked(grammar, "tools")
