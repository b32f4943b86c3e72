"""Marks what a conversation says, to see that all of it reaches the prompt.

Owns the marks: a word that stands in no text, put at both ends of every text, at the end of every name of a tool, and
into the arguments of every call. A template that shows a text shows its ends, whatever else it does to it: trims it,
escapes it. Of an answer only the end counts, since templates cut thoughts off its head. A text with white space alone
says nothing. A text beside tool calls is the template's to leave out, as many do; the calls are not.
"""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from kvstore_engine.template.environment import Message, TemplateError

Json = dict[str, Any]


class Marks:
    """Marks for one conversation."""

    def __init__(self) -> None:
        self._stem = f"kvq{secrets.randbits(64)}n"  # in no text but by a guess
        self._places: dict[str, tuple[str, str]] = {}  # by mark

    def conversation(self, messages: Sequence[Message]) -> list[Json]:
        """Return `messages` with a mark in each of them."""
        return [self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def tools(self, tools: Sequence[Message]) -> list[Json]:
        """Return `tools` with a mark in each name."""
        return [
            {**tool, "function": self._named(tool["function"], f"tools[{index}]", "tools")}
            for index, tool in enumerate(tools)
        ]

    def check(self, marked: str, prompt: str) -> None:
        """Raise TemplateError for the first mark that is not in `marked`, the prompt of the marked conversation.

        `prompt` is that of the conversation itself.
        """
        shown = set(re.findall(rf"{self._stem}\d+e", marked))
        for mark, (place, param) in self._places.items():
            if mark not in shown:
                hint = '; leave tools out, or send tool_choice "none"' if param == "tools" else ""
                raise TemplateError(
                    f"{place} does not reach the prompt: the model's chat template leaves it out{hint}", param, prompt
                )

    def _message(self, message: Message, place: str) -> Json:
        calls, content = message.get("tool_calls"), message.get("content")
        if calls:
            marked = [
                {**call, "function": self._called(call["function"], f"{place}.tool_calls[{index}]")}
                for index, call in enumerate(calls)
            ]
            return {**message, "tool_calls": marked}
        if isinstance(content, list):
            parts = [
                {**part, "text": self._text(part["text"], f"{place}.content[{index}]", message["role"])}
                for index, part in enumerate(content)
            ]
            return {**message, "content": parts}
        return {**message, "content": self._text(content or "", place, message["role"])}

    def _text(self, text: str, place: str, role: str) -> str:
        if not text.strip():
            return text
        head = "" if role == "assistant" else self._mark(place, "messages")
        return head + text + self._mark(place, "messages")

    def _called(self, function: Json, place: str) -> Json:
        """Mark a call's arguments, or the name where it has none: some templates show an id in place of the name."""
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not arguments or not isinstance(arguments, dict):
            marked = self._named(function, place, "messages")
            mark = marked["name"].removeprefix(function["name"])
            return {**marked, "arguments": {mark: mark}} if isinstance(arguments, dict) else marked
        mark = self._mark(place, "messages")
        return {**function, "arguments": {**arguments, mark: mark}}

    def _named(self, function: Json, place: str, param: str) -> Json:
        return {**function, "name": function["name"] + self._mark(place, param)}

    def _mark(self, place: str, param: str) -> str:
        mark = f"{self._stem}{len(self._places)}e"
        self._places[mark] = (place, param)
        return mark
