"""Finds out what a template reads, by rendering small conversations in each form and looking for their texts.

Owns the conversations. It never reads a template's code: a form is right if what was said in it is in the prompt, as
itself and not as Python's or JSON's writing of a list. llama.cpp's server tries templates too, and watches which
values they touch (`common/jinja/caps.cpp`).
"""

import re
from collections.abc import Callable
from contextlib import suppress
from itertools import product

from kvstore_engine.template.environment import TemplateError
from kvstore_engine.template.forms import Bare, Forms, Json

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


def probe(render: Render, words: frozenset[str]) -> Forms:
    """Return the forms that the template behind `render` reads; `words` are those in its code."""
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
    """Are a call's arguments read as an object, and what is the content of a message that has calls and no text?"""
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
    """Return what comes of `messages`, with a tool if they have calls, or are refused without; "" if refused."""
    has_calls = any("tool_calls" in message for message in messages)
    for tools in ([_TOOL],) if has_calls else (None, [_TOOL]):
        with suppress(TemplateError):
            return render(messages, tools)
    return ""
