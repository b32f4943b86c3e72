"""Grammars (Lark's syntax, as llguidance reads it) of answers that call tools.

Owns two: of exactly one call, for requests that force it, and of a free answer whose calls follow their schemas, for
tools with `strict`. `tools.ToolCallReader` reads what either allows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvstore_engine.constrain import JSON_OPTIONS
from kvstore_engine.server.tools import OPENING, CallMarks

_SPACE = "SPACE: /[ \\t\\r\\n]{0,8}/"
_ANYTHING = f"(/(.|\\n)*/ & ~/(.|\\n)*{OPENING}(.|\\n)*/)"


def call_grammar(functions: Sequence[dict[str, Any]], marks: CallMarks) -> str:
    """Exactly one call of one of `functions`, without optional white space."""
    rules = []
    for number, function in enumerate(functions):
        name = json.dumps(function["name"], ensure_ascii=False)
        opening = json.dumps(f'{{"name":{name},"arguments":', ensure_ascii=False)
        rules += [f'call{number}: {opening} arguments{number} "}}"', _arguments(number, function)]
    return "\n".join([f'start: {marks.opening} "\\n" ({_calls(functions)}) "\\n" {marks.closing}', *rules, ""])


def strict_grammar(functions: Sequence[dict[str, Any]], marks: CallMarks) -> str:
    """Any text, in which the mark of a call is followed by a call of one of `functions`.

    Arguments of `strict` functions follow their schemas; the space within a call is the model's, up to 8
    characters at a place.
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
        rules.append(_arguments(number, followed, is_spaced=True))
    return "\n".join(["start: part* TEXT?", f"part: {part}", *rules, ""])


def _calls(functions: Sequence[dict[str, Any]]) -> str:
    return " | ".join(f"call{number}" for number in range(len(functions)))


def _arguments(number: int, function: dict[str, Any], *, is_spaced: bool = False) -> str:
    # Each schema stands by itself: what it refers to by "#/$defs/..." is in it.
    options = {"whitespace_flexible": True} if is_spaced else JSON_OPTIONS
    schema = {**(function.get("parameters") or {"type": "object"}), "x-guidance": options}
    return f"arguments{number}: %json {json.dumps(schema)}"
