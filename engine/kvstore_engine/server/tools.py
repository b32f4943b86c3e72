"""Tool calls: the text by which a model calls an offered tool, its reader, and grammars that allow it.

The module owns one format, the `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` of the Hermes models, which
Qwen and many others use. A model's chat template shows whether it writes it. Text in any other format stays content.
There are two grammars (Lark's syntax, as llguidance reads it): of exactly one call, for requests that force it, and of
a free answer whose calls follow their schemas, for tools with `strict`. Invariants: every character of an answer is
content or part of a call that was read, however the text was cut into pieces; a call's arguments are the model's own
characters.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.constraint import Constraint
from kvstore_engine.constrain import JSON_OPTIONS, special_token
from kvstore_engine.restore.session import NextStep
from kvstore_engine.server.json_text import SPACE, JsonObject, end_of
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.tokenizer.vocabulary import CONTROL

OPENING, CLOSING = "<tool_call>", "</tool_call>"
THOUGHT, THOUGHT_END = "<think>", "</think>"
Turn = Literal["unknown", "person", "tool", "tool_after_thought"]
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON can name and no text can hold
_FOREIGN = ("<function=", "<arg_key>")  # of formats with the same marks and other text between them
_MEMBERS: tuple[set[str], ...] = (
    set(),
    {"name"},
    {"arguments"},
    {"parameters"},
    {"name", "arguments"},
    {"name", "parameters"},
)
_SPACE = "SPACE: /[ \\t\\r\\n]{0,8}/"
_ANYTHING = f"(/(.|\\n)*/ & ~/(.|\\n)*{OPENING}(.|\\n)*/)"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that was read from an answer. `arguments` is JSON text, as in OpenAI's API."""

    name: str
    arguments: str
    id: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The marks that the model writes at the beginning and at the end of a tool call, in the form that a grammar needs.
    `unseen` maps the tokens of invisible marks, also of a thought, to their texts; `thoughts` has the marks of a
    thought that are special tokens.
    """

    opening: str
    closing: str
    unseen: dict[int, str]
    thoughts: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> CallMarks:
        tokens = {mark: special_token(tokenizer, mark) for mark in (OPENING, CLOSING, THOUGHT, THOUGHT_END)}
        opening, closing = (
            json.dumps(mark) if tokens[mark] is None else f"<[{tokens[mark]}]>" for mark in (OPENING, CLOSING)
        )
        kinds = tokenizer.vocabulary.kinds
        unseen = {token: mark for mark, token in tokens.items() if token is not None and kinds[token] == CONTROL}
        thoughts = (tokens[mark] for mark in (THOUGHT, THOUGHT_END))
        return cls(opening, closing, unseen, tuple(f"<[{token}]>" for token in thoughts if token is not None))


def understands(template: str) -> bool:
    """Return True if a model with the chat template `template` (its source text) writes tool calls that
    `ToolCallReader` can read.
    """
    return OPENING in template and not any(mark in template for mark in _FOREIGN)


class ToolCallReader:
    """A reader that splits the text of one answer, as it arrives, into content and tool calls. A mark that no call
    follows is content, and so is a thought; with `in_thought` the answer begins inside a thought. White space beside
    calls, if nothing else is there, is dropped.
    """

    def __init__(self, in_thought: bool = False) -> None:
        self._held = ""
        self._place: Literal["begin", "thought", "text", "call"] = "thought" if in_thought else "begin"
        self._object = JsonObject()
        self._found: list[str | ToolCall] = []
        self._blank = ""  # white space before any other content
        self._has_content = False
        self.calls = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """Add `text` to the answer. Return, in order, the content and the tool calls that are now certain."""
        self._held += text
        while self._advance():
            pass
        found, self._found = self._found, []
        return found

    def finish(self) -> list[str | ToolCall]:
        """Return the last content and tool calls, when no more text comes. An incomplete call is content, unless only
        its end mark is missing.
        """
        while self._place == "call":
            if self._object.state != "whole" or not self._take_call(len(self._held)):
                self._give_up()
            while self._advance():
                pass
        self._content(self._held)
        self._held = ""
        if not self.calls and self._blank:
            self._found.append(self._blank)
        found, self._found = self._found, []
        return found

    def _advance(self) -> bool:
        """Pass the parts that are certain; return False if that needs more text."""
        if self._place == "begin":
            begin = self._held.lstrip()
            if begin != THOUGHT and THOUGHT.startswith(begin):
                return False
            self._place = "thought" if begin.startswith(THOUGHT) else "text"
            return True
        if self._place == "call":
            return self._follow_call()
        mark = THOUGHT_END if self._place == "thought" else OPENING
        before, found, after = self._held.partition(mark)
        if not found:
            keep = _overlap(self._held, mark)
            self._content(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        if self._place == "thought":
            self._content(before + mark)
            self._held, self._place = after, "begin"
        else:
            self._content(before)
            self._held, self._place, self._object = after, "call", JsonObject()
        return True

    def _follow_call(self) -> bool:
        state = self._object.follow(self._held)
        if state == "wrong" or not _may_be_call(self._object.names):
            self._give_up()
            return True
        if state == "open":
            return False
        close = end_of(SPACE, self._held, self._object.end)
        rest = self._held[close : close + len(CLOSING)]
        if rest != CLOSING and CLOSING.startswith(rest):
            return False
        if rest != CLOSING or not self._take_call(close + len(CLOSING)):
            self._give_up()
        return True

    def _take_call(self, end: int) -> bool:
        """Take the held text up to `end` as a call; return False if its object names no function."""
        call = _call_of(self._held, self._object)
        if call is None:
            return False
        self.calls += 1
        self._found.append(call)
        self._held, self._place = self._held[end:], "begin"
        return True

    def _give_up(self) -> None:
        """Treat the mark as content, since no call follows it; the text behind it is read again."""
        self._content(OPENING)
        self._place = "text"

    def _content(self, text: str) -> None:
        if not self._has_content:
            text = self._blank + text
            self._has_content = bool(text.strip())
            self._blank = "" if self._has_content else text
        if text and self._has_content:
            self._found.append(text)


def next_step(tokenizer: Tokenizer, turn: Turn, answer: Sequence[int]) -> NextStep:
    """Return which request will follow an answer (its token ids) that ended by itself: "tool_call" if the answer has a
    readable call, otherwise "end_of_turn". `turn` says who may speak next.
    """
    if turn != "person":
        reader = ToolCallReader(in_thought=turn == "tool_after_thought")
        reader.push(tokenizer.decode(answer, special=True))
        reader.finish()
        if reader.calls:
            return "tool_call"
    return "end_of_turn"


def _may_be_call(names: Sequence[str]) -> bool:
    """Return whether an object with members of these names, as they are written, calls a function. An object with other
    members does not: they would be lost.
    """
    read = [json.loads(name) for name in names]
    return len(set(read)) == len(read) and set(read) in _MEMBERS


def _call_of(text: str, read: JsonObject) -> ToolCall | None:
    members = {json.loads(name): text[begin:end] for name, (begin, end) in zip(read.names, read.values, strict=True)}
    name = json.loads(members.pop("name", "null"))
    if not isinstance(name, str) or _SURROGATE.search(name):
        return None
    arguments = next(iter(members.values()), "{}")
    if arguments.startswith('"'):
        arguments = _unwrapped(arguments)
    return ToolCall(name, arguments, f"call_{uuid.uuid4().hex[:24]}")


def _unwrapped(literal: str) -> str:
    """Return the object that some models write as a JSON string. Another string is unchanged, since arguments are JSON
    text, and come back in the next request's history.
    """
    text, inner = json.loads(literal), JsonObject()
    is_object = inner.follow(text) == "whole" and not text[inner.end :].strip()
    return text if is_object and not _SURROGATE.search(text) else literal


def _overlap(text: str, mark: str) -> int:
    """Return how many of the last characters may be the beginning of `mark`."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


class OneCall:
    """A constraint that ends an answer with its first tool call, for requests with `parallel_tool_calls` false. Until
    then it allows the tokens that another constraint allows, or all tokens if there is none.
    """

    def __init__(self, tokenizer: Tokenizer, turn: Turn, make_other: Callable[[], Constraint] | None) -> None:
        """Make the constraint. `turn` says if the answer begins inside a thought; `make_other`, unless None, makes a
        constraint that must hold too.
        """
        self._reader = ToolCallReader(in_thought=turn == "tool_after_thought")
        self._stream = tokenizer.stream(special=True, continues=True)
        self._other = make_other() if make_other is not None else None

    @property
    def finished(self) -> bool:
        return self._reader.calls > 0 or (self._other is not None and self._other.finished)

    def mask(self) -> npt.NDArray[np.uint32] | None:
        return self._other.mask() if self._other is not None else None

    def accept(self, token: int) -> None:
        self._reader.push(self._stream.push(token))
        if self._other is not None:
            self._other.accept(token)


def call_grammar(functions: Sequence[dict[str, Any]], marks: CallMarks) -> str:
    """Return a grammar, in Lark's syntax, for exactly one tool call between `marks`. `functions` are the JSON objects
    of the tools that may be called.
    """
    rules = []
    for number, function in enumerate(functions):
        name = json.dumps(function["name"], ensure_ascii=False)
        opening = json.dumps(f'{{"name":{name},"arguments":', ensure_ascii=False)
        rules += [f'call{number}: {opening} arguments{number} "}}"', _arguments_rule(number, function)]
    return "\n".join([f'start: {marks.opening} "\\n" ({_calls(functions)}) "\\n" {marks.closing}', *rules, ""])


def strict_grammar(functions: Sequence[dict[str, Any]], marks: CallMarks) -> str:
    """Return a grammar, in Lark's syntax, for free text in which each opening mark of a call is followed by a call of
    one of `functions`, the tools' JSON objects. The arguments of functions with `strict` follow their JSON schemas.
    """
    rules = [f"TEXT: {_ANYTHING}", _SPACE]
    before = f"TEXT? {marks.opening}"
    if marks.opening.startswith('"'):
        rules.append(f"BEFORE: {_ANYTHING} {marks.opening}")
        before = "BEFORE"
    part = f"{before} SPACE ({_calls(functions)}) SPACE {marks.closing}"
    for mark in marks.thoughts:
        part += f" | TEXT? {mark}"
    for number, function in enumerate(functions):
        name = json.dumps(json.dumps(function["name"], ensure_ascii=False), ensure_ascii=False)
        spelt = f'"\\"name\\"" SPACE ":" SPACE {name} SPACE "," SPACE "\\"arguments\\"" SPACE ":"'
        followed = function if function.get("strict") else {}
        rules.append(f'call{number}: "{{" SPACE {spelt} SPACE arguments{number} SPACE "}}"')
        rules.append(_arguments_rule(number, followed, is_spaced=True))
    return "\n".join(["start: part* TEXT?", f"part: {part}", *rules, ""])


def _calls(functions: Sequence[dict[str, Any]]) -> str:
    return " | ".join(f"call{number}" for number in range(len(functions)))


def _arguments_rule(number: int, function: dict[str, Any], *, is_spaced: bool = False) -> str:
    # Each schema stands by itself: what it refers to by "#/$defs/..." is in it.
    options = {"whitespace_flexible": True} if is_spaced else JSON_OPTIONS
    schema = {**(function.get("parameters") or {"type": "object"}), "x-guidance": options}
    return f"arguments{number}: %json {json.dumps(schema)}"
