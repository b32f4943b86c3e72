"""`POST /v1/chat/completions`: a conversation through the model's own template, with tools.

Owns the fields that only chats have.
"""

from __future__ import annotations

from typing import Any

from kvstore_engine.constrain import Grammar
from kvstore_engine.server.api_errors import invalid
from kvstore_engine.server.asking import Asked, check, check_length, read_shared
from kvstore_engine.server.body import Body
from kvstore_engine.server.chat_messages import read_messages
from kvstore_engine.server.completions import MAX_LOGPROBS, Plan
from kvstore_engine.server.forms import ChatForm
from kvstore_engine.server.keys import Caller
from kvstore_engine.server.service import Service
from kvstore_engine.server.tools import call_grammar

MAX_TOOLS = 128
Tool = dict[str, Any]


async def plan(fields: dict[str, Any], caller: Caller, service: Service) -> Plan:
    """Read the body. ApiError for anything that cannot be done as asked."""
    body = Body(fields)
    shared = await read_shared(body, caller, service, default_max_tokens=None)
    messages = read_messages(body.require("messages"))
    tools, grammar = await _tools(body, shared, service)
    logprobs = _logprobs(body)
    body.refuse("modalities", (["text"],), "this model answers in text")
    body.end()
    text = service.model.render(messages, tools or None)
    check_length(text, service, "messages")
    # The template has written its own special tokens.
    tokens = await service.model.encode(text, add_special=False, parse_special=True)
    reads_calls = bool(tools) and service.model.calls_tools
    form = ChatForm(service.model, shared.n, with_logprobs=logprobs is not None, reads_calls=reads_calls)
    ask = shared.ask(form.id, tokens, service, logprobs, grammar, param="messages")
    return Plan([ask], form, shared.stream, shared.include_usage)


def _logprobs(body: Body) -> int | None:
    wanted, top = body.flag("logprobs"), body.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise invalid("top_logprobs needs logprobs", "top_logprobs")
    return (top or 0) if wanted else None


async def _tools(body: Body, shared: Asked, service: Service) -> tuple[list[Tool], Grammar | None]:
    """The tools that the template is told of, and a grammar if the model has to call one."""
    tools = body.take("tools") or []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS or not all(map(_is_tool, tools)):
        raise invalid(f"tools must be a list of at most {MAX_TOOLS} functions, each with a name", "tools")
    choice = body.take("tool_choice")
    if choice in (None, "auto"):
        return tools, None
    if choice == "none":
        return [], None
    if choice == "required":
        chosen = tools
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise invalid("tool_choice must be none, auto, required, or name one of the tools", "tool_choice")
    if not service.model.calls_tools:
        raise invalid("tool_choice: how this model calls tools is not known from its chat template", "tool_choice")
    if shared.grammar is not None:
        raise invalid("tool_choice cannot be combined with response_format", "tool_choice")
    if shared.beams is not None:
        raise invalid("use_beam_search cannot be combined with a tool_choice that makes the model call", "tool_choice")
    grammar = Grammar("lark", call_grammar([tool["function"] for tool in chosen], service.model.call_marks))
    return tools, await check(grammar, "tools")


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        return False
    parameters = function.get("parameters")
    return isinstance(function.get("name"), str) and (parameters is None or isinstance(parameters, dict))
