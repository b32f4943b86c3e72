"""Tool calls in an answer's text: what a model writes to call a tool that its prompt offers.

Owns one format, the `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` of the Hermes models, which Qwen and
many others use. A model's chat template shows whether it writes it. Text in any other format stays content.
Invariant: every character of an answer is content or part of a call that could be read.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_engine.constrain import JSON_OPTIONS, special_token
from kvstore_engine.restore.session import NextStep
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.tokenizer.vocabulary import CONTROL

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text, as in OpenAI's API."""

    name: str
    arguments: str
    id: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class CallMarks:
    """How the marks around a call stand in a grammar: as special tokens, where the vocabulary has such, or as text.

    `unseen`: those of them that leave no trace in an answer's text, with what they stand for.
    """

    opening: str
    closing: str
    unseen: dict[int, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> CallMarks:
        tokens = {mark: special_token(tokenizer, mark) for mark in (OPENING, CLOSING)}
        opening, closing = (json.dumps(mark) if token is None else f"<[{token}]>" for mark, token in tokens.items())
        kinds = tokenizer.vocabulary.kinds
        unseen = {token: mark for mark, token in tokens.items() if token is not None and kinds[token] == CONTROL}
        return cls(opening, closing, unseen)


def understands(template: str) -> bool:
    """Does a model with this chat template write calls that we can read?"""
    return OPENING in template


class ToolCallReader:
    """Reads one answer as it comes; holds back what may be the beginning of a call."""

    def __init__(self) -> None:
        self._held = ""
        self.calls = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """What has become certain: content (never empty) and calls, in order."""
        self._held += text
        found: list[str | ToolCall] = []
        while True:
            before, opening, after = self._held.partition(OPENING)
            if not opening:
                keep = _overlap(self._held)
                self._content(found, self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                return found
            inside, closing, rest = after.partition(CLOSING)
            if not closing:
                self._content(found, before)
                self._held = opening + after
                return found
            self._content(found, before)
            call = _read(inside)
            if call is None:
                self._content(found, opening + inside + closing)
            else:
                self.calls += 1
                found.append(call)
            self._held = rest

    def finish(self) -> list[str | ToolCall]:
        """The rest, when no more text comes: a call that was cut off is content, unless only its end is missing."""
        held, self._held = self._held, ""
        found: list[str | ToolCall] = []
        if held.startswith(OPENING) and (call := _read(held.removeprefix(OPENING))):
            self.calls += 1
            found.append(call)
        else:
            self._content(found, held)
        return found

    def _content(self, found: list[str | ToolCall], text: str) -> None:
        # The white space that separates calls is not an answer.
        if text.strip() or (text and not self.calls):
            found.append(text)


def next_step(tokenizer: Tokenizer, reads_calls: bool, answer: Sequence[int]) -> NextStep:
    """What follows an answer that has ended by itself: a tool, if it calls one that can be read, else a person."""
    if reads_calls:
        reader = ToolCallReader()
        reader.push(tokenizer.decode(answer, special=True))
        reader.finish()
        if reader.calls:
            return "tool_call"
    return "end_of_turn"


def _read(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call["name"], arguments, f"call_{uuid.uuid4().hex[:24]}")


def _overlap(text: str) -> int:
    """How many of the last characters may be the beginning of the opening mark."""
    return next(
        (size for size in range(min(len(OPENING) - 1, len(text)), 0, -1) if OPENING.startswith(text[-size:])), 0
    )


def call_grammar(functions: list[dict[str, Any]], marks: CallMarks) -> str:
    """A grammar (Lark's syntax, as llguidance reads it) of exactly one call of one of `functions`."""
    rules = []
    for number, function in enumerate(functions):
        name = json.dumps(function["name"], ensure_ascii=False)
        opening = json.dumps(f'{{"name":{name},"arguments":', ensure_ascii=False)
        # Each schema stands by itself: what it refers to by "#/$defs/..." is in it.
        schema = {**(function.get("parameters") or {"type": "object"}), "x-guidance": JSON_OPTIONS}
        rules += [f'call{number}: {opening} arguments{number} "}}"', f"arguments{number}: %json {json.dumps(schema)}"]
    calls = " | ".join(f"call{number}" for number in range(len(functions)))
    return "\n".join([f'start: {marks.opening} "\\n" ({calls}) "\\n" {marks.closing}', *rules, ""])
