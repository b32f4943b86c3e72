"""`POST /v1/chat/completions`: a conversation through the model's own template, with tools.

Owns the fields that only chats have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from kvstore_engine.constrain import Grammar
from kvstore_engine.server.api_errors import invalid
from kvstore_engine.server.body import Flag, Integer, read, unsupported
from kvstore_engine.server.chat_messages import MAX_MESSAGES, Message
from kvstore_engine.server.completions import Plan
from kvstore_engine.server.grammars import checked, read_grammar
from kvstore_engine.server.keys import Caller
from kvstore_engine.server.messages import Turn
from kvstore_engine.server.renderers import ChatRenderer
from kvstore_engine.server.service import Service
from kvstore_engine.server.shared_body import MAX_LOGPROBS, SharedBody, check_length
from kvstore_engine.server.tools import call_grammar

MAX_TOOLS = 128
Tool = dict[str, Any]


def _functions(tools: list[Any]) -> list[Tool]:
    """As they are, since templates print them."""
    if not all(map(_is_function, tools)):
        raise ValueError("must be a list of functions, each with a name")
    return tools


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        return False
    parameters = function.get("parameters")
    return isinstance(function.get("name"), str) and (parameters is None or isinstance(parameters, dict))


class ChatBody(SharedBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS), AfterValidator(_functions)] = Field([])
    tool_choice: Any = "auto"
    logprobs: Flag = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] = 0
    chat_template_kwargs: dict[str, Any] = Field({})
    modalities: Annotated[Any, unsupported("this model answers in text", ["text"])] = None

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
    tools = [] if body.tool_choice == "none" else body.tools
    if body.tool_choice not in ("none", "auto"):
        grammar = await _call_grammar(body, grammar, service)
    messages = [message.for_template() for message in body.messages]
    text = service.model.render(messages, tools or None, body.chat_template_kwargs, body.reasoning_effort)
    check_length(text, service, "messages")
    # The template has written its own special tokens.
    tokens = await service.model.encode(text, add_special=False, parse_special=True)
    reads_calls = bool(tools) and service.model.calls_tools
    renderer = ChatRenderer(service.model, body.n, with_logprobs=body.logprobs, reads_calls=reads_calls)
    logprobs = body.top_logprobs if body.logprobs else None
    ask = body.ask(renderer.id, tokens, service, caller, param="messages", logprobs=logprobs, grammar=grammar)
    # A call that we cannot read looks like text.
    turn: Turn = "tool" if reads_calls else "unknown" if tools else "person"
    return Plan([replace(ask, turn=turn)], renderer, body.stream, body.include_usage)


async def _call_grammar(body: ChatBody, other: Grammar | None, service: Service) -> Grammar:
    """What makes the model call one of the tools that `tool_choice` leaves it."""
    choice = body.tool_choice
    if choice == "required":
        chosen = body.tools
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        chosen = [tool for tool in body.tools if tool["function"]["name"] == name]
    if not chosen:
        raise invalid("tool_choice must be none, auto, required, or name one of the tools", "tool_choice")
    if not service.model.calls_tools:
        raise invalid("tool_choice: how this model calls tools is not known from its chat template", "tool_choice")
    if other is not None:
        raise invalid("tool_choice cannot be combined with response_format", "tool_choice")
    if body.use_beam_search:
        raise invalid("use_beam_search cannot be combined with a tool_choice that makes the model call", "tool_choice")
    grammar = Grammar("lark", call_grammar([tool["function"] for tool in chosen], service.model.call_marks))
    return await checked(grammar, "tools")
