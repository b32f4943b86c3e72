"""A conversation in OpenAI's form, made into what chat templates expect.

Owns the checks. Templates want text as content, and a call's arguments as an object.
"""

from __future__ import annotations

import json
from typing import Any

from kvstore_engine.server.api_errors import ApiError, invalid

Message = dict[str, object]
MAX_MESSAGES = 4096
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(value: Any) -> list[Message]:
    """The messages for a template. ApiError names the first that is wrong."""
    if not isinstance(value, list) or not value:
        raise invalid("messages must be a list with at least one message", "messages")
    if len(value) > MAX_MESSAGES:
        raise invalid(f"at most {MAX_MESSAGES} messages, got {len(value)}", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object with a role and a content", "messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(_ROLES)}", "messages")
    calls = message.get("tool_calls")
    if calls is not None and (role != "assistant" or not isinstance(calls, list)):
        raise invalid(f"{where}.tool_calls must be a list, in an assistant's message", "messages")
    read: Message = {"role": _ROLES[role], "content": _content(message.get("content"), bool(calls), where)}
    if calls:
        read["tool_calls"] = [_call(call, where) for call in calls]
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    return read


def _content(content: Any, may_be_empty: bool, where: str) -> str:
    if content is None and may_be_empty:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(f"{where}.content must be a string or a list of text parts", "messages")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{where}.content: this model reads text only", "messages")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad_call(where)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _bad_call(where) from None
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _bad_call(where: str) -> ApiError:
    return invalid(f"{where}.tool_calls: each needs a function with a name and arguments in JSON", "messages")
