"""`POST /v1/chat/completions`: a conversation through the model's own template, with tools.

Owns the fields that only chats have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvstore_engine.constrain import Grammar
from kvstore_engine.server.api_errors import invalid
from kvstore_engine.server.body import Flag, Integer, not_supported, read, unsupported
from kvstore_engine.server.call_grammars import call_grammar, strict_grammar
from kvstore_engine.server.chat_messages import MAX_MESSAGES, Message
from kvstore_engine.server.completions import Plan
from kvstore_engine.server.grammars import checked, read_grammar
from kvstore_engine.server.keys import Caller
from kvstore_engine.server.renderers import ChatRenderer
from kvstore_engine.server.service import Service
from kvstore_engine.server.shared_body import MAX_LOGPROBS, SharedBody, check_length
from kvstore_engine.server.tool_choice import Tool, ToolChoice, read_choice
from kvstore_engine.server.tools import THOUGHT, Turn

MAX_TOOLS = 128
_LOST_MEMBERS = ("audio", "function_call", "refusal", "prefix", "partial")


def _functions(tools: list[Any]) -> list[Tool]:
    """As they are: the template gives them their form."""
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
    """Refuse what a message says in a member that no template is given."""
    for message in messages if isinstance(messages, list) else []:
        lost = [name for name in _LOST_MEMBERS if isinstance(message, dict) and message.get(name)]
        if lost:
            raise ValueError(f"has a message with {lost[0]}, which this server does not pass on: leave it out")
    return messages


class ChatBody(SharedBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(_no_lost_members)]
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


async def plan(fields: dict[str, Any], caller: Caller, service: Service) -> Plan:
    """Read the body. ApiError for anything that cannot be done as asked."""
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
    return Plan([replace(ask, turn=turn, one_call=one_call)], renderer, body.stream, body.include_usage)


def _check_one_call(body: ChatBody, service: Service) -> None:
    if not service.model.calls_tools:
        why = "how this model calls tools is not known from its chat template, so calls cannot be counted"
        raise not_supported("parallel_tool_calls", why)


async def _strict_grammar(body: ChatBody, tools: list[Tool], service: Service) -> Grammar:
    """Return the grammar that keeps calls to the schemas of strict tools. ApiError 400 if it cannot be followed."""
    if not service.model.calls_tools:
        raise not_supported("tools", "strict, as how this model calls tools is not known from its chat template")
    grammar = Grammar("lark", strict_grammar([tool["function"] for tool in tools], service.model.call_marks))
    body.check_grammar(grammar)
    return await checked(grammar, "tools")


async def _call_grammar(body: ChatBody, called: list[Tool], other: Grammar | None, service: Service) -> Grammar:
    """Return the grammar of one call of one of the tools `called`. ApiError 400 if it cannot be followed."""
    if not service.model.calls_tools:
        raise invalid("tool_choice: how this model calls tools is not known from its chat template", "tool_choice")
    if other is not None:
        raise invalid("tool_choice cannot be combined with response_format", "tool_choice")
    grammar = Grammar("lark", call_grammar([tool["function"] for tool in called], service.model.call_marks))
    return await checked(grammar, "tools")
