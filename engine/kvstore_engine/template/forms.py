"""Finds out the forms in which one template reads a conversation, and converts messages from OpenAI's form to these.

The module owns the choice between forms: content as a text or as parts, a call's arguments as an object or as JSON
text, a system message or a part of the first question, and the name of the field for an assistant's reasoning; and the
one form of a tool. Other fields pass through: a template that does not read them ignores them.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from kvstore_engine.template.environment import Message, TemplateError

Json = dict[str, Any]
Bare = Literal["empty", "null", "absent"]
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of an assistant's reasoning: DeepSeek's and most templates', OpenRouter's and vLLM's, gpt-oss's."""
Render = Callable[[list[Json], list[Json] | None], str]
_ONE, _TWO, _KEY, _VALUE = "kvq1sent", "kvq2sent", "kvq3sent", "kvq4sent"
_PROPERTY = {"type": "string", "description": "a city"}
_PARAMETERS = {"type": "object", "properties": {"city": _PROPERTY}, "required": ["city"]}
_TOOL: Json = {
    "type": "function",
    "function": {"name": "weather", "description": "the weather of a city", "parameters": _PARAMETERS},
}
_TEXT, _PARTS = f"{_ONE} {_TWO}", [{"type": "text", "text": _ONE}, {"type": "text", "text": _TWO}]
_ARGUMENTS = ({_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}')
# How a list of parts, an object and a JSON text look when they are printed as something that they are not.
_LISTED = re.compile(rf"""["']\s*:\s*["']{_ONE}""")
_MISWRITTEN = re.compile(rf"""'{_KEY}': '{_VALUE}'|\\"{_KEY}""")


def shown_tools(tools: Sequence[Message]) -> list[Json]:
    """Return a copy of `tools` in which each tool's function has a name, a description and parameters, in this order.

    A missing description becomes "", and missing parameters become {}, as in llama.cpp's server. Other members follow
    behind these.
    """
    return [{"type": "function", **tool, "function": _shown(tool["function"])} for tool in tools]


def _shown(function: Json) -> Json:
    first = {"name": function["name"], "description": function.get("description") or ""}
    first["parameters"] = function.get("parameters") or {}
    return {**first, **{name: value for name, value in function.items() if name not in first}}


@dataclass(frozen=True, slots=True)
class Forms:
    """The form in which one chat template expects messages. `text` and `parts` are the roles whose content it reads as
    a text, or as a list of parts. `system` and `developer` say whether it reads messages of these roles,
    `object_arguments` whether it reads the arguments of a tool call as an object rather than as JSON text. `bare` is
    the content of a message that has tool calls and no text: "", null, or no such field. `words`: all words in the
    template's source.
    """

    text: frozenset[str]
    parts: frozenset[str]
    system: bool = True
    developer: bool = False
    object_arguments: bool = True
    bare: Bare = "empty"
    words: frozenset[str] = frozenset()

    def arrange(self, messages: Sequence[Message]) -> list[Json]:
        """Return `messages`, in OpenAI's form, converted into the form that the template expects. Raises TemplateError
        for a system message that the template cannot show.
        """
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


def probe(render: Render, words: frozenset[str]) -> Forms:
    """Find out by trial renderings which form of messages a chat template expects, and return it. `render(messages,
    tools)` returns its prompt; `words` are all words in its source.
    """
    text: set[str] = set()
    parts: set[str] = set()

    def learn(role: str, conversation: Callable[[Json], list[Json]]) -> None:
        def shows(content: object) -> bool:
            prompt = _prompt(render, conversation({"role": role, "content": content}))
            return _ONE in prompt and _TWO in prompt and not _LISTED.search(prompt)

        if shows(_PARTS):
            parts.add(role)
        # Some read one part and no more: a role in neither set.
        if shows(_TEXT) or (role not in parts and not shows([{"type": "text", "text": _TEXT}])):
            text.add(role)

    def plain(role: str, said: str) -> Json:
        return {"role": role, "content": said if role in text else [{"type": "text", "text": said}]}

    learn("user", lambda message: [message])
    question = plain("user", "q")
    learn("assistant", lambda message: [question, message, question])
    learn("system", lambda message: [message, question])
    has_system = _ONE in _prompt(render, [plain("system", _ONE), question])
    developer = {**plain("system", _ONE), "role": "developer"}
    has_developer = "developer" in words and _ONE in _prompt(render, [developer, question])
    answers = _answers(plain("assistant", ""))
    as_object, bare = _calls(render, question, answers)
    call = _call(answers[bare], _ARGUMENTS[0 if as_object else 1])
    learn("tool", lambda message: [question, call, {**message, "tool_call_id": "call00001"}])
    return Forms(frozenset(text), frozenset(parts), has_system, has_developer, as_object, bare, words)


def _answers(empty: Json) -> dict[Bare, Json]:
    """Return an answer without a text in each form that it may have."""
    return {"empty": empty, "null": {"role": "assistant", "content": None}, "absent": {"role": "assistant"}}


def _calls(render: Render, question: Json, answers: dict[Bare, Json]) -> tuple[bool, Bare]:
    """Return whether a call's arguments are read as an object, and the content of a message that has calls and no
    text.
    """
    result = {"role": "tool", "tool_call_id": "call00001", "content": "r"}
    for (bare, answer), arguments in product(answers.items(), _ARGUMENTS):
        call = _call(answer, arguments)
        for conversation in ([question, call, result], [question, call]):
            prompt = _prompt(render, conversation)
            if _KEY in prompt and _VALUE in prompt and not _MISWRITTEN.search(prompt):
                return isinstance(arguments, dict), bare
    return True, "empty"


def _call(message: Json, arguments: object) -> Json:
    function = {"name": "weather", "arguments": arguments}
    return {**message, "tool_calls": [{"id": "call00001", "type": "function", "function": function}]}


def _prompt(render: Render, messages: list[Json]) -> str:
    """Return the prompt of `messages`, with a tool if they have calls, or are refused without; "" if refused."""
    has_calls = any("tool_calls" in message for message in messages)
    for tools in ([_TOOL],) if has_calls else (None, [_TOOL]):
        with suppress(TemplateError):
            return render(messages, tools)
    return ""
