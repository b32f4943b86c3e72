"""Conversations for chat templates, in OpenAI's form: each holds one thing that templates read in different ways."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
Conversation = tuple[list[Json], list[Json] | None]
"""Messages, and the tools that are offered."""


def _tool(name: str, argument: str) -> Json:
    properties = {argument: {"type": "string", "description": f"The {argument}"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}", "parameters": parameters}}


def _calls(*calls: tuple[str, str], content: str | None = None, **more: str) -> Json:
    made = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made, **more}


def _result(number: int, content: str, **more: str) -> Json:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content, **more}


def _said(role: str, content: Any, **more: str) -> Json:
    return {"role": role, "content": content, **more}


_WEATHER, _TIME = _tool("get_weather", "city"), _tool("get_time", "zone")
_PARTS = [{"type": "text", "text": "Part one"}, {"type": "text", "text": "Part two"}]
CONVERSATIONS: dict[str, Conversation] = {
    "plain": ([_said("user", "What is this?")], None),
    "turns": (
        [
            _said("system", "Be brief, élan."),
            _said("user", "First <question>"),
            _said("assistant", "First answer"),
            _said("user", "Second question"),
        ],
        None,
    ),
    "parts": ([_said("user", _PARTS)], None),
    "tools": ([_said("user", "Weather in Rome?")], [_WEATHER, _TIME]),
    "call": (
        [
            _said("user", "Weather in Rome?"),
            _calls(("get_weather", '{"city": "Rome", "days": 2}')),
            _result(0, "sunny, 31"),
        ],
        [_WEATHER],
    ),
    "parallel": (
        [
            _said("system", "Be brief."),
            _said("user", "Weather in Rome, time in UTC?"),
            _calls(("get_weather", '{"city": "Rome"}'), ("get_time", '{"zone": "UTC"}')),
            _result(0, "sunny, 31", name="get_weather"),
            _result(1, "12:30", name="get_time"),
            _said("assistant", "Sunny; half past noon."),
            _said("user", "And in Oslo?"),
        ],
        [_WEATHER, _TIME],
    ),
    "reasoning": (
        [
            _said("user", "First question"),
            _said("assistant", "First answer", reasoning_content="a long thought"),
            _said("user", "Second question"),
        ],
        None,
    ),
    "agent": (
        [
            _said("user", "Weather in Rome?"),
            _calls(
                ("get_weather", '{"city":"Rome","near":[1,2.5,null,true]}'),
                content="Let me look.",
                reasoning_content="it must be looked up",
            ),
            _result(0, '{"sky": "clear"}'),
        ],
        [_WEATHER],
    ),
}
