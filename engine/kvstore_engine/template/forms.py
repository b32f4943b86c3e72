"""The forms in which one template reads a conversation, and messages of OpenAI's form made into those.

Owns the choice between them: content as a text or as parts, a call's arguments as an object or as JSON text, a system
message or a part of the first question, and the name under which an assistant's reasoning goes; and the one form of a
tool. Fields that are not named here pass through: a template that does not read them takes no notice.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvstore_engine.template.environment import Message, TemplateError

Json = dict[str, Any]
Bare = Literal["empty", "null", "absent"]
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of an assistant's reasoning: DeepSeek's and most templates', OpenRouter's and vLLM's, gpt-oss's."""


def shown_tools(tools: Sequence[Message]) -> list[Json]:
    """Return `tools` as templates print them: each has a name, a description and parameters, in this order.

    A description that was not sent is empty, and so are such parameters, as from llama.cpp's server; other members
    stay, behind these.
    """
    return [{"type": "function", **tool, "function": _shown(tool["function"])} for tool in tools]


def _shown(function: Json) -> Json:
    first = {"name": function["name"], "description": function.get("description") or ""}
    first["parameters"] = function.get("parameters") or {}
    return {**first, **{name: value for name, value in function.items() if name not in first}}


@dataclass(frozen=True, slots=True)
class Forms:
    """`text` and `parts` are the roles whose content is read as a text and as a list of parts.

    `system` and `developer`: messages of these roles are read. `object_arguments`: a call's arguments are read as
    objects. `bare`: the content of a message that has calls and no text. `words`: all in the template's code.
    """

    text: frozenset[str]
    parts: frozenset[str]
    system: bool = True
    developer: bool = False
    object_arguments: bool = True
    bare: Bare = "empty"
    words: frozenset[str] = frozenset()

    def arrange(self, messages: Sequence[Message]) -> list[Json]:
        """Return `messages` as the template reads them."""
        arranged = [self._message(message) for message in messages]
        return arranged if self.system else self._without_system(arranged)

    def _message(self, message: Message) -> Json:
        role = message["role"]
        if role == "developer" and not self.developer:
            role = "system"
        fields = {name: value for name, value in message.items() if value is not None}
        read: Json = {
            **fields,
            "role": role,
            "content": self._content("system" if role == "developer" else role, fields.get("content")),
        }
        if calls := fields.get("tool_calls"):
            read["tool_calls"] = [self._call(call) for call in calls]
            if not fields.get("content") and self.bare != "empty":
                read["content"] = None
                if self.bare == "absent":
                    del read["content"]
        given = next((name for name in REASONING if isinstance(read.get(name), str)), None)
        if given is not None and given not in self.words:
            known = next((name for name in REASONING if name in self.words), given)
            read[known] = read.pop(given)
        return read

    def _content(self, role: str, content: str | list[Json] | None) -> str | list[Json]:
        if isinstance(content, list) and role in self.parts:
            return content
        text = _joined(content or "")
        return text if role in self.text else [{"type": "text", "text": text}]

    def _call(self, call: Json) -> Json:
        function = dict(call["function"])
        arguments = function.get("arguments") or {}
        if self.object_arguments and isinstance(arguments, str):
            arguments = json.loads(arguments)
        elif not self.object_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    def _without_system(self, messages: list[Json]) -> list[Json]:
        """Move the text of the system message at the beginning to the head of the question that follows."""
        if not messages or messages[0]["role"] != "system":
            return messages
        if len(messages) < 2 or messages[1]["role"] != "user":
            raise TemplateError(
                "the model's chat template has no system message, and no user's message follows that could hold it"
            )
        system, first = _joined(messages[0]["content"]) + "\n", messages[1]["content"]
        content = [{"type": "text", "text": system}, *first] if isinstance(first, list) else system + first
        return [{**messages[1], "content": content}, *messages[2:]]


def _joined(content: str | list[Json]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
